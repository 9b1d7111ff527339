// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/patch_embed.h>

#include <sherd/kernels/cuda/patch_embed.h>
#include <sherd/kernels/dispatch.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/matmul.h>
#include <sherd/kernels/patch_shape.h>

namespace sherd {
namespace {

// [D, ...] with K elements in the other dimensions.
bool is_weight(const Tensor& x, std::int64_t dim, std::int64_t columns) {
  return x.rank() >= 2 && x.dim(0) == dim && x.numel() == dim * columns;
}

// The kernels count rows, elements of the weight and blocks as int.
void check_size(const char* operation, const arguments::PatchShape& shape, std::int64_t dim) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  const std::int64_t rows = shape.batch * shape.count();
  SHERD_CHECK(rows <= kMost && dim * shape.columns() <= kMost && rows * dim <= (kMost << 10),
              "{} on CUDA: {} patches of {} elements with {} features are too many for one call; "
              "split the batch",
              operation, rows, shape.columns(), dim);
}

std::int64_t flops(const arguments::PatchShape& shape, std::int64_t dim) {
  return 2 * shape.batch * shape.count() * shape.columns() * dim;
}

struct ProductSize {
  std::int64_t m, n, k;
};

// Images and tokens are what is large.
void record_product(const Tensor& images, const ProductSize& size, const Tensor& tokens) {
  Schedule* const schedule = images.context().schedule();
  if (schedule == nullptr) return;
  schedule->add({.kind = Work::Kind::product,
                 .name = "patch_embed",
                 .dtype = images.dtype(),
                 .bytes = bytes_of(images) + bytes_of(tokens),
                 .flops = 2 * size.m * size.n * size.k,
                 .m = size.m,
                 .n = size.n,
                 .k = size.k});
}

}  // namespace

Tensor patch_embed_forward(const Tensor& images, const Tensor& weight, const Tensor& bias,
                           const PatchSize& patch) {
  const arguments::PatchShape shape = patch_shape("patch_embed", images.shape(), patch);
  SHERD_CHECK(weight.rank() >= 2 && is_weight(weight, weight.dim(0), shape.columns()) &&
                  weight.dtype() == images.dtype(),
              "patch_embed: weight {} does not fit patches of {} elements of images {}",
              weight.describe(), shape.columns(), images.describe());
  const std::int64_t dim = weight.dim(0);
  SHERD_CHECK(!bias.defined() || (bias.shape() == Shape{dim} && bias.dtype() == weight.dtype()),
              "patch_embed: bias {} does not fit weight {}", bias.describe(), weight.describe());
  Context& context = images.context();
  if (context.target() != Device::cuda)
    return linear_forward(patchify(images, patch), weight, bias);

  check_size("patch_embed", shape, dim);
  const Tensor x = contiguous(images), w = contiguous(weight);
  const Tensor b = bias.defined() ? contiguous(bias) : bias;
  const Tensor out = Tensor::empty(context, {shape.batch, shape.count(), dim}, x.dtype());
  context.work().matmul_flops += flops(shape, dim);
  record_product(x, {shape.batch * shape.count(), dim, shape.columns()}, out);
  if (context.is_meta() || out.numel() == 0) return out;
  dispatch_floating(x.dtype(), "patch_embed", [&](auto zero) {
    using T = decltype(zero);
    cuda::patch_embed_forward<T>(
        context.compute_stream(),
        {shape, dim, x.data<T>(), w.data<T>(), b.defined() ? b.data<T>() : nullptr, out.data<T>()});
  });
  return out;
}

Tensor patch_embed_backward_weight(const Tensor& grad_output, const Tensor& images,
                                   const PatchSize& patch, const Tensor& out) {
  const arguments::PatchShape shape =
      patch_shape("patch_embed_backward_weight", images.shape(), patch);
  SHERD_CHECK(grad_output.rank() == 3 && grad_output.dim(0) == shape.batch &&
                  grad_output.dim(1) == shape.count() && grad_output.dtype() == images.dtype(),
              "patch_embed_backward_weight: expected a gradient {} [{}, {}, D] for images {}, "
              "got {}",
              name_of(images.dtype()), shape.batch, shape.count(), images.describe(),
              grad_output.describe());
  Context& context = images.context();
  if (context.target() != Device::cuda) {
    return linear_backward_weight(grad_output, patchify(images, patch), out);
  }
  const std::int64_t dim = grad_output.dim(2);
  const DType sums = compute_dtype(images.dtype());
  SHERD_CHECK(!out.defined() || (is_weight(out, dim, shape.columns()) && out.dtype() == sums &&
                                 out.is_contiguous()),
              "patch_embed_backward_weight: the place for the result is a {}, expected contiguous "
              "{} [{}, {}]",
              out.describe(), name_of(sums), dim, shape.columns());
  check_size("patch_embed_backward_weight", shape, dim);
  const Tensor g = contiguous(grad_output), x = contiguous(images);
  const Tensor result = out.defined() ? out : Tensor::empty(context, {dim, shape.columns()}, sums);
  if (out.defined()) out.storage().mark_modified();
  context.work().matmul_flops += flops(shape, dim);
  record_product(x, {dim, shape.columns(), shape.batch * shape.count()}, g);
  dispatch_floating(x.dtype(), "patch_embed_backward_weight", [&](auto zero) {
    using T = decltype(zero);
    using A = arguments::acc_t<T>;
    const Tensor scratch =
        workspace(context, cuda::patch_embed_backward_weight_workspace_bytes<T>(shape, dim));
    if (context.is_meta() || result.numel() == 0) return;
    if (g.numel() == 0) return fill(result, 0.0);  // a sum of nothing
    cuda::patch_embed_backward_weight<T>(context.compute_stream(),
                                         {shape, dim, g.data<T>(), x.data<T>(), result.data<A>(),
                                          static_cast<A*>(workspace_data(scratch))});
  });
  return result;
}

}  // namespace sherd
