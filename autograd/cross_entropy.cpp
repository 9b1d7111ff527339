// SPDX-License-Identifier: Apache-2.0
#include <sherd/autograd/operations.h>
#include <sherd/autograd/tape.h>
#include <sherd/kernels/reduce.h>

namespace sherd {
namespace {

struct CrossEntropyNode final : Node {
  SavedTensor logits, lse, labels, probabilities;
  double label_smoothing = 0.0, factor = 0.0;
  const char* name() const override { return "cross_entropy"; }
  void backward(Gradients& g) override {
    const auto value = [](const SavedTensor& saved) {
      return saved.defined() ? saved.get() : Tensor();
    };
    g.set(0, cross_entropy_backward(g.output(), logits.get(),
                                    {value(labels), value(probabilities), label_smoothing},
                                    lse.get(), factor));
  }
};

}  // namespace

Variable cross_entropy(const Variable& logits, const CrossEntropyTarget& target,
                       std::int64_t rows_total) {
  const CrossEntropyOutput forward = cross_entropy_forward(logits.tensor(), target);
  const double factor = 1.0 / static_cast<double>(rows_total > 0 ? rows_total : logits.dim(0));
  return record({logits}, sum(forward.row_loss, factor), [&] {
    auto node = std::make_unique<CrossEntropyNode>();
    node->logits = logits.tensor();
    node->lse = forward.lse;
    node->labels = target.labels;
    node->probabilities = target.probabilities;
    node->label_smoothing = target.label_smoothing;
    node->factor = factor;
    return node;
  });
}

}  // namespace sherd
