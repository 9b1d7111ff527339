// SPDX-License-Identifier: Apache-2.0
#include <sherd/models/layers/linear.h>

#include <sherd/autograd/operations.h>

namespace sherd {

Linear::Linear(std::int64_t in, std::int64_t out, bool bias, Activation activation)
    : activation_(activation) {
  weight_ = register_parameter("weight", {out, in}, Initializer::truncated_normal(0.02), true);
  if (bias) bias_ = register_parameter("bias", {out}, Initializer::zeros(), false);
}

Variable Linear::forward(const Variable& input) {
  const Variable bias = bias_ ? bias_->variable() : Variable();
  if (training()) return linear(input, weight_->variable(), bias, activation_);
  return linear_activation(input, weight_->variable(), bias, activation_);
}

}  // namespace sherd
