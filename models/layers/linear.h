// SPDX-License-Identifier: Apache-2.0
// Linear: y = activation(x weightᵀ + bias), weight [out, in].
#pragma once

#include <sherd/kernels/activation.h>
#include <sherd/models/module.h>

namespace sherd {

class SHERD_API Linear : public Module {
 public:
  // Weights start as a truncated normal of standard deviation 0.02, the bias at zero (timm's ViT).
  Linear(std::int64_t in, std::int64_t out, bool bias, Activation activation = Activation::none);

  const std::shared_ptr<Parameter>& weight() const { return weight_; }
  const std::shared_ptr<Parameter>& bias() const { return bias_; }

 protected:
  Variable forward(const Variable& input) override;

 private:
  std::shared_ptr<Parameter> weight_, bias_;
  Activation activation_;
};

}  // namespace sherd
