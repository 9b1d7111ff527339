// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/sharding/options.h>

#include <sherd/runtime/error.h>
#include <sherd/runtime/suggest.h>

#include <charconv>
#include <utility>
#include <vector>

namespace sherd {
namespace {

constexpr std::pair<const char*, ShardingPolicy> kPolicyNames[] = {
    {"none", ShardingPolicy::none},
    {"ddp", ShardingPolicy::none},
    {"no_shard", ShardingPolicy::none},
    {"zero1", ShardingPolicy::zero1},
    {"zero2", ShardingPolicy::zero2},
    {"grad_op", ShardingPolicy::grad_op},
    {"shard_grad_op", ShardingPolicy::grad_op},
    {"zero3", ShardingPolicy::zero3},
    {"fsdp", ShardingPolicy::zero3},
    {"full_shard", ShardingPolicy::zero3},
    {"hybrid", ShardingPolicy::hybrid},
    {"hybrid_shard", ShardingPolicy::hybrid},
    {"hsdp", ShardingPolicy::hybrid},
};

bool parse_whole(std::string_view text, std::int64_t* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

bool shards_parameters(ShardingPolicy policy) {
  return policy == ShardingPolicy::grad_op || policy == ShardingPolicy::zero3 ||
         policy == ShardingPolicy::hybrid;
}

int axis_size(const ProcessMesh& mesh, const char* name) {
  for (const ProcessMesh::Axis& axis : mesh.axes()) {
    if (axis.name == name) return axis.size;
  }
  return 1;
}

void validate_mesh(const ShardingOptions& options, int ranks) {
  const bool hybrid = options.policy == ShardingPolicy::hybrid;
  if (!options.mesh) {
    SHERD_CHECK(
        !hybrid,
        "--shard hybrid: needs --mesh replicate=R,shard=S with R times S the number of ranks "
        "({})",
        ranks);
    return;
  }
  const ProcessMesh& mesh = *options.mesh;
  for (const ProcessMesh::Axis& axis : mesh.axes()) {
    SHERD_CHECK(axis.name == "replicate" || axis.name == "shard",
                "--mesh {}: unknown axis '{}'; sharding knows replicate and shard",
                mesh.to_string(), axis.name);
  }
  SHERD_CHECK(mesh.size() == ranks,
              "--mesh {}: the axes multiply to {} ranks, there are {}; change one of them",
              mesh.to_string(), mesh.size(), ranks);
  const int replicas = axis_size(mesh, "replicate");
  SHERD_CHECK(!hybrid || mesh.axes().size() == 2,
              "--shard hybrid: --mesh {} has one axis; give both, replicate=R,shard=S",
              mesh.to_string());
  SHERD_CHECK(hybrid || options.policy == ShardingPolicy::none || replicas == 1,
              "--shard {} shards over all ranks, but --mesh {} has {} replicas; use --shard hybrid",
              name_of(options.policy), mesh.to_string(), replicas);
}

}  // namespace

std::string_view name_of(ShardingPolicy policy) {
  for (const auto& [name, value] : kPolicyNames) {
    if (value == policy) return name;  // the first one is ours
  }
  fail("name_of: unknown sharding policy {}", static_cast<int>(policy));
}

ShardingPolicy sharding_policy_from_name(std::string_view name) {
  std::vector<std::string> known;
  for (const auto& [other, policy] : kPolicyNames) {
    if (name == other) return policy;
    known.emplace_back(other);
  }
  fail("--shard: unknown sharding policy '{}'{}", name, did_you_mean(name, known));
}

UnitRule UnitRule::parse(std::string_view text) {
  UnitRule rule;
  if (text == "block") return rule;
  if (text == "model") {
    rule.kind = Kind::model;
    return rule;
  }
  rule.kind = Kind::parameters;
  const bool valid = text.starts_with("params:") &&
                     parse_whole(text.substr(7), &rule.min_parameters) && rule.min_parameters > 0;
  SHERD_CHECK(valid, "--unit: expected block, model or params:N (such as params:1000000), got '{}'",
              text);
  return rule;
}

ReshardAfterForward ReshardAfterForward::parse(std::string_view text) {
  if (text.empty()) return {};
  if (text == "yes") return {Kind::yes, 0};
  if (text == "no") return {Kind::no, 0};
  std::int64_t group = 0;
  SHERD_CHECK(parse_whole(text, &group) && group >= 1 && group <= 1 << 24,
              "--reshard-after-forward: expected yes, no or a number of ranks, got '{}'", text);
  return {Kind::group, static_cast<int>(group)};
}

OffloadTo OffloadTo::parse(std::string_view text, std::string_view flag) {
  if (text == "none") return {};
  if (text == "cpu") return {Kind::cpu, {}};
  SHERD_CHECK(text.starts_with("nvme:") && text.size() > 5,
              "{}: expected none, cpu or nvme:DIR (such as nvme:/scratch), got '{}'", flag, text);
  return {Kind::nvme, std::string(text.substr(5))};
}

void validate(const ShardingOptions& options, int ranks, const Precision& precision) {
  validate_mesh(options, ranks);
  using Reshard = ReshardAfterForward::Kind;
  const ReshardAfterForward& reshard = options.reshard_after_forward;
  const std::string_view policy = name_of(options.policy);
  const bool shards = shards_parameters(options.policy);
  SHERD_CHECK(shards || reshard.kind == Reshard::by_policy,
              "--reshard-after-forward: has no effect with --shard {}, which keeps full parameters",
              policy);
  SHERD_CHECK(options.policy != ShardingPolicy::grad_op || reshard.kind == Reshard::by_policy ||
                  reshard.kind == Reshard::no,
              "--reshard-after-forward: --shard grad_op keeps parameters until backward; use "
              "--shard zero3");
  if (reshard.kind == Reshard::group) {
    const int group = options.mesh ? axis_size(*options.mesh, "shard") : ranks;
    SHERD_CHECK(reshard.group_size <= group && group % reshard.group_size == 0,
                "--reshard-after-forward {}: must divide the {} ranks that share the parameters",
                reshard.group_size, group);
  }
  SHERD_CHECK(options.prefetch >= 0, "--prefetch: must not be negative, got {}", options.prefetch);
  SHERD_CHECK(options.persist_below >= 0, "--persist-below: must not be negative, got {}",
              options.persist_below);
  SHERD_CHECK(options.persist_below == 0 || shards,
              "--persist-below: has no effect with --shard {}, which keeps all parameters gathered",
              policy);
  SHERD_CHECK(!options.reduce_every_pass || unit_policy(options).shard_gradients,
              "--reduce-every micro: has no use with --shard {}, which keeps full gradients; leave "
              "it out, or use zero2 or above",
              policy);
  const bool offloads = options.offload_parameters.kind != OffloadTo::Kind::none;
  SHERD_CHECK(shards || !offloads,
              "--offload-parameters: --shard {} keeps all parameters gathered; use zero3, grad_op "
              "or hybrid",
              policy);
  SHERD_CHECK(
      !offloads || !precision.mixed() || options.offload_optimizer.kind != OffloadTo::Kind::none,
      "--offload-parameters: with {} parameters their {} master weights would stay; give "
      "--offload-optimizer too",
      name_of(precision.parameters), name_of(precision.master));
}

void validate(const Precision& precision) {
  const auto fits = [&](DType dtype) {
    if (precision.master == DType::f64) return dtype == DType::f64;
    return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
  };
  SHERD_CHECK(precision.master == DType::f32 || precision.master == DType::f64,
              "precision: weights are kept in f32 or f64, got {}", name_of(precision.master));
  for (const auto& [what, dtype] : {std::pair{"parameters", precision.parameters},
                                    {"reduced gradients", precision.reduce},
                                    {"the output", precision.output}}) {
    SHERD_CHECK(fits(dtype), "precision: with weights in {}, {} cannot be in {}; expected {}",
                name_of(precision.master), what, name_of(dtype),
                precision.master == DType::f64 ? "f64" : "f32, bf16 or f16");
  }
}

std::string describe(const Precision& precision) {
  std::string text(name_of(precision.parameters));
  const bool plain = precision == Precision(precision.master);
  if (plain) return text;
  return fmt::format("{}, gradients sent in {}, output in {}, weights kept in {}", text,
                     name_of(precision.reduce), name_of(precision.output),
                     name_of(precision.master));
}

UnitPolicy unit_policy(const ShardingOptions& options) {
  UnitPolicy unit;
  unit.shard_optimizer = options.policy != ShardingPolicy::none;
  unit.shard_gradients = unit.shard_optimizer && options.policy != ShardingPolicy::zero1;
  unit.shard_parameters = shards_parameters(options.policy);
  unit.reshard_after_forward = unit.shard_parameters && options.policy != ShardingPolicy::grad_op &&
                               options.reshard_after_forward.kind != ReshardAfterForward::Kind::no;
  return unit;
}

UnitPolicy persistent_unit_policy(const ShardingOptions& options) {
  UnitPolicy unit = unit_policy(options);
  unit.shard_parameters = unit.reshard_after_forward = false;
  return unit;
}

}  // namespace sherd
