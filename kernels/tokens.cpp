// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/tokens.h>

#include <sherd/kernels/cpu/patchify.h>
#include <sherd/kernels/cpu/tokens.h>
#include <sherd/kernels/cuda/patchify.h>
#include <sherd/kernels/cuda/tokens.h>
#include <sherd/kernels/dispatch.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/patch_shape.h>

namespace sherd {
namespace {

arguments::TokenShape token_shape(const Tensor& tokens) {
  SHERD_CHECK(tokens.rank() == 3, "expected tokens [B, N, D], got {}", tokens.describe());
  return {tokens.dim(0), tokens.dim(1), tokens.dim(2)};
}

}  // namespace

Tensor patchify(const Tensor& images, const PatchSize& patch) {
  const arguments::PatchShape shape = patch_shape("patchify", images.shape(), patch);
  const Tensor x = contiguous(images);
  Context& context = x.context();
  const Tensor out =
      Tensor::empty(context, {shape.batch, shape.count(), shape.columns()}, x.dtype());
  record_kernel("patchify", x, out);
  if (context.is_meta() || out.numel() == 0) return out;
  SHERD_RUN_KERNEL(out, patchify, shape, size_of(x.dtype()), x.raw_data(), out.raw_data());
  return out;
}

Tensor unpatchify(const Tensor& patches, const Shape& images, const PatchSize& patch) {
  const arguments::PatchShape shape = patch_shape("unpatchify", images, patch);
  SHERD_CHECK(patches.numel() == images.numel(), "unpatchify: {} does not hold images {}",
              patches.describe(), images.to_string());
  const Tensor x = contiguous(patches);
  Context& context = x.context();
  const Tensor out = Tensor::empty(context, images, x.dtype());
  record_kernel("unpatchify", x, out);
  if (context.is_meta() || out.numel() == 0) return out;
  SHERD_RUN_KERNEL(out, unpatchify, shape, size_of(x.dtype()), x.raw_data(), out.raw_data());
  return out;
}

Tensor assemble_tokens(const Tensor& patches, const Tensor& class_token, const Tensor& position) {
  const arguments::TokenShape shape = token_shape(patches);
  const std::int64_t tokens = shape.tokens + (class_token.defined() ? 1 : 0);
  const auto fits = [&](const Tensor& x, const Shape& expected) {
    SHERD_CHECK(x.shape() == expected && x.dtype() == patches.dtype(),
                "assemble_tokens: expected {} {} beside patches {}, got {}",
                name_of(patches.dtype()), expected.to_string(), patches.describe(), x.describe());
  };
  if (class_token.defined()) fits(class_token, {1, 1, shape.dim});
  fits(position, {1, tokens, shape.dim});
  const Tensor x = contiguous(patches), pos = contiguous(position);
  const Tensor cls = class_token.defined() ? contiguous(class_token) : class_token;
  Context& context = x.context();
  const Tensor out = Tensor::empty(context, {shape.batch, tokens, shape.dim}, x.dtype());
  record_kernel("assemble_tokens", x, pos, out);
  if (context.is_meta()) return out;
  dispatch_floating(x.dtype(), "assemble_tokens", [&](auto zero) {
    using T = decltype(zero);
    arguments::AssembleTokens<T> p;
    p.batch = shape.batch;
    p.patch_tokens = shape.tokens;
    p.dim = shape.dim;
    p.patches = x.data<T>();
    if (cls.defined()) p.cls = cls.data<T>();
    p.pos = pos.data<T>();
    p.out = out.data<T>();
    SHERD_RUN_KERNEL(x, assemble_tokens<T>, p);
  });
  return out;
}

TokenGradients assemble_tokens_backward(const Tensor& grad_output, bool has_class_token) {
  const arguments::TokenShape shape = token_shape(grad_output);
  const Tensor g = contiguous(grad_output);
  Context& context = g.context();
  const DType sums = compute_dtype(g.dtype());
  const std::int64_t patch_tokens = shape.tokens - (has_class_token ? 1 : 0);
  TokenGradients grads;
  grads.patches = Tensor::empty(context, {shape.batch, patch_tokens, shape.dim}, g.dtype());
  if (has_class_token) grads.class_token = Tensor::empty(context, {1, 1, shape.dim}, sums);
  grads.position = Tensor::empty(context, {1, shape.tokens, shape.dim}, sums);
  record_kernel("assemble_tokens_backward", g, grads.patches, grads.position);
  if (!context.is_meta()) {
    dispatch_floating(g.dtype(), "assemble_tokens_backward", [&](auto zero) {
      using T = decltype(zero);
      arguments::AssembleTokensBackward<T> p;
      p.batch = shape.batch;
      p.patch_tokens = patch_tokens;
      p.dim = shape.dim;
      p.has_cls = has_class_token;
      p.grad_out = g.data<T>();
      p.grad_patches = grads.patches.data<T>();
      if (has_class_token) p.grad_cls = grads.class_token.data<cpu::acc_t<T>>();
      p.grad_pos = grads.position.data<cpu::acc_t<T>>();
      SHERD_RUN_KERNEL(g, assemble_tokens_backward<T>, p);
    });
  }
  return grads;
}

Tensor select_token(const Tensor& tokens, std::int64_t index) {
  const arguments::TokenShape shape = token_shape(tokens);
  SHERD_CHECK(index >= 0 && index < shape.tokens, "select_token: token {} of {}", index,
              tokens.describe());
  const Tensor x = contiguous(tokens);
  Context& context = x.context();
  const Tensor out = Tensor::empty(context, {shape.batch, shape.dim}, x.dtype());
  record_kernel("select_token", out, out);
  if (context.is_meta()) return out;
  dispatch_floating(x.dtype(), "select_token", [&](auto zero) {
    using T = decltype(zero);
    SHERD_RUN_KERNEL(x, select_token<T>, shape, index, x.data<T>(), out.data<T>());
  });
  return out;
}

Tensor select_token_backward(const Tensor& grad_output, std::int64_t count, std::int64_t index) {
  const Tensor g = contiguous(grad_output);
  Context& context = g.context();
  const arguments::TokenShape shape{g.dim(0), count, g.dim(1)};
  const Tensor out = Tensor::empty(context, {shape.batch, count, shape.dim}, g.dtype());
  record_kernel("select_token_backward", g, out);
  if (context.is_meta()) return out;
  dispatch_floating(g.dtype(), "select_token_backward", [&](auto zero) {
    using T = decltype(zero);
    SHERD_RUN_KERNEL(g, select_token_backward<T>, shape, index, g.data<T>(), out.data<T>());
  });
  return out;
}

Tensor mean_tokens(const Tensor& tokens, std::int64_t first) {
  const arguments::TokenShape shape = token_shape(tokens);
  SHERD_CHECK(first >= 0 && first < shape.tokens, "mean_tokens: from token {} of {}", first,
              tokens.describe());
  const Tensor x = contiguous(tokens);
  Context& context = x.context();
  const Tensor out = Tensor::empty(context, {shape.batch, shape.dim}, x.dtype());
  record_kernel("mean_tokens", out, x);
  if (context.is_meta()) return out;
  dispatch_floating(x.dtype(), "mean_tokens", [&](auto zero) {
    using T = decltype(zero);
    SHERD_RUN_KERNEL(x, mean_tokens<T>, shape, first, x.data<T>(), out.data<T>());
  });
  return out;
}

Tensor mean_tokens_backward(const Tensor& grad_output, std::int64_t count, std::int64_t first) {
  const Tensor g = contiguous(grad_output);
  Context& context = g.context();
  const arguments::TokenShape shape{g.dim(0), count, g.dim(1)};
  const Tensor out = Tensor::empty(context, {shape.batch, count, shape.dim}, g.dtype());
  record_kernel("mean_tokens_backward", g, out);
  if (context.is_meta()) return out;
  dispatch_floating(g.dtype(), "mean_tokens_backward", [&](auto zero) {
    using T = decltype(zero);
    SHERD_RUN_KERNEL(g, mean_tokens_backward<T>, shape, first, g.data<T>(), out.data<T>());
  });
  return out;
}

}  // namespace sherd
