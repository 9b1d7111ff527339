// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/activation.h>

#include <sherd/kernels/cpu/elementwise.h>
#include <sherd/kernels/cpu/gelu.h>
#include <sherd/kernels/cuda/elementwise.h>
#include <sherd/kernels/cuda/gelu.h>
#include <sherd/kernels/dispatch.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/matmul.h>

namespace sherd {

using arguments::GeluForm;

std::string_view name_of(Activation activation) {
  switch (activation) {
    case Activation::none: return "none";
    case Activation::relu: return "relu";
    case Activation::gelu_erf: return "gelu";
    case Activation::gelu_tanh: return "gelu_tanh";
  }
  fail("name_of: unknown activation {}", static_cast<int>(activation));
}

Activation activation_from_name(std::string_view name) {
  if (name == "none") return Activation::none;
  if (name == "relu") return Activation::relu;
  if (name == "gelu" || name == "erf" || name == "gelu_erf") return Activation::gelu_erf;
  if (name == "gelu_tanh" || name == "tanh") return Activation::gelu_tanh;
  fail("unknown activation '{}': expected gelu, gelu_tanh, relu or none", name);
}

namespace {

bool is_gelu(Activation activation) {
  return activation == Activation::gelu_erf || activation == Activation::gelu_tanh;
}

}  // namespace

Tensor activation_forward(const Tensor& input, Activation activation) {
  const Tensor x = contiguous(input);
  Context& context = x.context();
  const Tensor out = Tensor::empty(context, x.shape(), x.dtype());
  record_kernel(is_gelu(activation) ? "gelu_forward" : "relu_forward", x, out);
  if (context.is_meta()) return out;
  const std::int64_t n = x.numel();
  dispatch_floating(x.dtype(), "activation", [&](auto zero) {
    using T = decltype(zero);
    const T* from = x.data<T>();
    T* to = out.data<T>();
    switch (activation) {
      case Activation::none: return SHERD_RUN_KERNEL(x, cast, n, from, to);
      case Activation::relu: return SHERD_RUN_KERNEL(x, relu_forward, n, from, to);
      case Activation::gelu_erf:
        return SHERD_RUN_KERNEL(x, gelu_forward, n, GeluForm::exact, from, to);
      case Activation::gelu_tanh:
        return SHERD_RUN_KERNEL(x, gelu_forward, n, GeluForm::tanh, from, to);
    }
  });
  return out;
}

Tensor activation_backward(const Tensor& grad_output, const Tensor& input, Activation activation) {
  const Tensor g = contiguous(grad_output), x = contiguous(input);
  check_same("activation_backward", g, x);
  Context& context = x.context();
  const Tensor out = Tensor::empty(context, x.shape(), x.dtype());
  record_kernel(is_gelu(activation) ? "gelu_backward" : "relu_backward", x, g, out);
  if (context.is_meta()) return out;
  const std::int64_t n = x.numel();
  dispatch_floating(x.dtype(), "activation_backward", [&](auto zero) {
    using T = decltype(zero);
    const T *from = x.data<T>(), *grad = g.data<T>();
    T* to = out.data<T>();
    switch (activation) {
      case Activation::none: return SHERD_RUN_KERNEL(x, cast, n, grad, to);
      case Activation::relu: return SHERD_RUN_KERNEL(x, relu_backward, n, from, grad, to);
      case Activation::gelu_erf:
        return SHERD_RUN_KERNEL(x, gelu_backward, n, GeluForm::exact, from, grad, to);
      case Activation::gelu_tanh:
        return SHERD_RUN_KERNEL(x, gelu_backward, n, GeluForm::tanh, from, grad, to);
    }
  });
  return out;
}

ActivationGradients activation_backward_with_bias(const Tensor& grad_output, const Tensor& input,
                                                  Activation activation) {
  Context& context = input.context();
  if (context.target() != Device::cuda || !is_gelu(activation)) {
    const Tensor grad_input = activation_backward(grad_output, input, activation);
    return {grad_input, linear_backward_bias(grad_input)};
  }
  const Tensor g = contiguous(grad_output), x = contiguous(input);
  check_same("activation_backward_with_bias", g, x);
  const std::int64_t cols = x.dim(-1), rows = cols == 0 ? 0 : x.numel() / cols;
  const ActivationGradients out{Tensor::empty(context, x.shape(), x.dtype()),
                                Tensor::empty(context, {cols}, compute_dtype(x.dtype()))};
  dispatch_floating(x.dtype(), "activation_backward_with_bias", [&](auto zero) {
    using T = decltype(zero);
    using A = arguments::acc_t<T>;
    const Tensor scratch =
        workspace(context, cuda::gelu_backward_sums_workspace_bytes<T>(rows, cols));
    record_kernel("gelu_backward", x, g, out.input);
    if (context.is_meta()) return;
    arguments::GeluBackwardSums<T> p;
    p.rows = rows;
    p.cols = cols;
    p.form = activation == Activation::gelu_erf ? GeluForm::exact : GeluForm::tanh;
    p.input = x.data<T>();
    p.grad_output = g.data<T>();
    p.grad_input = out.input.data<T>();
    p.grad_bias = out.bias.data<A>();
    p.workspace = static_cast<A*>(workspace_data(scratch));
    cuda::gelu_backward_sums<T>(context.compute_stream(), p);
  });
  return out;
}

}  // namespace sherd
