// SPDX-License-Identifier: Apache-2.0
// One table of every differentiable operation: a name, the shapes of its inputs, the function.
#pragma once

#include <sherd/autograd/operations.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/random.h>
#include <sherd/runtime/cuda/device.h>

#include <cmath>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace sherd::test {

struct Case {
  std::string name;
  std::vector<Shape> inputs;
  std::function<Variable(std::span<const Variable>)> f;
};

// Where operations are tested: on the processor, and on a GPU (or its emulator) where there is one.
inline std::vector<Device> test_devices() {
  if (cuda::device_count() > 0) return {Device::cpu, Device::cuda};
  return {Device::cpu};
}

inline Tensor random_tensor(Context& context, const Shape& shape, const std::string& name) {
  const Tensor x = Tensor::empty(context, shape, DType::f64);
  fill_normal(x, 0.1, 0.9, RandomStream(3, "test", name));
  return x;
}

inline CrossEntropyTarget some_labels(Context& context, std::int64_t rows, std::int64_t classes,
                                      double smoothing) {
  std::vector<std::int64_t> labels;
  for (std::int64_t r = 0; r < rows; ++r) labels.push_back((r * 7 + 3) % classes);
  return {Tensor::from_host<std::int64_t>(context, {rows}, labels), {}, smoothing};
}

// Of the type that goes with the logits.
inline CrossEntropyTarget some_probabilities(const Tensor& logits) {
  const std::int64_t rows = logits.dim(0), classes = logits.dim(1);
  std::vector<double> p(static_cast<std::size_t>(rows * classes));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < classes; ++c) {
      p[static_cast<std::size_t>(r * classes + c)] =
          2.0 * static_cast<double>(c + 1) / static_cast<double>(classes * (classes + 1));
    }
  }
  const Tensor exact = Tensor::from_host<double>(logits.context(), {rows, classes}, p);
  return {{}, cast(exact, logits.dtype() == DType::f64 ? DType::f64 : DType::f32), 0.0};
}

inline Case attention_case(std::int64_t batch, std::int64_t n, std::int64_t m, std::int64_t heads,
                           std::int64_t dim) {
  return {
      "attention n=" + std::to_string(n) + " m=" + std::to_string(m) + " d=" + std::to_string(dim),
      {{batch, n, heads, dim}, {batch, m, heads, dim}, {batch, m, heads, dim}},
      [dim](auto in) {
        return attention(in[0], in[1], in[2], 1.0 / std::sqrt(static_cast<double>(dim)));
      }};
}

inline Case packed_case(std::int64_t batch, std::int64_t n, std::int64_t heads, std::int64_t dim) {
  return {"attention_packed n=" + std::to_string(n) + " d=" + std::to_string(dim),
          {{batch, n, 3 * heads * dim}},
          [=](auto in) {
            return attention_packed(in[0], heads, 1.0 / std::sqrt(static_cast<double>(dim)));
          }};
}

inline std::vector<Case> cases(Context& context) {
  return {
      {"add", {{3, 17}, {3, 17}}, [](auto in) { return add(in[0], in[1]); }},
      {"add of itself", {{5}}, [](auto in) { return add(in[0], in[0]); }},
      {"scale", {{7, 3}}, [](auto in) { return scale(in[0], -1.7); }},
      {"cast", {{4, 5}}, [](auto in) { return cast(in[0], DType::f64); }},
      {"reshape",
       {{2, 3, 4}},
       [](auto in) {
         return reshape(in[0], {6, 4});
       }},
      {"permute",
       {{2, 3, 4}},
       [](auto in) {
         return permute(in[0], {2, 0, 1});
       }},
      {"sum", {{3, 5, 2}}, [](auto in) { return sum(in[0]); }},
      {"matmul", {{5, 7}, {7, 3}}, [](auto in) { return matmul(in[0], in[1]); }},
      {"linear", {{2, 5, 7}, {3, 7}, {3}}, [](auto in) { return linear(in[0], in[1], in[2]); }},
      {"linear with a convolution's weight",
       {{4, 12}, {5, 3, 2, 2}, {5}},
       [](auto in) { return linear(in[0], in[1], in[2]); }},
      {"linear without bias", {{4, 7}, {3, 7}}, [](auto in) { return linear(in[0], in[1], {}); }},
      {"linear with gelu",
       {{3, 5}, {4, 5}, {4}},
       [](auto in) { return linear_activation(in[0], in[1], in[2], Activation::gelu_erf); }},
      {"linear with gelu for training",
       {{3, 5}, {4, 5}, {4}},
       [](auto in) { return linear(in[0], in[1], in[2], Activation::gelu_erf); }},
      {"linear with gelu_tanh for training, many rows",
       {{2, 70, 3}, {9, 3}, {9}},
       [](auto in) { return linear(in[0], in[1], in[2], Activation::gelu_tanh); }},
      {"linear with relu for training",
       {{3, 5}, {4, 5}, {4}},
       [](auto in) { return linear(in[0], in[1], in[2], Activation::relu); }},
      {"linear with gelu without bias",
       {{3, 5}, {4, 5}},
       [](auto in) { return linear(in[0], in[1], {}, Activation::gelu_erf); }},
      {"relu", {{3, 17}}, [](auto in) { return activate(in[0], Activation::relu); }},
      {"gelu", {{3, 17}}, [](auto in) { return activate(in[0], Activation::gelu_erf); }},
      {"gelu_tanh", {{3, 17}}, [](auto in) { return activate(in[0], Activation::gelu_tanh); }},
      {"layer_norm",
       {{2, 3, 19}, {19}, {19}},
       [](auto in) { return layer_norm(in[0], in[1], in[2], 1e-6); }},
      {"layer_norm, 150 rows",
       {{150, 5}, {5}, {5}},
       [](auto in) { return layer_norm(in[0], in[1], in[2], 1e-5); }},
      {"add_layer_norm",
       {{4, 3, 19}, {4, 3, 19}, {19}, {19}},
       [](auto in) {
         const SumAndNorm both = add_layer_norm(in[0], in[1], in[2], in[3], 1e-6);
         return add(both.sum, both.norm);
       }},
      {"layer_norm beside a residual",
       {{4, 9}, {9}, {9}},
       [](auto in) { return add(in[0], layer_norm(in[0], in[1], in[2], 1e-6)); }},
      attention_case(1, 1, 1, 1, 1),
      attention_case(2, 5, 3, 2, 4),
      attention_case(1, 50, 50, 1, 64),
      attention_case(1, 17, 33, 2, 80),
      attention_case(1, 197, 197, 1, 64),
      attention_case(1, 257, 257, 1, 80),
      packed_case(2, 1, 3, 4),
      packed_case(2, 17, 2, 5),
      packed_case(1, 50, 2, 64),
      {"cross_entropy",
       {{6, 5}},
       [&](auto in) { return cross_entropy(in[0], some_labels(context, 6, 5, 0.0)); }},
      {"cross_entropy, smoothed",
       {{6, 10}},
       [&](auto in) { return cross_entropy(in[0], some_labels(context, 6, 10, 0.1), 8); }},
      {"cross_entropy, soft targets",
       {{4, 7}},
       [&](auto in) { return cross_entropy(in[0], some_probabilities(in[0].tensor())); }},
      {"patchify",
       {{2, 3, 8, 4}},
       [](auto in) {
         return patchify(in[0], {1, 4, 2});
       }},
      {"patchify 3-D",
       {{2, 3, 4, 4, 6}},
       [](auto in) {
         return patchify(in[0], {2, 2, 3});
       }},
      {"patch_embed",
       {{2, 3, 8, 4}, {5, 3, 4, 2}, {5}},
       [](auto in) {
         return patch_embed(in[0], in[1], in[2], {1, 4, 2});
       }},
      {"patch_embed 3-D without bias",
       {{2, 3, 4, 4, 6}, {4, 36}},
       [](auto in) {
         return patch_embed(in[0], in[1], {}, {2, 2, 3});
       }},
      {"assemble_tokens",
       {{2, 4, 5}, {1, 1, 5}, {1, 5, 5}},
       [](auto in) { return assemble_tokens(in[0], in[1], in[2]); }},
      {"assemble_tokens without class token",
       {{2, 4, 5}, {1, 4, 5}},
       [](auto in) { return assemble_tokens(in[0], {}, in[1]); }},
      {"select_token", {{2, 4, 5}}, [](auto in) { return select_token(in[0], 2); }},
      {"mean_tokens", {{2, 4, 5}}, [](auto in) { return mean_tokens(in[0], 1); }},
      {"dropout", {{4, 33}}, [](auto in) { return dropout(in[0], 0.3, "layer"); }},
      {"drop_path",
       {{9, 3, 5}, {9, 3, 5}},
       [](auto in) { return add_drop_path(in[0], in[1], 0.4, "layer"); }},
  };
}

}  // namespace sherd::test
