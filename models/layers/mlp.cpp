// SPDX-License-Identifier: Apache-2.0
#include <sherd/models/layers/mlp.h>

#include <sherd/autograd/operations.h>

namespace sherd {

Mlp::Mlp(std::int64_t dim, std::int64_t hidden, Activation activation, double drop) : drop_(drop) {
  fc1_ = register_child("fc1", std::make_shared<Linear>(dim, hidden, true, activation));
  fc2_ = register_child("fc2", std::make_shared<Linear>(hidden, dim, true));
}

Variable Mlp::forward(const Variable& input) {
  const double drop = training() ? drop_ : 0.0;
  const Variable hidden = dropout(fc1_(input), drop, name() + ".drop1");
  return dropout(fc2_(hidden), drop, name() + ".drop2");
}

}  // namespace sherd
