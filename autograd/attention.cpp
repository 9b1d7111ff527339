// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/attention.h>

#include <sherd/autograd/operations.h>
#include <sherd/autograd/tape.h>
#include <sherd/kernels/elementwise.h>

namespace sherd {
namespace {

struct AttentionNode final : Node {
  SavedTensor query, key, value, output, lse;
  double factor = 0.0;
  const char* name() const override { return "attention"; }
  void backward(Gradients& g) override {
    const auto like = [](const Tensor& x) {
      return Tensor::empty(x.context(), x.shape(), x.dtype());
    };
    const Tensor grad_query = like(query.get());
    const Tensor grad_key = like(key.get());
    const Tensor grad_value = like(value.get());
    attention_backward(g.output(), query.get(), key.get(), value.get(), {output.get(), lse.get()},
                       factor, grad_query, grad_key, grad_value);
    g.set(0, grad_query);
    g.set(1, grad_key);
    g.set(2, grad_value);
  }
};

// Queries, keys and values are views of one tensor, and so are their gradients.
struct PackedAttentionNode final : Node {
  SavedTensor qkv, output, lse;
  double factor = 0.0;
  const char* name() const override { return "attention"; }
  void backward(Gradients& g) override {
    const Tensor& packed = qkv.get();  // [B, N, 3, H, D]
    const Tensor grad = Tensor::empty(packed.context(), packed.shape(), packed.dtype());
    attention_backward(contiguous(g.output()).reshape(output.get().shape()), packed.select(2, 0),
                       packed.select(2, 1), packed.select(2, 2), {output.get(), lse.get()}, factor,
                       grad.select(2, 0), grad.select(2, 1), grad.select(2, 2));
    g.set(0, grad.reshape({grad.dim(0), grad.dim(1), grad.numel() / (grad.dim(0) * grad.dim(1))}));
  }
};

}  // namespace

Variable attention(const Variable& query, const Variable& key, const Variable& value,
                   double factor) {
  const AttentionOutput forward =
      attention_forward(query.tensor(), key.tensor(), value.tensor(), factor);
  return record({query, key, value}, forward.output, [&] {
    auto node = std::make_unique<AttentionNode>();
    node->query = query.tensor();
    node->key = key.tensor();
    node->value = value.tensor();
    node->output = forward.output;
    node->lse = forward.lse;
    node->factor = factor;
    return node;
  });
}

Variable attention_packed(const Variable& qkv, std::int64_t heads, double factor) {
  SHERD_CHECK(qkv.shape().rank() == 3 && heads > 0 && qkv.dim(2) % (3 * heads) == 0,
              "attention: expected qkv [B, N, 3 * {} heads * head_dim], got {}", heads,
              qkv.tensor().describe());
  const std::int64_t batch = qkv.dim(0), tokens = qkv.dim(1), head_dim = qkv.dim(2) / (3 * heads);
  const Tensor packed = contiguous(qkv.tensor()).reshape({batch, tokens, 3, heads, head_dim});
  const AttentionOutput forward =
      attention_forward(packed.select(2, 0), packed.select(2, 1), packed.select(2, 2), factor);
  return record({qkv}, forward.output.reshape({batch, tokens, heads * head_dim}), [&] {
    auto node = std::make_unique<PackedAttentionNode>();
    node->qkv = packed;
    node->output = forward.output;
    node->lse = forward.lse;
    node->factor = factor;
    return node;
  });
}

}  // namespace sherd
