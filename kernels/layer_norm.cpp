// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/layer_norm.h>

#include <sherd/kernels/cpu/layer_norm.h>
#include <sherd/kernels/cuda/layer_norm.h>
#include <sherd/kernels/dispatch.h>
#include <sherd/kernels/elementwise.h>

namespace sherd {

LayerNormOutput layer_norm_forward(const Tensor& input, const Tensor& weight, const Tensor& bias,
                                   double eps, const Tensor& residual) {
  SHERD_CHECK(input.rank() >= 1, "layer_norm: input {} has no dimension to normalise",
              input.describe());
  const Shape features{input.dim(-1)};
  SHERD_CHECK(weight.shape() == features && bias.shape() == features,
              "layer_norm: weight {} and bias {} must be {} for input {}", weight.describe(),
              bias.describe(), features.to_string(), input.describe());
  SHERD_CHECK(weight.dtype() == input.dtype() && bias.dtype() == input.dtype(),
              "layer_norm: input {}, weight {} and bias {} must have one type", input.describe(),
              weight.describe(), bias.describe());
  if (residual.defined()) check_same("layer_norm", residual, input);
  const Tensor added = residual.defined() ? contiguous(residual) : residual;
  const Tensor x = contiguous(input), w = contiguous(weight), b = contiguous(bias);
  Context& context = x.context();
  const std::int64_t cols = x.dim(-1), rows = cols == 0 ? 0 : x.numel() / cols;
  const DType statistics = compute_dtype(x.dtype());
  LayerNormOutput out;
  if (added.defined()) out.sum = Tensor::empty(context, x.shape(), x.dtype());
  out.output = Tensor::empty(context, x.shape(), x.dtype());
  out.mean = Tensor::empty(context, {rows}, statistics);
  out.rstd = Tensor::empty(context, {rows}, statistics);
  record_kernel("layer_norm_forward", x, added, out.sum, out.output);
  if (context.is_meta()) return out;
  dispatch_floating(x.dtype(), "layer_norm", [&](auto zero) {
    using T = decltype(zero);
    using A = arguments::acc_t<T>;
    arguments::LayerNormForward<T> p;
    p.rows = rows;
    p.cols = cols;
    p.input = x.data<T>();
    if (added.defined()) {
      p.residual = added.data<T>();
      p.sum = out.sum.data<T>();
    }
    p.weight = w.data<T>();
    p.bias = b.data<T>();
    p.eps = static_cast<A>(eps);
    p.output = out.output.data<T>();
    p.mean = out.mean.data<A>();
    p.rstd = out.rstd.data<A>();
    if (context.target() == Device::cuda) {
      cuda::layer_norm_forward<T>(context.compute_stream(), p);
    } else {
      cpu::layer_norm_forward<T>(context.threads(), p);
    }
  });
  return out;
}

LayerNormGradients layer_norm_backward(const Tensor& grad_output, const Tensor& input,
                                       const Tensor& mean, const Tensor& rstd, const Tensor& weight,
                                       bool want_input, bool want_weight,
                                       const Tensor& accumulated) {
  check_same("layer_norm_backward", grad_output, input);
  const Tensor g = contiguous(grad_output), x = contiguous(input), w = contiguous(weight);
  Context& context = x.context();
  const std::int64_t cols = x.dim(-1), rows = cols == 0 ? 0 : x.numel() / cols;
  check_statistic("layer_norm_backward", mean, {rows}, x.dtype());
  check_statistic("layer_norm_backward", rstd, {rows}, x.dtype());
  SHERD_CHECK(w.shape() == Shape{cols} && w.dtype() == x.dtype(),
              "layer_norm_backward: weight {} does not fit input {}", w.describe(), x.describe());
  if (accumulated.defined()) check_same("layer_norm_backward", accumulated, x);
  const DType statistics = compute_dtype(x.dtype());
  LayerNormGradients grads;
  if (want_input) {
    grads.input =
        accumulated.defined() ? accumulated : Tensor::empty(context, x.shape(), x.dtype());
    if (accumulated.defined()) accumulated.storage().mark_modified();
  }
  if (want_weight) {
    grads.weight = Tensor::empty(context, {cols}, statistics);
    grads.bias = Tensor::empty(context, {cols}, statistics);
  }
  dispatch_floating(x.dtype(), "layer_norm_backward", [&](auto zero) {
    using T = decltype(zero);
    using A = arguments::acc_t<T>;
    const bool on_cuda = context.target() == Device::cuda;
    const std::size_t bytes = on_cuda ? cuda::layer_norm_backward_workspace_bytes<T>(rows, cols)
                                      : cpu::layer_norm_backward_workspace_bytes<T>(rows, cols);
    const Tensor scratch = workspace(context, want_weight ? bytes : 0);
    record_kernel("layer_norm_backward", x, g, grads.input, accumulated);
    if (context.is_meta()) return;
    arguments::LayerNormBackward<T> p;
    p.rows = rows;
    p.cols = cols;
    p.input = x.data<T>();
    p.weight = w.data<T>();
    p.mean = mean.data<A>();
    p.rstd = rstd.data<A>();
    p.grad_output = g.data<T>();
    p.accumulate = accumulated.defined();
    if (want_input) p.grad_input = grads.input.data<T>();
    if (want_weight) {
      p.grad_weight = grads.weight.data<A>();
      p.grad_bias = grads.bias.data<A>();
      p.workspace = static_cast<A*>(workspace_data(scratch));
    }
    if (on_cuda) {
      cuda::layer_norm_backward<T>(context.compute_stream(), p);
    } else {
      cpu::layer_norm_backward<T>(context.threads(), p);
    }
  });
  return grads;
}

}  // namespace sherd
