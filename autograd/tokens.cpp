// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/tokens.h>

#include <sherd/autograd/operations.h>
#include <sherd/autograd/tape.h>

namespace sherd {
namespace {

struct PatchifyNode final : Node {
  PatchifyNode(const Shape& shape, const PatchSize& size) : images(shape), patch(size) {}
  Shape images;
  PatchSize patch;
  const char* name() const override { return "patchify"; }
  void backward(Gradients& g) override { g.set(0, unpatchify(g.output(), images, patch)); }
};

struct AssembleTokensNode final : Node {
  explicit AssembleTokensNode(bool class_token) : has_class_token(class_token) {}
  bool has_class_token;
  const char* name() const override { return "assemble_tokens"; }
  void backward(Gradients& g) override {
    const TokenGradients grads = assemble_tokens_backward(g.output(), has_class_token);
    g.set(0, grads.patches);
    if (has_class_token) g.set(1, grads.class_token);
    g.set(2, grads.position);
  }
};

struct SelectTokenNode final : Node {
  SelectTokenNode(std::int64_t tokens, std::int64_t i) : count(tokens), index(i) {}
  std::int64_t count, index;
  const char* name() const override { return "select_token"; }
  void backward(Gradients& g) override {
    g.set(0, select_token_backward(g.output(), count, index));
  }
};

struct MeanTokensNode final : Node {
  MeanTokensNode(std::int64_t tokens, std::int64_t from) : count(tokens), first(from) {}
  std::int64_t count, first;
  const char* name() const override { return "mean_tokens"; }
  void backward(Gradients& g) override { g.set(0, mean_tokens_backward(g.output(), count, first)); }
};

}  // namespace

Variable patchify(const Variable& images, const PatchSize& patch) {
  return record({images}, patchify(images.tensor(), patch),
                [&] { return std::make_unique<PatchifyNode>(images.shape(), patch); });
}

Variable assemble_tokens(const Variable& patches, const Variable& class_token,
                         const Variable& position) {
  const bool has_class_token = class_token.tensor().defined();
  return record({patches, class_token, position},
                assemble_tokens(patches.tensor(), class_token.tensor(), position.tensor()),
                [&] { return std::make_unique<AssembleTokensNode>(has_class_token); });
}

Variable select_token(const Variable& tokens, std::int64_t index) {
  return record({tokens}, select_token(tokens.tensor(), index),
                [&] { return std::make_unique<SelectTokenNode>(tokens.dim(1), index); });
}

Variable mean_tokens(const Variable& tokens, std::int64_t first) {
  return record({tokens}, mean_tokens(tokens.tensor(), first),
                [&] { return std::make_unique<MeanTokensNode>(tokens.dim(1), first); });
}

}  // namespace sherd
