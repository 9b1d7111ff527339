// SPDX-License-Identifier: Apache-2.0
// What a user chooses about sharding, and what each policy means.
#pragma once

#include <sherd/comm/process_mesh.h>
#include <sherd/models/module.h>
#include <sherd/runtime/dtype.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace sherd {

// Stages 1, 2 and 3 of ZeRO (Rajbhandari et al., 2020) by the names of DeepSpeed and of PyTorch's
// FSDP (Zhao et al., 2023). Other names for the same: see sharding_policy_from_name.
enum class ShardingPolicy : std::uint8_t { none, zero1, zero2, grad_op, zero3, hybrid };

SHERD_API std::string_view name_of(ShardingPolicy policy);
// none (ddp, no_shard), zero1, zero2, grad_op (shard_grad_op), zero3 (fsdp, full_shard), hybrid
// (hybrid_shard, hsdp); anything else throws.
SHERD_API ShardingPolicy sharding_policy_from_name(std::string_view name);

// How the modules are divided into units, each gathered and reduced as one.
struct UnitRule {
  enum class Kind : std::uint8_t {
    block,       // every child of a Sequential, and the rest
    model,       // everything is one unit
    parameters,  // from the leaves up, whatever has at least min_parameters not yet in a unit
    custom,      // the modules for which is_unit is true, and the rest
  };
  Kind kind = Kind::block;
  std::int64_t min_parameters = 0;
  std::function<bool(const Module&)> is_unit = {};

  // "block", "model" or "params:1000000"
  SHERD_API static UnitRule parse(std::string_view text);
};

// What becomes of gathered parameters between a unit's forward and its backward.
struct ReshardAfterForward {
  enum class Kind : std::uint8_t {
    by_policy,  // zero3 and hybrid: yes; grad_op: no
    yes,        // release them, gather again
    no,         // keep them
    group,      // keep 1/K of them, so that the second gather stays inside K neighbours (the
                // secondary partition of ZeRO++, Wang et al., 2023)
  };
  Kind kind = Kind::by_policy;
  int group_size = 0;

  SHERD_API static ReshardAfterForward parse(
      std::string_view text);  // "yes", "no" or K; "" by policy
};

// Where a rank keeps what it does not compute with right now (ZeRO-Offload, Ren et al., 2021;
// ZeRO-Infinity, Rajbhandari et al., 2021).
struct OffloadTo {
  enum class Kind : std::uint8_t {
    none,  // with the rest, in the memory of the device
    cpu,   // in the memory of the host
    nvme,  // in files of `directory`, from where it comes to the host unit by unit
  };
  Kind kind = Kind::none;
  std::string directory;

  // "none", "cpu" or "nvme:DIR"; flag is named in errors.
  SHERD_API static OffloadTo parse(std::string_view text, std::string_view flag);
};

// In which types a model is computed, sent and kept (mixed precision: Micikevicius et al., 2018;
// the names are those of PyTorch's MixedPrecisionPolicy). Weights and optimizer state are kept in
// `master`. A rank adds up its gradient in `master`, over all backward passes of a step, rounds it
// to `reduce` once, and sends that; the sum over ranks is taken and kept in `master`.
struct Precision {
  DType master = DType::f32;      // f32 or f64
  DType parameters = DType::f32;  // of gathered parameters and activations
  DType reduce = DType::f32;      // of gradients on their way
  DType output = DType::f32;      // what the model's output is cast to

  Precision() = default;
  Precision(DType all)  // implicit on purpose: all four are this one
      : master(all), parameters(all), reduce(all), output(all) {}
  bool mixed() const { return parameters != master; }
  bool operator==(const Precision&) const = default;
};

// Throws unless master is f32 and the others are f32, bf16 or f16, or all are f64.
SHERD_API void validate(const Precision& precision);
// "f32", "bf16, gradients sent in bf16, output in f32, weights kept in f32"
SHERD_API std::string describe(const Precision& precision);

struct ShardingOptions {
  ShardingPolicy policy = ShardingPolicy::zero3;
  UnitRule units = {};
  ReshardAfterForward reshard_after_forward = {};
  int prefetch = 1;                // units gathered ahead of the one that computes
  std::int64_t persist_below = 0;  // parameters with fewer elements stay gathered
  // With several backward passes a step: reduce after each, which holds no full gradients but
  // communicates more, instead of after the last.
  bool reduce_every_pass = false;
  // On GPUs: sums over ranks in the fixed tree of comm/reduce.h, so that they have the bits of
  // ranks on processors, instead of NCCL's, which is faster and adds in orders of its own.
  bool exact_sums = false;
  // Axes "replicate" and "shard" over all ranks. Policy hybrid needs both; none may have one, and
  // then sums in its order; the others shard over all ranks.
  std::optional<ProcessMesh> mesh = {};
  // The optimizer state, and with it the gradients of this rank's shard (where gradients are
  // sharded) and, with mixed precision, its master weights.
  OffloadTo offload_optimizer = {};
  // This rank's shard of the parameters; for policies that shard them. With mixed precision the
  // optimizer must be offloaded too.
  OffloadTo offload_parameters = {};
};

// Throws, saying what to change, where the options do not fit each other or the number of ranks.
SHERD_API void validate(const ShardingOptions& options, int ranks, const Precision& precision = {});

// A policy as the engine sees it, once per unit.
struct UnitPolicy {
  bool shard_parameters = false;       // only a shard is kept at rest
  bool reshard_after_forward = false;  // and between forward and backward
  bool shard_gradients = false;        // reduced as soon as a unit's backward is done
  bool shard_optimizer = false;        // each rank updates its shard alone
};

SHERD_API UnitPolicy unit_policy(const ShardingOptions& options);
// Of the parameters that stay gathered, see persist_below.
SHERD_API UnitPolicy persistent_unit_policy(const ShardingOptions& options);

}  // namespace sherd
