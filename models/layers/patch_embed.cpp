// SPDX-License-Identifier: Apache-2.0
#include <sherd/models/layers/patch_embed.h>

#include <sherd/autograd/operations.h>

#include <cmath>

namespace sherd {
namespace {

std::int64_t fan_in(std::int64_t channels, std::int64_t patch) {
  return channels * patch * patch;
}

}  // namespace

PatchEmbed::PatchEmbed(std::int64_t channels, std::int64_t patch, std::int64_t dim)
    : patch_{1, patch, patch} {
  const double bound = 1.0 / std::sqrt(static_cast<double>(fan_in(channels, patch)));
  // Under the key "proj", as timm has it.
  weight_ = register_parameter("proj.weight", {dim, channels, patch, patch},
                               Initializer::uniform(bound), true);
  bias_ = register_parameter("proj.bias", {dim}, Initializer::uniform(bound), false);
}

Variable PatchEmbed::forward(const Variable& images) {
  return patch_embed(images, weight_->variable(), bias_->variable(), patch_);
}

}  // namespace sherd
