// SPDX-License-Identifier: Apache-2.0
// Mlp: linear, activation, linear. [..., dim] → [..., hidden] → [..., dim]
#pragma once

#include <sherd/models/layers/linear.h>

namespace sherd {

class SHERD_API Mlp : public Module {
 public:
  Mlp(std::int64_t dim, std::int64_t hidden, Activation activation, double drop);

 protected:
  Variable forward(const Variable& input) override;

 private:
  double drop_;
  Child fc1_, fc2_;
};

}  // namespace sherd
