// SPDX-License-Identifier: Apache-2.0
#include <sherd/models/layers/layer_norm.h>

#include <sherd/runtime/trace.h>

namespace sherd {

LayerNorm::LayerNorm(std::int64_t dim, double eps) : eps_(eps) {
  weight_ = register_parameter("weight", {dim}, Initializer::ones(), false);
  bias_ = register_parameter("bias", {dim}, Initializer::zeros(), false);
}

Variable LayerNorm::forward(const Variable& input) {
  return layer_norm(input, weight_->variable(), bias_->variable(), eps_);
}

SumAndNorm LayerNorm::add_and_normalize(const Variable& a, const Variable& b) {
  const TraceScope trace(a.context().trace(), name(), "forward");
  return add_layer_norm(a, b, weight_->variable(), bias_->variable(), eps_);
}

}  // namespace sherd
