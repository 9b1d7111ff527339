// SPDX-License-Identifier: Apache-2.0
#include <sherd/autograd/operations.h>
#include <sherd/autograd/tape.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/random.h>

namespace sherd {
namespace {

void check_drop(const char* what, double drop, const std::string& name) {
  SHERD_CHECK(
      drop == 0.0 || !name.empty(),
      "{}: the layer has no name to key its random numbers by; call Module::assign_names on "
      "the root",
      what);
  SHERD_CHECK(drop >= 0.0 && drop < 1.0, "{}: the drop rate must be in [0, 1), got {}", what, drop);
}

void check_repeatable(const char* what, const Context& context) {
  SHERD_CHECK(!context.capturing(),
              "{} draws other numbers in every step, which a captured step would repeat", what);
}

struct DropoutNode final : Node {
  DropoutNode(double rate, const RandomStream& random, std::int64_t index)
      : drop(rate), stream(random), first_index(index) {}
  double drop;
  RandomStream stream;
  std::int64_t first_index;
  const char* name() const override { return "dropout"; }
  void backward(Gradients& g) override { g.set(0, dropout(g.output(), drop, stream, first_index)); }
};

// Draws the scale of the rows again: a node that saves nothing lets a recomputed block end before
// its last product (Note [Recomputation]).
struct DropPathNode final : Node {
  DropPathNode(double rate, const RandomStream& random, std::int64_t sample)
      : drop(rate), stream(random), first_sample(sample) {}
  double drop;
  RandomStream stream;
  std::int64_t first_sample;
  const char* name() const override { return "drop_path"; }
  void backward(Gradients& g) override {
    const Tensor& grad = g.output();
    g.set(0, grad);
    if (!g.wants(1)) return;
    const Tensor row_scale =
        drop_path_scale(grad.context(), grad.dim(0), grad.dtype(), drop, stream, first_sample);
    g.set(1, scale_rows(grad, row_scale));
  }
};

}  // namespace

Variable dropout(const Variable& x, double drop, const std::string& name) {
  check_drop("dropout", drop, name);
  if (drop == 0.0) return x;
  check_repeatable("dropout", x.context());
  Context& context = x.context();
  const RandomPosition& position = context.random_position();
  const RandomStream stream(context.seed(), "dropout", name, position.step);
  const std::int64_t per_sample = x.tensor().numel() / std::max<std::int64_t>(x.dim(0), 1);
  const std::int64_t first_index = position.first_sample * per_sample;
  return record({x}, dropout(x.tensor(), drop, stream, first_index),
                [&] { return std::make_unique<DropoutNode>(drop, stream, first_index); });
}

Variable add_drop_path(const Variable& residual, const Variable& x, double drop,
                       const std::string& name) {
  check_drop("drop_path", drop, name);
  if (drop == 0.0) return add(residual, x);
  check_repeatable("drop_path", x.context());
  Context& context = x.context();
  const RandomPosition& position = context.random_position();
  const RandomStream stream(context.seed(), "drop_path", name, position.step);
  const Tensor row_scale =
      drop_path_scale(context, x.dim(0), x.tensor().dtype(), drop, stream, position.first_sample);
  return record({residual, x}, add_scaled_rows(residual.tensor(), x.tensor(), row_scale), [&] {
    return std::make_unique<DropPathNode>(drop, stream, position.first_sample);
  });
}

}  // namespace sherd
