// SPDX-License-Identifier: Apache-2.0
// Vision Transformer for classification (Dosovitskiy et al., 2021), pre-norm, with timm's parameter
// names, so that its weights and timm's are the same file.
//   images [B, C, H, W] → patches → blocks of attention and MLP → norm → token or mean → head → [B,
//   K]
#pragma once

#include <sherd/models/layers/attention.h>
#include <sherd/models/layers/layer_norm.h>
#include <sherd/models/layers/mlp.h>
#include <sherd/models/layers/patch_embed.h>
#include <sherd/models/module.h>

#include <string>
#include <string_view>
#include <vector>

namespace sherd {

enum class Pooling : std::uint8_t { class_token, mean };

struct ViTSettings {
  std::int64_t image_height = 224, image_width = 224;
  std::int64_t channels = 3;
  std::int64_t patch = 16;
  std::int64_t dim = 768;
  std::int64_t depth = 12;
  std::int64_t heads = 12;
  std::int64_t head_dim = 0;  // 0: dim / heads
  double mlp_ratio = 4.0;
  std::int64_t classes = 1000;
  Activation activation = Activation::gelu_erf;
  bool qkv_bias = true;
  double layer_norm_eps = 1e-6;
  bool class_token = true;
  Pooling pooling = Pooling::class_token;  // mean: of the patch tokens, without the class token
  bool fc_norm = false;    // with mean pooling: normalise after the mean (timm's key "fc_norm")
  double drop = 0.0;       // after projections and inside the MLP
  double drop_path = 0.0;  // of the last block; grows linearly from 0 over the depth

  // Throws with the settings' names if they cannot make a model; fills head_dim.
  SHERD_API void validate();
  std::int64_t patches() const { return (image_height / patch) * (image_width / patch); }
  std::int64_t tokens() const { return patches() + (class_token ? 1 : 0); }
  std::int64_t hidden() const;  // width of the MLP
};

// Settings of a timm model name ("vit_base_patch16_224", tiny, small, base, large, huge_patch14).
SHERD_API ViTSettings vit_preset(const std::string& name);
SHERD_API std::vector<std::string> vit_preset_names();

// What of a block runs again in backward instead of being kept (recompute.h). Kept of a block
// between forward and backward, in elements a token, for heads * head_dim = dim, hidden width
// r * dim, and all parameters trainable; what it costs counted in products:
//   none       (8 + 2r) dim + heads + 4   the inputs of norm1, qkv, proj, norm2, fc1, fc2 and the
//                                         activation, and qkv; statistics of norms and attention
//   selective         7 dim + heads + 2   norm2 and the MLP up to the input of fc2 run again: for
//                                         r = 4 a ninth of the step
//   block               dim               all but fc2 runs again: two ninths of the step
// r = 4: 16, 7 and 1 times dim. In backward one block at a time has all of it. With offloaded
// inputs dim less for selective and block: that is kept in the host's memory.
enum class Recompute : std::uint8_t { none, selective, block };

SHERD_API std::string_view name_of(Recompute recompute);
SHERD_API Recompute recompute_from_name(std::string_view name);  // throws for any other name

// x + attention(norm1(x)), then x + mlp(norm2(x)).
class SHERD_API ViTBlock : public Module {
 public:
  ViTBlock(const ViTSettings& settings, double drop_path);

  using Module::set_recompute;
  // offload_input: of the part that runs again, see Module::set_recompute. Throws with none.
  void set_recompute(Recompute recompute, bool offload_input = false);

 protected:
  Variable forward(const Variable& tokens) override;

 private:
  LayerNorm* norm_with_addition(double drop_path) const;

  double drop_path_;
  bool selective_ = false, offload_selective_ = false;
  Child norm1_, attention_, norm2_, mlp_;
};

class SHERD_API VisionTransformer : public Module {
 public:
  explicit VisionTransformer(ViTSettings settings);

  const ViTSettings& settings() const { return settings_; }
  // FLOPs of the matrix products of one training step (forward and backward) on one image.
  double training_flops_per_image() const;

  using Module::set_recompute;
  // Of every block. Throws for `selective` where a block was replaced by something else.
  void set_recompute(Recompute recompute, bool offload_inputs = false);

 protected:
  Variable forward(const Variable& images) override;

 private:
  Variable pool(const Variable& features);

  ViTSettings settings_;
  std::shared_ptr<Parameter> class_token_, position_;
  Child patch_embed_, blocks_, norm_, head_;
};

}  // namespace sherd
