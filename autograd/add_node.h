// SPDX-License-Identifier: Apache-2.0
// The node of a sum, for the operations that make one.
#pragma once

#include <sherd/autograd/tape.h>

namespace sherd {

struct AddNode final : Node {
  const char* name() const override { return "add"; }
  void backward(Gradients& g) override {
    g.set(0, g.output());
    g.set(1, g.output());
  }
};

}  // namespace sherd
