// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <sherd/models/weights_names.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <utility>

namespace sherd {
namespace {

using Renaming = std::pair<std::string_view, std::string_view>;

constexpr std::array<Renaming, 5> kOutside{{
    {"embeddings.cls_token", "cls_token"},
    {"embeddings.position_embeddings", "pos_embed"},
    {"embeddings.patch_embeddings.projection.", "patch_embed.proj."},
    {"layernorm.", "norm."},
    {"classifier.", "head."},
}};
// Inside a block; of these two generations' names none begins with another.
constexpr std::array<Renaming, 7> kInside{{
    {"layernorm_before.", "norm1."},
    {"layernorm_after.", "norm2."},
    {"attention.output.dense.", "attn.proj."},
    {"attention.o_proj.", "attn.proj."},
    {"intermediate.dense.", "mlp.fc1."},
    {"output.dense.", "mlp.fc2."},
    {"mlp.", "mlp."},
}};
constexpr std::array<std::array<std::string_view, 2>, 3> kParts{{
    {"attention.attention.query.", "attention.q_proj."},
    {"attention.attention.key.", "attention.k_proj."},
    {"attention.attention.value.", "attention.v_proj."},
}};

bool take_prefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

struct TimmName {
  std::string name;
  int part = -1;  // 0, 1, 2: q, k, v of it
};

TimmName timm_name(std::string_view name) {
  take_prefix(name, "vit.");
  const std::string unchanged(name);
  for (const auto& [theirs, timm] : kOutside) {
    if (take_prefix(name, theirs)) return {std::string(timm) + std::string(name)};
  }
  if (!take_prefix(name, "encoder.layer.") && !take_prefix(name, "layers.")) return {unchanged};
  const std::size_t digits = std::min(name.find('.'), name.size());
  const std::string block = fmt::format("blocks.{}.", name.substr(0, digits));
  name.remove_prefix(std::min(digits + 1, name.size()));
  for (const auto& [theirs, timm] : kInside) {
    if (take_prefix(name, theirs)) return {block + std::string(timm) + std::string(name)};
  }
  for (int part = 0; part < 3; ++part) {
    for (const std::string_view theirs : kParts[static_cast<std::size_t>(part)]) {
      if (take_prefix(name, theirs)) return {block + "attn.qkv." + std::string(name), part};
    }
  }
  return {unchanged};
}

// The first name of each pair with its second in front of `name`; empty where none fits.
template <std::size_t N>
std::string their_name(const std::array<Renaming, N>& table, std::string_view name) {
  for (const auto& [theirs, timm] : table) {
    std::string_view rest = name;
    const bool whole = !timm.ends_with('.');
    if (take_prefix(rest, timm) && (!whole || rest.empty())) {
      return std::string(theirs) + std::string(rest);
    }
  }
  return {};
}

void add_targets(const std::string& name, const std::string& prefix,
                 std::vector<WeightTarget>& targets, std::vector<std::string>* left_over) {
  std::string_view rest = name;
  if (take_prefix(rest, "blocks.")) {
    const std::size_t digits = std::min(rest.find('.'), rest.size());
    const std::string block = prefix + fmt::format("encoder.layer.{}.", rest.substr(0, digits));
    rest.remove_prefix(std::min(digits + 1, rest.size()));
    if (take_prefix(rest, "attn.qkv.")) {
      for (int part = 0; part < 3; ++part) {
        const std::string_view theirs = kParts[static_cast<std::size_t>(part)][0];
        targets.push_back({block + std::string(theirs) + std::string(rest), name, part, 3});
      }
      return;
    }
    const std::string theirs = their_name(kInside, rest);
    if (!theirs.empty()) return targets.push_back({block + theirs, name});
  } else if (const std::string theirs = their_name(kOutside, name); !theirs.empty()) {
    // The head is no part of what "vit." stands for.
    return targets.push_back({(name.starts_with("head.") ? "" : prefix) + theirs, name});
  }
  if (left_over != nullptr) left_over->push_back(name);
  targets.push_back({name, name});
}

bool is_transformers(std::string_view name) {
  return name.find("layernorm_before.") != std::string_view::npos ||
         name.find("embeddings.patch_embeddings.projection.") != std::string_view::npos;
}

}  // namespace

std::string strip_wrapper_prefixes(std::vector<std::string>& names) {
  std::string taken;
  for (bool again = !names.empty(); again;) {
    again = false;
    for (const std::string_view prefix : {"module.", "_orig_mod."}) {
      const auto has = [&](const std::string& name) { return name.starts_with(prefix); };
      if (!std::ranges::all_of(names, has)) continue;
      for (std::string& name : names) name.erase(0, prefix.size());
      taken += prefix;
      again = true;
    }
  }
  return taken;
}

WeightNames map_weight_names(std::span<const std::string> names) {
  WeightNames result;
  std::vector<std::string> bare(names.begin(), names.end());
  const std::string taken = strip_wrapper_prefixes(bare);
  if (!taken.empty()) result.notes.push_back(fmt::format("prefix '{}' removed", taken));
  if (std::ranges::none_of(bare, is_transformers)) {
    for (std::size_t i = 0; i < bare.size(); ++i) result.weights.push_back({bare[i], {names[i]}});
    return result;
  }

  std::map<std::string, std::array<std::string, 3>> joined;
  for (std::size_t i = 0; i < bare.size(); ++i) {
    const TimmName timm = timm_name(bare[i]);
    if (timm.part < 0) {
      result.weights.push_back({timm.name, {names[i]}});
    } else {
      joined[timm.name][static_cast<std::size_t>(timm.part)] = names[i];
    }
  }
  std::size_t whole = 0;
  for (const auto& [name, parts] : joined) {
    if (std::ranges::none_of(parts, &std::string::empty)) {
      result.weights.push_back({name, {parts.begin(), parts.end()}});
      ++whole;
      continue;
    }
    for (const std::string& part : parts) {
      if (!part.empty()) result.weights.push_back({part, {part}});
    }
  }
  result.notes.push_back(fmt::format(
      "names of transformers mapped to timm's, {} of them joined from q, k and v", whole));
  return result;
}

std::vector<WeightTarget> transformers_names(std::span<const std::string> names,
                                             std::vector<std::string>* left_over) {
  SHERD_CHECK(std::ranges::find(names, "patch_embed.proj.weight") != names.end(),
              "there is no 'patch_embed.proj.weight', so these are not the weights of a Vision "
              "Transformer, for which alone transformers' names are known");
  const bool head =
      std::ranges::any_of(names, [](const std::string& name) { return name.starts_with("head."); });
  std::vector<WeightTarget> targets;
  for (const std::string& name : names) {
    add_targets(name, head ? "vit." : "", targets, left_over);
  }
  return targets;
}

}  // namespace sherd
