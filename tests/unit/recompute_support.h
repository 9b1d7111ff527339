// SPDX-License-Identifier: Apache-2.0
// What the tests of recomputation share.
#pragma once

#include <sherd/autograd/operations.h>
#include <sherd/models/vit.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace sherd::test {

// 16 tokens of 32 numbers: with 8 images of f32 an input is 16 KiB, whole granules of both pools.
inline ViTSettings even_vit(std::int64_t depth) {
  return {.image_height = 8,
          .image_width = 8,
          .channels = 2,
          .patch = 2,
          .dim = 32,
          .depth = depth,
          .heads = 2,
          .classes = 4,
          .class_token = false,
          .pooling = Pooling::mean};
}

using Bytes = std::vector<std::uint8_t>;

inline Bytes bytes_of(const Tensor& x) {
  Bytes bytes(static_cast<std::size_t>(x.numel()) * size_of(x.dtype()));
  x.copy_to_host(bytes.data(), bytes.size());
  return bytes;
}

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
