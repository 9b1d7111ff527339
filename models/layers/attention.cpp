// SPDX-License-Identifier: Apache-2.0
#include <sherd/models/layers/attention.h>

#include <sherd/autograd/operations.h>

#include <cmath>

namespace sherd {

Attention::Attention(const AttentionSettings& settings) : settings_(settings) {
  const std::int64_t inner = settings.heads * settings.head_dim;
  qkv_ =
      register_child("qkv", std::make_shared<Linear>(settings.dim, 3 * inner, settings.qkv_bias));
  projection_ = register_child("proj", std::make_shared<Linear>(inner, settings.dim, true));
}

Variable Attention::forward(const Variable& input) {
  const double factor = 1.0 / std::sqrt(static_cast<double>(settings_.head_dim));
  const Variable mixed = attention_packed(qkv_(input), settings_.heads, factor);
  return dropout(projection_(mixed), training() ? settings_.projection_drop : 0.0, name());
}

}  // namespace sherd
