// SPDX-License-Identifier: Apache-2.0
// What the tests of recomputation share.
#pragma once

#include <sherd/autograd/operations.h>
#include <sherd/models/module.h>

#include <functional>
#include <memory>
#include <utility>

namespace sherd::test {

// A module made of a function, and how often that has run.
class Probe : public Module {
 public:
  using Function = std::function<Variable(Probe&, const Variable&)>;
  explicit Probe(Function f) : function(std::move(f)) {
    weight = register_parameter("weight", {4, 4}, Initializer::normal(0.5), true);
    assign_names("probe");
  }
  Function function;
  std::shared_ptr<Parameter> weight;
  int runs = 0;

 protected:
  Variable forward(const Variable& x) override {
    ++runs;
    return function(*this, x);
  }
};

inline Variable two_layers(Probe& p, const Variable& x) {
  const Variable hidden = activate(linear(x, p.weight->variable(), {}), Activation::gelu_erf);
  return linear(hidden, p.weight->variable(), {});
}

}  // namespace sherd::test
