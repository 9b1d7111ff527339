// SPDX-License-Identifier: Apache-2.0
// Activation functions. gelu_erf is x Φ(x), gelu_tanh its approximation (Hendrycks and Gimpel,
// 2016).
#pragma once

#include <sherd/kernels/arguments/activation.h>
#include <sherd/runtime/tensor.h>

#include <string_view>

namespace sherd {

SHERD_API std::string_view name_of(Activation activation);
SHERD_API Activation activation_from_name(std::string_view name);  // throws on an unknown name

SHERD_API Tensor activation_forward(const Tensor& input, Activation activation);
// grad_input = grad_output * f'(input)
SHERD_API Tensor activation_backward(const Tensor& grad_output, const Tensor& input,
                                     Activation activation);

struct ActivationGradients {
  Tensor input;
  Tensor bias;  // of fp32 (fp64 for fp64)
};
// The same with the sum of grad_input over all but the last dimension: the gradient of the bias in
// f(x + bias), which on a GPU the same pass over memory gives for GELU.
SHERD_API ActivationGradients activation_backward_with_bias(const Tensor& grad_output,
                                                            const Tensor& input,
                                                            Activation activation);

}  // namespace sherd
