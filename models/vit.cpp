// SPDX-License-Identifier: Apache-2.0
#include <sherd/models/vit.h>

#include <sherd/autograd/operations.h>
#include <sherd/autograd/recompute.h>
#include <sherd/runtime/suggest.h>

#include <cmath>

namespace sherd {
namespace {

struct Preset {
  const char* name;
  std::int64_t patch, dim, depth, heads;
};

constexpr Preset kPresets[] = {
    {"vit_tiny_patch16_224", 16, 192, 12, 3},   {"vit_small_patch16_224", 16, 384, 12, 6},
    {"vit_base_patch16_224", 16, 768, 12, 12},  {"vit_large_patch16_224", 16, 1024, 24, 16},
    {"vit_huge_patch14_224", 14, 1280, 32, 16},
};

// Far beyond any model; keeps products of sizes away from overflow, and typing errors from filling
// the memory with modules.
constexpr std::int64_t kLargest = 1 << 24, kDeepest = 10'000;

}  // namespace

void ViTSettings::validate() {
  for (const auto& [what, value] : {std::pair{"image height", image_height},
                                    {"image width", image_width},
                                    {"channels", channels},
                                    {"patch", patch},
                                    {"dim", dim},
                                    {"depth", depth},
                                    {"heads", heads},
                                    {"classes", classes}}) {
    SHERD_CHECK(value > 0 && value <= kLargest, "model: {} must be from 1 to {}, got {}", what,
                kLargest, value);
  }
  SHERD_CHECK(depth <= kDeepest, "model: depth must be from 1 to {}, got {}", kDeepest, depth);
  SHERD_CHECK(
      image_height % patch == 0 && image_width % patch == 0,
      "model: the image of {} x {} is not divisible by the patch size {}; choose a patch that "
      "divides both sides",
      image_height, image_width, patch);
  if (head_dim == 0) {
    SHERD_CHECK(
        dim % heads == 0,
        "model: dim {} is not divisible by {} heads; choose other heads or set the head dim", dim,
        heads);
    head_dim = dim / heads;
  }
  SHERD_CHECK(head_dim > 0 && head_dim <= kLargest && heads * head_dim <= kLargest,
              "model: head dim must be positive and heads x head dim at most {}, got {} x {}",
              kLargest, heads, head_dim);
  SHERD_CHECK(mlp_ratio > 0 && mlp_ratio * static_cast<double>(dim) <= kLargest && hidden() > 0,
              "model: an MLP ratio of {} makes no sensible number of hidden features from dim {}",
              mlp_ratio, dim);
  SHERD_CHECK(layer_norm_eps > 0, "model: layer norm eps must be positive, got {}", layer_norm_eps);
  SHERD_CHECK(class_token || pooling == Pooling::mean,
              "model: pooling by the class token needs a class token; use mean pooling");
  SHERD_CHECK(!fc_norm || pooling == Pooling::mean, "model: fc_norm needs mean pooling");
  SHERD_CHECK(drop >= 0 && drop < 1 && drop_path >= 0 && drop_path < 1,
              "model: drop rates must be in [0, 1), got drop {} and drop path {}", drop, drop_path);
}

std::int64_t ViTSettings::hidden() const {
  return static_cast<std::int64_t>(static_cast<double>(dim) * mlp_ratio);
}

std::vector<std::string> vit_preset_names() {
  std::vector<std::string> names;
  for (const Preset& preset : kPresets) names.emplace_back(preset.name);
  return names;
}

ViTSettings vit_preset(const std::string& name) {
  for (const Preset& preset : kPresets) {
    if (name != preset.name) continue;
    ViTSettings settings;
    settings.patch = preset.patch;
    settings.dim = preset.dim;
    settings.depth = preset.depth;
    settings.heads = preset.heads;
    settings.validate();
    return settings;
  }
  fail("unknown model '{}'{}", name, did_you_mean(name, vit_preset_names()));
}

std::string_view name_of(Recompute recompute) {
  static constexpr std::string_view kNames[] = {"none", "selective", "block"};
  return kNames[static_cast<std::size_t>(recompute)];
}

Recompute recompute_from_name(std::string_view name) {
  std::vector<std::string> known;
  for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::block}) {
    if (name == name_of(recompute)) return recompute;
    known.emplace_back(name_of(recompute));
  }
  fail("unknown recomputation '{}'{}", name, did_you_mean(std::string(name), known));
}

ViTBlock::ViTBlock(const ViTSettings& s, double drop_path) : drop_path_(drop_path) {
  const AttentionSettings attention{s.dim, s.heads, s.head_dim, s.qkv_bias, s.drop};
  norm1_ = register_child("norm1", std::make_shared<LayerNorm>(s.dim, s.layer_norm_eps));
  attention_ = register_child("attn", std::make_shared<Attention>(attention));
  norm2_ = register_child("norm2", std::make_shared<LayerNorm>(s.dim, s.layer_norm_eps));
  mlp_ = register_child("mlp", std::make_shared<Mlp>(s.dim, s.hidden(), s.activation, s.drop));
}

// The norm after the first addition, where it can be had along with it: nothing comes between.
LayerNorm* ViTBlock::norm_with_addition(double drop_path) const {
  auto* const norm = dynamic_cast<LayerNorm*>(&norm2_.get());
  const bool alone = norm != nullptr && !norm->has_hooks() && !norm->recomputes();
  return alone && !selective_ && drop_path == 0.0 ? norm : nullptr;
}

Variable ViTBlock::forward(const Variable& tokens) {
  const double rate = training() ? drop_path_ : 0.0;
  if (LayerNorm* const norm = norm_with_addition(rate)) {
    const SumAndNorm mixed = norm->add_and_normalize(tokens, attention_(norm1_(tokens)));
    return add(mixed.sum, mlp_(mixed.norm));
  }
  const Variable mixed =
      add_drop_path(tokens, attention_(norm1_(tokens)), rate, name() + ".drop_path1");
  const auto feed = [this](const Variable& x) { return mlp_(norm2_(x)); };
  const Variable fed =
      selective_ ? recompute(name() + ".mlp", feed, mixed, offload_selective_) : feed(mixed);
  return add_drop_path(mixed, fed, rate, name() + ".drop_path2");
}

void ViTBlock::set_recompute(Recompute recompute, bool offload_input) {
  selective_ = recompute == Recompute::selective;
  offload_selective_ = selective_ && offload_input;
  Module::set_recompute(recompute == Recompute::block, offload_input && !selective_);
}

VisionTransformer::VisionTransformer(ViTSettings settings) : settings_(settings) {
  settings_.validate();
  const ViTSettings& s = settings_;
  if (s.class_token) {
    class_token_ = register_parameter("cls_token", {1, 1, s.dim}, Initializer::normal(1e-6), false);
  }
  position_ = register_parameter("pos_embed", {1, s.tokens(), s.dim},
                                 Initializer::truncated_normal(0.02), false);
  patch_embed_ =
      register_child("patch_embed", std::make_shared<PatchEmbed>(s.channels, s.patch, s.dim));
  const auto blocks = std::make_shared<Sequential>();
  for (std::int64_t i = 0; i < s.depth; ++i) {
    const double rate =
        s.depth > 1 ? s.drop_path * static_cast<double>(i) / static_cast<double>(s.depth - 1)
                    : s.drop_path;
    blocks->append(std::to_string(i), std::make_shared<ViTBlock>(s, rate));
  }
  blocks_ = register_child("blocks", blocks);
  norm_ = register_child(s.fc_norm ? "fc_norm" : "norm",
                         std::make_shared<LayerNorm>(s.dim, s.layer_norm_eps));
  head_ = register_child("head", std::make_shared<Linear>(s.dim, s.classes, true));
  assign_names();
}

void VisionTransformer::set_recompute(Recompute recompute, bool offload_inputs) {
  for (const auto& [name, block] : child("blocks")->children()) {
    if (auto* const vit_block = dynamic_cast<ViTBlock*>(block.get())) {
      vit_block->set_recompute(recompute, offload_inputs);
      continue;
    }
    SHERD_CHECK(recompute != Recompute::selective,
                "module '{}' is no ViTBlock, so it has no part that runs again selectively; choose "
                "none or block, or set its parts' own flags",
                block->name());
    block->set_recompute(recompute == Recompute::block, offload_inputs);
  }
}

Variable VisionTransformer::forward(const Variable& images) {
  const Shape expected{images.dim(0), settings_.channels, settings_.image_height,
                       settings_.image_width};
  SHERD_CHECK(images.shape() == expected, "model: expected images {}, got {}", expected.to_string(),
              images.tensor().describe());
  const Variable patches = patch_embed_(images);
  const Variable class_token = class_token_ ? class_token_->variable() : Variable();
  const Variable tokens = assemble_tokens(patches, class_token, position_->variable());
  const Variable features = blocks_(dropout(tokens, training() ? settings_.drop : 0.0, "pos_drop"));
  return head_(pool(features));
}

Variable VisionTransformer::pool(const Variable& features) {
  // With the class token only that row is normalised: LayerNorm acts on each token alone.
  if (settings_.pooling == Pooling::class_token) return norm_(select_token(features, 0));
  const std::int64_t first = settings_.class_token ? 1 : 0;
  if (settings_.fc_norm) return norm_(mean_tokens(features, first));
  return mean_tokens(norm_(features), first);
}

double VisionTransformer::training_flops_per_image() const {
  const auto dim = static_cast<double>(settings_.dim),
             tokens = static_cast<double>(settings_.tokens());
  const auto inner = static_cast<double>(settings_.heads * settings_.head_dim);
  const auto patches = static_cast<double>(settings_.patches());
  const double patch_columns =
      static_cast<double>(settings_.channels * settings_.patch * settings_.patch);
  const double block = tokens * dim * (4 * inner + 2 * static_cast<double>(settings_.hidden())) +
                       2 * tokens * tokens * inner;  // multiply-adds
  const double forward = static_cast<double>(settings_.depth) * block +
                         patches * patch_columns * dim +
                         dim * static_cast<double>(settings_.classes);
  return 3 * 2 * forward;  // backward costs twice the forward; 2 FLOPs a multiply-add
}

}  // namespace sherd
