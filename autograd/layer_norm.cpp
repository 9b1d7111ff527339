// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/layer_norm.h>

#include <sherd/autograd/add_node.h>
#include <sherd/autograd/operations.h>

namespace sherd {
namespace {

struct LayerNormNode final : Node {
  LayerNormNode(const Tensor& x, const LayerNormOutput& y, const Tensor& w)
      : input(x), mean(y.mean), rstd(y.rstd), weight(w) {}
  SavedTensor input, mean, rstd, weight;
  const char* name() const override { return "layer_norm"; }
  void backward(Gradients& g) override {
    const Tensor accumulated = g.wants(0) ? g.accumulated(0) : Tensor();
    const LayerNormGradients grads =
        layer_norm_backward(g.output(), input.get(), mean.get(), rstd.get(), weight.get(),
                            g.wants(0), g.wants(1) || g.wants(2), accumulated);
    if (g.wants(0) && !accumulated.defined()) g.set(0, grads.input);
    if (g.wants(1)) g.set(1, grads.weight);
    if (g.wants(2)) g.set(2, grads.bias);
  }
};

}  // namespace

Variable layer_norm(const Variable& input, const Variable& weight, const Variable& bias,
                    double eps) {
  const LayerNormOutput y = layer_norm_forward(input.tensor(), weight.tensor(), bias.tensor(), eps);
  return record({input, weight, bias}, y.output, [&] {
    return std::make_unique<LayerNormNode>(input.tensor(), y, weight.tensor());
  });
}

SumAndNorm add_layer_norm(const Variable& a, const Variable& b, const Variable& weight,
                          const Variable& bias, double eps) {
  const LayerNormOutput y =
      layer_norm_forward(a.tensor(), weight.tensor(), bias.tensor(), eps, b.tensor());
  const Variable sum = record({a, b}, y.sum, [] { return std::make_unique<AddNode>(); });
  return {sum, record({sum, weight, bias}, y.output,
                      [&] { return std::make_unique<LayerNormNode>(y.sum, y, weight.tensor()); })};
}

}  // namespace sherd
