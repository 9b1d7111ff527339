// SPDX-License-Identifier: Apache-2.0
#include <sherd/autograd/add_node.h>
#include <sherd/autograd/operations.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/reduce.h>

namespace sherd {
namespace {

struct ScaleNode final : Node {
  explicit ScaleNode(double f) : factor(f) {}
  double factor;
  const char* name() const override { return "scale"; }
  void backward(Gradients& g) override { g.set(0, scale(g.output(), factor)); }
};

struct CastNode final : Node {
  explicit CastNode(DType from) : input_dtype(from) {}
  DType input_dtype;
  const char* name() const override { return "cast"; }
  void backward(Gradients& g) override { g.set(0, cast(g.output(), input_dtype)); }
};

struct ReshapeNode final : Node {
  explicit ReshapeNode(const Shape& shape) : input_shape(shape) {}
  Shape input_shape;
  const char* name() const override { return "reshape"; }
  void backward(Gradients& g) override { g.set(0, contiguous(g.output()).reshape(input_shape)); }
};

struct PermuteNode final : Node {
  explicit PermuteNode(std::vector<int> inverse_order) : inverse(std::move(inverse_order)) {}
  std::vector<int> inverse;
  const char* name() const override { return "permute"; }
  void backward(Gradients& g) override { g.set(0, g.output().permute(inverse)); }
};

struct SumNode final : Node {
  explicit SumNode(const Tensor& x) : shape(x.shape()), dtype(x.dtype()) {}
  Shape shape;
  DType dtype;
  const char* name() const override { return "sum"; }
  void backward(Gradients& g) override {
    const Tensor repeated = contiguous(g.output().reshape({1}).expand({shape.numel()}));
    g.set(0, (repeated.dtype() == dtype ? repeated : cast(repeated, dtype)).reshape(shape));
  }
};

}  // namespace

Variable add(const Variable& a, const Variable& b) {
  return record({a, b}, add(a.tensor(), b.tensor()), [] { return std::make_unique<AddNode>(); });
}

Variable scale(const Variable& x, double factor) {
  return record({x}, scale(x.tensor(), factor),
                [&] { return std::make_unique<ScaleNode>(factor); });
}

Variable cast(const Variable& x, DType dtype) {
  return record({x}, cast(x.tensor(), dtype),
                [&] { return std::make_unique<CastNode>(x.tensor().dtype()); });
}

Variable reshape(const Variable& x, const Shape& shape) {
  return record({x}, contiguous(x.tensor()).reshape(shape),
                [&] { return std::make_unique<ReshapeNode>(x.shape()); });
}

Variable permute(const Variable& x, std::initializer_list<int> order) {
  return record({x}, x.tensor().permute(order), [&] {
    std::vector<int> inverse(order.size());
    int to = 0;
    for (const int from : order) inverse[static_cast<std::size_t>(from)] = to++;
    return std::make_unique<PermuteNode>(std::move(inverse));
  });
}

Variable sum(const Variable& x) {
  return record({x}, sum(x.tensor()), [&] { return std::make_unique<SumNode>(x.tensor()); });
}

}  // namespace sherd
