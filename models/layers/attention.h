// SPDX-License-Identifier: Apache-2.0
// Multi-head self-attention: one qkv projection (rows of its weight: q, then k, then v, head by
// head), scaled dot-product attention with scale head_dim^-0.5, and an output projection. [B, N, D]
// → [B, N, D]
#pragma once

#include <sherd/models/layers/linear.h>

namespace sherd {

struct AttentionSettings {
  std::int64_t dim = 0, heads = 0, head_dim = 0;  // heads * head_dim need not equal dim
  bool qkv_bias = true;
  double projection_drop = 0.0;
};

class SHERD_API Attention : public Module {
 public:
  explicit Attention(const AttentionSettings& settings);

 protected:
  Variable forward(const Variable& input) override;

 private:
  AttentionSettings settings_;
  Child qkv_, projection_;
};

}  // namespace sherd
