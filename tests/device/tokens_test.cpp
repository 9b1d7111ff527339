// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/tokens.h>
#include <sherd/kernels/cuda/tokens.h>

#include "array_support.h"

using namespace sherd;
using arguments::acc_t;
using arguments::TokenShape;
using test::Placed;
using test::random_values;
using test::same_numbers;

namespace {

// batch, tokens, dim; whole vectors of each type and not, more than a block, sums of odd lengths.
constexpr TokenShape kShapes[] = {{1, 1, 1},   {3, 5, 7},    {2, 70, 24}, {19, 3, 64},
                                  {5, 17, 33}, {1, 130, 16}, {9, 2, 520}, {0, 4, 8}};

template <typename Body>
void for_each_case(const Body& body) {
  test::in_all_orders([&] {
    for (const TokenShape& shape : kShapes) {
      for (const std::size_t offset : {0, 1}) {
        CAPTURE(shape.batch);
        CAPTURE(shape.tokens);
        CAPTURE(shape.dim);
        CAPTURE(offset);
        body(shape, offset);
      }
    }
  });
}

std::size_t count_of(std::int64_t batch, std::int64_t tokens, std::int64_t dim) {
  return static_cast<std::size_t>(batch * tokens * dim);
}

}  // namespace

TEST_CASE_TEMPLATE("cuda tokens: class token and positions, and their gradients", T, double, float,
                   bf16, f16) {
  using A = acc_t<T>;
  Stream& stream = test::DeviceArray<T>::stream();
  for_each_case([&](const TokenShape& s, std::size_t offset) {
    for (const bool has_cls : {false, true}) {
      for (const bool has_pos : {false, true}) {
        CAPTURE(has_cls);
        CAPTURE(has_pos);
        const std::int64_t tokens = s.tokens + (has_cls ? 1 : 0);
        const std::size_t n = count_of(s.batch, tokens, s.dim);
        const auto patches = random_values<T>(count_of(s.batch, s.tokens, s.dim), "patches");
        const auto cls = random_values<T>(count_of(1, 1, s.dim), "cls");
        const auto pos = random_values<T>(count_of(1, tokens, s.dim), "pos");
        std::vector<T> expected(n);
        arguments::AssembleTokens<T> p{s.batch,
                                       s.tokens,
                                       s.dim,
                                       patches.data(),
                                       has_cls ? cls.data() : nullptr,
                                       has_pos ? pos.data() : nullptr,
                                       expected.data()};
        cpu::assemble_tokens<T>(1, p);
        const Placed<T> device_patches(patches, offset), device_cls(cls, 0), device_pos(pos, 0),
            out(n, 0);
        p.patches = device_patches.data();
        if (has_cls) p.cls = device_cls.data();
        if (has_pos) p.pos = device_pos.data();
        p.out = out.data();
        cuda::assemble_tokens<T>(stream, p);
        CHECK(same_numbers(out.values(), expected));

        // Here has_pos is whether the gradient of the positions is wanted.
        const auto grad = random_values<T>(n, "grad");
        std::vector<T> grad_patches(patches.size());
        std::vector<A> grad_cls(cls.size()), grad_pos(pos.size());
        arguments::AssembleTokensBackward<T> q;
        q.batch = s.batch;
        q.patch_tokens = s.tokens;
        q.dim = s.dim;
        q.has_cls = has_cls;
        q.grad_out = grad.data();
        q.grad_patches = grad_patches.data();
        q.grad_cls = grad_cls.data();
        if (has_pos) q.grad_pos = grad_pos.data();
        cpu::assemble_tokens_backward<T>(1, q);
        const Placed<T> device_grad(grad, offset), device_grad_patches(grad_patches.size(), 0);
        const Placed<A> device_grad_cls(grad_cls.size(), 0), device_grad_pos(grad_pos.size(), 0);
        q.grad_out = device_grad.data();
        q.grad_patches = device_grad_patches.data();
        q.grad_cls = device_grad_cls.data();
        if (has_pos) q.grad_pos = device_grad_pos.data();
        cuda::assemble_tokens_backward<T>(stream, q);
        CHECK(same_numbers(device_grad_patches.values(), grad_patches));
        CHECK(same_numbers(device_grad_cls.values(), grad_cls));
        CHECK(same_numbers(device_grad_pos.values(), grad_pos));
      }
    }
  });
}

TEST_CASE_TEMPLATE("cuda tokens: pooling and its gradients", T, double, float, bf16, f16) {
  Stream& stream = test::DeviceArray<T>::stream();
  for_each_case([&](const TokenShape& s, std::size_t offset) {
    const std::size_t all = count_of(s.batch, s.tokens, s.dim), one = count_of(s.batch, 1, s.dim);
    const auto in = random_values<T>(all, "in"), grad = random_values<T>(one, "grad");
    const Placed<T> device_in(in, offset), device_grad(grad, offset), out(one, 0), grad_in(all, 0);
    std::vector<T> expected(one), expected_grad(all);
    for (const std::int64_t token : {std::int64_t{0}, s.tokens / 2, s.tokens - 1}) {
      CAPTURE(token);
      cpu::mean_tokens<T>(1, s, token, in.data(), expected.data());
      cuda::mean_tokens<T>(stream, s, token, device_in.data(), out.data());
      CHECK(same_numbers(out.values(), expected));
      cpu::mean_tokens_backward<T>(1, s, token, grad.data(), expected_grad.data());
      cuda::mean_tokens_backward<T>(stream, s, token, device_grad.data(), grad_in.data());
      CHECK(same_numbers(grad_in.values(), expected_grad));
      cpu::select_token<T>(1, s, token, in.data(), expected.data());
      cuda::select_token<T>(stream, s, token, device_in.data(), out.data());
      CHECK(same_numbers(out.values(), expected));
      cpu::select_token_backward<T>(1, s, token, grad.data(), expected_grad.data());
      cuda::select_token_backward<T>(stream, s, token, device_grad.data(), grad_in.data());
      CHECK(same_numbers(grad_in.values(), expected_grad));
    }
  });
}
