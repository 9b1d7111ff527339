// SPDX-License-Identifier: Apache-2.0
// LayerNorm over the last dimension, with weight and bias [dim].
#pragma once

#include <sherd/models/module.h>

namespace sherd {

class SHERD_API LayerNorm : public Module {
 public:
  LayerNorm(std::int64_t dim, double eps);

 protected:
  Variable forward(const Variable& input) override;

 private:
  double eps_;
  std::shared_ptr<Parameter> weight_, bias_;
};

}  // namespace sherd
