// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/patch_embed.h>

#include <sherd/autograd/operations.h>
#include <sherd/autograd/tape.h>
#include <sherd/kernels/matmul.h>

namespace sherd {
namespace {

// Keeps the images on every device: where they are of the weight's type they are there anyway, as
// the buffer that batches are put into, and their cast is no larger than the patches. To make
// patches of them again, where a device needs them, is a copy beside a product.
struct PatchEmbedNode final : Node {
  PatchEmbedNode(const Variable& x, const Variable& w, const PatchSize& size)
      : image_shape(x.shape()), weight_shape(w.shape()), patch(size) {
    if (w.requires_grad()) images = x.tensor();
    if (x.requires_grad()) weight = w.tensor();
  }
  SavedTensor images, weight;
  Shape image_shape, weight_shape;
  PatchSize patch;
  const char* name() const override { return "patch_embed"; }
  void backward(Gradients& g) override {
    if (g.wants(2)) g.set(2, linear_backward_bias(g.output()));
    if (g.wants(1)) {
      g.set(1, patch_embed_backward_weight(g.output(), images.get(), patch, g.place(1))
                   .reshape(weight_shape));
    }
    if (g.wants(0)) {
      g.set(0, unpatchify(linear_backward_input(g.output(), weight.get()), image_shape, patch));
    }
  }
};

}  // namespace

Variable patch_embed(const Variable& images, const Variable& weight, const Variable& bias,
                     const PatchSize& patch) {
  return record({images, weight, bias},
                patch_embed_forward(images.tensor(), weight.tensor(), bias.tensor(), patch),
                [&] { return std::make_unique<PatchEmbedNode>(images, weight, patch); });
}

}  // namespace sherd
