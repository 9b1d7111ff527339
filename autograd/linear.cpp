// SPDX-License-Identifier: Apache-2.0
#include <sherd/autograd/operations.h>
#include <sherd/autograd/tape.h>
#include <sherd/kernels/matmul.h>

namespace sherd {
namespace {

struct MatmulNode final : Node {
  MatmulNode(const Tensor& a_, const Tensor& b_) : a(a_), b(b_) {}
  SavedTensor a, b;
  const char* name() const override { return "matmul"; }
  void backward(Gradients& g) override {
    if (g.wants(0)) g.set(0, matmul(g.output(), b.get(), false, true));
    if (g.wants(1)) g.set(1, matmul(a.get(), g.output(), true, false));
  }
};

struct LinearNode final : Node {
  LinearNode(const Variable& x, const Variable& w) : weight(w.tensor()) {
    if (w.requires_grad()) input = x.tensor();
  }
  SavedTensor input, weight;
  const char* name() const override { return "linear"; }
  void backward(Gradients& g) override {
    if (g.wants(2)) g.set(2, linear_backward_bias(g.output()));
    if (g.wants(1)) {
      g.set(1, linear_backward_weight(g.output(), input.get(), g.place(1))
                   .reshape(weight.get().shape()));
    }
    if (g.wants(0)) g.set(0, linear_backward_input(g.output(), weight.get()));
  }
};

// In place of a product that nobody reads (Note [Recomputation]).
Tensor zeros_for(const Tensor& input, const Tensor& weight) {
  std::vector<std::int64_t> dims(input.shape().dims().begin(), input.shape().dims().end());
  dims.back() = weight.dim(0);
  return Tensor::zeros(input.context(), Shape(std::span<const std::int64_t>(dims)), input.dtype());
}

struct ActivationNode final : Node {
  ActivationNode(const Tensor& x, Activation a) : input(x), activation(a) {}
  SavedTensor input;
  Activation activation;
  const char* name() const override { return "activation"; }
  void backward(Gradients& g) override {
    g.set(0, activation_backward(g.output(), input.get(), activation));
  }
};

// Of an input that has had a bias added: whoever has the gradient before the activation in hand has
// the bias' gradient too.
struct BiasActivationNode final : Node {
  BiasActivationNode(const Tensor& x, Activation a) : input(x), activation(a) {}
  SavedTensor input;
  Activation activation;
  const char* name() const override { return "bias_activation"; }
  void backward(Gradients& g) override {
    if (!g.wants(1)) return g.set(0, activation_backward(g.output(), input.get(), activation));
    const ActivationGradients grads =
        activation_backward_with_bias(g.output(), input.get(), activation);
    g.set(0, grads.input);
    g.set(1, grads.bias);
  }
};

}  // namespace

Variable matmul(const Variable& a, const Variable& b) {
  return record({a, b}, matmul(a.tensor(), b.tensor()),
                [&] { return std::make_unique<MatmulNode>(a.tensor(), b.tensor()); });
}

Variable linear(const Variable& input, const Variable& weight, const Variable& bias) {
  const Tape* tape = input.context().tape();
  // How many tensors the node saves: see its constructor, and record().
  const bool recorded = input.requires_grad() || weight.requires_grad() || bias.requires_grad();
  const std::size_t saves = !recorded ? 0 : weight.requires_grad() ? 2 : 1;
  const Tensor output = tape != nullptr && tape->rerun_is_over_after(saves)
                            ? zeros_for(input.tensor(), weight.tensor())
                            : linear_forward(input.tensor(), weight.tensor(), bias.tensor());
  return record({input, weight, bias}, output,
                [&] { return std::make_unique<LinearNode>(input, weight); });
}

Variable activate(const Variable& input, Activation activation) {
  if (activation == Activation::none) return input;
  return record({input}, activation_forward(input.tensor(), activation),
                [&] { return std::make_unique<ActivationNode>(input.tensor(), activation); });
}

Variable linear(const Variable& input, const Variable& weight, const Variable& bias,
                Activation activation) {
  if (activation == Activation::none) return linear(input, weight, bias);
  if (!bias.tensor().defined()) return activate(linear(input, weight, bias), activation);
  const Variable sum = linear(input, weight, Variable(bias.tensor()));
  return record({sum, bias}, activation_forward(sum.tensor(), activation),
                [&] { return std::make_unique<BiasActivationNode>(sum.tensor(), activation); });
}

Variable linear_activation(const Variable& input, const Variable& weight, const Variable& bias,
                           Activation activation) {
  // Backward needs the value before the activation.
  if (input.context().tape() != nullptr) return linear(input, weight, bias, activation);
  return {linear_forward(input.tensor(), weight.tensor(), bias.tensor(), activation)};
}

}  // namespace sherd
