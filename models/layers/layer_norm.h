// SPDX-License-Identifier: Apache-2.0
// LayerNorm over the last dimension, with weight and bias [dim].
#pragma once

#include <sherd/autograd/operations.h>
#include <sherd/models/module.h>

namespace sherd {

class SHERD_API LayerNorm : public Module {
 public:
  LayerNorm(std::int64_t dim, double eps);

  // a + b and its norm in one pass over memory: for a parent that needs both, in the place of a
  // call. It runs no hooks (see Module::has_hooks).
  SumAndNorm add_and_normalize(const Variable& a, const Variable& b);

 protected:
  Variable forward(const Variable& input) override;

 private:
  double eps_;
  std::shared_ptr<Parameter> weight_, bias_;
};

}  // namespace sherd
