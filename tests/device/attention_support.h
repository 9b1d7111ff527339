// SPDX-License-Identifier: Apache-2.0
// For tests of attention on a device: one problem, computed by the CPU's kernel in its own type and
// in fp64, and by the device's.
#pragma once

#include <sherd/kernels/cpu/attention.h>
#include <sherd/kernels/cuda/attention.h>

#include <cstring>
#include <map>
#include <string>

#include "device_support.h"

namespace sherd::test {

using arguments::AttentionShape;
using arguments::AttentionView;

// Where a [batch, tokens, heads, head_dim] lies in an array.
struct Placement {
  std::int64_t offset = 0, tokens = 0, batch_stride = 0, token_stride = 0, head_stride = 0;

  // Copy `copy` of a packed [batch, tokens, copies, heads, head_dim + hole].
  Placement(const AttentionShape& s, std::int64_t start, std::int64_t token_count, int copies,
            int copy, int hole)
      : tokens(token_count) {
    head_stride = s.head_dim + hole;
    token_stride = copies * s.heads * head_stride;
    batch_stride = tokens * token_stride;
    offset = start + copy * s.heads * head_stride;
  }
  template <typename T>
  AttentionView<T> in(T* data) const {
    return {data + offset, batch_stride, token_stride, head_stride};
  }
  template <typename Visit>
  void each(const AttentionShape& s, const Visit& visit) const {
    for (std::int64_t b = 0; b < s.batch; ++b) {
      for (std::int64_t n = 0; n < tokens; ++n) {
        for (std::int64_t h = 0; h < s.heads; ++h) {
          for (std::int64_t d = 0; d < s.head_dim; ++d) {
            visit(static_cast<std::size_t>(offset + b * batch_stride + n * token_stride +
                                           h * head_stride + d));
          }
        }
      }
    }
  }
};

// How q, k and v (and their gradients) lie: in one packed array where queries and keys are as many,
// else queries apart. `hole` elements follow each row of head_dim; all begins `shift` elements into
// the array.
struct Layout {
  Layout(const AttentionShape& s, int hole, int shift)
      : q(s, shift, s.queries, s.queries == s.keys ? 3 : 1, 0, hole),
        k(s, s.queries == s.keys ? shift : shift + s.batch * q.batch_stride, s.keys,
          s.queries == s.keys ? 3 : 2, s.queries == s.keys ? 1 : 0, hole),
        v(s, s.queries == s.keys ? shift : shift + s.batch * q.batch_stride, s.keys,
          s.queries == s.keys ? 3 : 2, s.queries == s.keys ? 2 : 1, hole),
        output(s, shift, s.queries, 1, 0, hole) {
    input_size = static_cast<std::size_t>(
        s.queries == s.keys ? shift + s.batch * q.batch_stride
                            : shift + s.batch * (q.batch_stride + k.batch_stride));
    output_size = static_cast<std::size_t>(shift + s.batch * output.batch_stride);
  }
  Placement q, k, v, output;
  std::size_t input_size = 0, output_size = 0;
};

using Results = std::map<std::string, std::vector<double>>;

template <typename T>
struct AttentionProblem {
  AttentionProblem(const AttentionShape& s, int hole = 0, int shift = 0, double size = 1.0,
                   double mean = 0.0)
      : shape(s),
        layout(s, hole, shift),
        inputs(random_values<T>(layout.input_size, "inputs", size, mean)),
        grad_output(random_values<T>(layout.output_size, "grad_output")) {}

  // By the CPU's kernel of type R, from these values.
  template <typename R>
  Results on_cpu() const {
    const auto convert = [](const std::vector<T>& from) {
      std::vector<R> to(from.size());
      for (std::size_t i = 0; i < from.size(); ++i) {
        if constexpr (std::is_same_v<R, T>) {
          to[i] = from[i];
        } else {
          to[i] = static_cast<R>(as_double(from[i]));
        }
      }
      return to;
    };
    const std::vector<R> in = convert(inputs), g = convert(grad_output);
    std::vector<R> out(g.size()), grads(in.size());
    std::vector<arguments::acc_t<R>> lse(rows());
    std::vector<char> scratch(std::max(cpu::attention_workspace_bytes<R>(shape, 1, false),
                                       cpu::attention_workspace_bytes<R>(shape, 1, true)));
    const auto q = layout.q.in(in.data()), k = layout.k.in(in.data()), v = layout.v.in(in.data());
    cpu::attention_forward<R>(shape, q, k, v, layout.output.in(out.data()), lse.data(),
                              scratch.data(), 1);
    cpu::attention_backward<R>(shape, layout.output.in(g.data()), q, k, v,
                               layout.output.in(std::as_const(out).data()), lse.data(),
                               layout.q.in(grads.data()), layout.k.in(grads.data()),
                               layout.v.in(grads.data()), scratch.data(), 1);
    return collect(out, lse, grads);
  }

  // By the device's kernel. Nothing but elements of results, and of the workspace, is written.
  Results on_device() const {
    Stream& stream = DeviceArray<T>::stream();
    const DeviceArray<T> in(inputs), g(grad_output), out(layout.output_size),
        grads(layout.input_size);
    const DeviceArray<arguments::acc_t<T>> lse(rows());
    const auto input = [&](const Placement& place) {
      return place.in(static_cast<const T*>(in.data()));
    };
    const auto q = input(layout.q), k = input(layout.k), v = input(layout.v);
    const auto workspace = [&](bool backward) {
      return DeviceArray<char>(cuda::attention_workspace_bytes<T>(shape, backward));
    };
    {
      const auto scratch = workspace(false);
      cuda::attention_forward<T>(stream, shape, q, k, v, layout.output.in(out.data()), lse.data(),
                                 scratch.data());
    }
    if (with_backward) {
      const auto scratch = workspace(true);
      cuda::attention_backward<T>(stream, shape, layout.output.in(static_cast<const T*>(g.data())),
                                  q, k, v, layout.output.in(static_cast<const T*>(out.data())),
                                  lse.data(), layout.q.in(grads.data()), layout.k.in(grads.data()),
                                  layout.v.in(grads.data()), scratch.data());
    }
    check_holes(out.values(), {&layout.output});
    if (with_backward) check_holes(grads.values(), {&layout.q, &layout.k, &layout.v});
    return collect(out.values(), lse.values(), grads.values());
  }

  AttentionShape shape;
  Layout layout;
  std::vector<T> inputs, grad_output;
  bool with_backward = true;

 private:
  std::size_t rows() const {
    return static_cast<std::size_t>(shape.batch * shape.heads * shape.queries);
  }
  template <typename R>
  static double as_double(R value) {
    if constexpr (sizeof(R) == 2) {
      return static_cast<double>(static_cast<float>(value));
    } else {
      return static_cast<double>(value);
    }
  }
  template <typename R>
  Results collect(const std::vector<R>& out, const std::vector<arguments::acc_t<R>>& lse,
                  const std::vector<R>& grads) const {
    Results results;
    const auto add = [&](const char* name, const std::vector<R>& from, const Placement& place) {
      std::vector<double>& to = results[name];
      place.each(shape, [&](std::size_t i) { to.push_back(as_double(from[i])); });
    };
    add("output", out, layout.output);
    results["lse"] = std::vector<double>(lse.begin(), lse.end());
    if (with_backward) {
      add("grad_q", grads, layout.q);
      add("grad_k", grads, layout.k);
      add("grad_v", grads, layout.v);
    }
    return results;
  }
  // What is between elements is as it was.
  void check_holes(std::vector<T> values, const std::vector<const Placement*>& places) const {
    T poison;
    std::memset(static_cast<void*>(&poison), 0xff, sizeof poison);
    for (const Placement* place : places)
      place->each(shape, [&](std::size_t i) { values[i] = poison; });
    const bool intact = std::ranges::all_of(
        values, [&](const T& x) { return std::memcmp(&x, &poison, sizeof x) == 0; });
    CHECK_MESSAGE(intact, "a kernel wrote between the rows of a view");
  }
};

// The device's results against fp64, within a multiple of the error of the CPU's kernel; the same
// bits in every order.
template <typename T>
void check_attention(const AttentionProblem<T>& problem) {
  const AttentionShape& s = problem.shape;
  CAPTURE(s.batch);
  CAPTURE(s.heads);
  CAPTURE(s.queries);
  CAPTURE(s.keys);
  CAPTURE(s.head_dim);
  const Results reference = problem.template on_cpu<double>(), plain = problem.template on_cpu<T>();
  Results first;
  in_all_orders([&] {
    const Results results = problem.on_device();
    if (first.empty()) first = results;
    CHECK(first == results);
  });
  // For sizes at which the CPU's result is exact by chance: one rounding of T. In fp64 the CPU's
  // result is the reference itself.
  const double rounding = std::is_same_v<T, double>  ? 0x1p-48
                          : std::is_same_v<T, float> ? 0x1p-23
                          : std::is_same_v<T, f16>   ? 0x1p-11
                                                     : 0x1p-8;
  for (const auto& result : first) {
    const std::string& name = result.first;
    const double error = error_of(result.second, reference.at(name));
    const double allowed = error_of(plain.at(name), reference.at(name));
    const double factor = name == "output" ? 2.0 : name == "lse" ? 4.0 : 3.0;
    const double least = name == "lse" && sizeof(T) == 2 ? 0x1p-23 : rounding;
    CAPTURE(name);
    CHECK(error <= factor * std::max(allowed, least));
  }
}

}  // namespace sherd::test
