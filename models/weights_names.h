// SPDX-License-Identifier: Apache-2.0
// What other programs call the weights of a Vision Transformer, brought to timm's names:
// transformers' names of both generations (versions up to 4 and from 5 on), with or without "vit."
// in front, and the prefixes that wrappers of a whole model leave.
//
//   timm                    transformers
//   cls_token, pos_embed    embeddings.cls_token, embeddings.position_embeddings
//   patch_embed.proj.*      embeddings.patch_embeddings.projection.*
//   blocks.N.               encoder.layer.N.                               or layers.N.
//     norm1.*, norm2.*        layernorm_before.*, layernorm_after.*
//     attn.qkv.*              attention.attention.{query,key,value}.*      or
//     attention.{q,k,v}_proj.* attn.proj.*             attention.output.dense.* or
//     attention.o_proj.* mlp.fc1.*, mlp.fc2.*    intermediate.dense.*, output.dense.*         or
//     mlp.fc1.*, mlp.fc2.*
//   norm.*, head.*          layernorm.*, classifier.*
#pragma once

#include <sherd/runtime/api.h>

#include <span>
#include <string>
#include <vector>

namespace sherd {

struct WeightSource {
  std::string name;               // what timm calls it
  std::vector<std::string> from;  // the tensors, joined along the first dimension: one, or q, k, v
};

struct WeightNames {
  std::vector<WeightSource> weights;  // each name that was given is in one of them
  std::vector<std::string> notes;     // what was done, each a short sentence without a full stop
};

// Names outside the table stay as they are, as do q, k and v that are not all there.
SHERD_API WeightNames map_weight_names(std::span<const std::string> names);

// The way back: what transformers call the weights of a model with timm's names. Those of version
// 4, which are the ones in files; with "vit." in front where the model has a head, as theirs then
// has.
struct WeightTarget {
  std::string name;         // what transformers call it
  std::string from;         // what timm calls what it is in
  int part = 0, parts = 1;  // of so many equal ones along the first dimension
};
// In the order of `names`. Throws unless they are those of a Vision Transformer; `left_over`, if
// given, gets those that transformers have no name for, which stay as they are.
SHERD_API std::vector<WeightTarget> transformers_names(
    std::span<const std::string> names, std::vector<std::string>* left_over = nullptr);

// Takes "module." (DistributedDataParallel) and "_orig_mod." (torch.compile) away where every name
// begins so, in any order and number. Returns what was taken away.
SHERD_API std::string strip_wrapper_prefixes(std::vector<std::string>& names);

}  // namespace sherd
