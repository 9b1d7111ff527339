// SPDX-License-Identifier: Apache-2.0
// Training runs on any number of ranks, as threads or on paper.
#pragma once

#include <sherd/comm/faulty_communicator.h>
#include <sherd/comm/rank_threads.h>
#include <sherd/comm/sharding/engine.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/random.h>
#include <sherd/runtime/host_bytes.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "awkward_models.h"

namespace sherd::test {

struct RunOptions {
  ShardingOptions sharding;
  Precision precision = DType::f32;
  int steps = 10;
  std::int64_t batch = 12;  // over all ranks
  std::int64_t passes = 1;  // forward and backward passes a step
  bool sync_each_pass = false;
  int threads = 1;
  std::uint64_t seed = 3;
  Device device = Device::cpu;  // also what meta stands for
};

struct RunResult {
  std::vector<double> losses, norms;
  std::map<std::string, std::vector<std::uint8_t>> weights;  // raw bytes by name
  std::map<std::string, std::vector<double>> values;
  bool operator==(const RunResult&) const = default;
};

// A model, the shape of one sample, and what is done before each step.
struct Workload {
  std::function<std::unique_ptr<Module>()> model;
  std::vector<std::int64_t> sample;
  std::int64_t classes = 1;
  std::function<void(Module&, int step)> before_step;
};

inline Workload tied_vit() {
  return {[] { return std::make_unique<TiedViT>(); },
          {1, TiedViT::kSide, TiedViT::kSide},
          TiedViT::kClasses,
          {}};
}

inline Workload odd_net() {
  return {
      [] { return std::make_unique<OddNet>(); },
      {OddNet::kWidth},
      OddNet::kWidth,
      [](Module& module, int step) { dynamic_cast<OddNet&>(module).take_branch = step % 3 != 1; }};
}

inline constexpr ShardingPolicy kPolicies[] = {ShardingPolicy::none,  ShardingPolicy::zero1,
                                               ShardingPolicy::zero2, ShardingPolicy::grad_op,
                                               ShardingPolicy::zero3, ShardingPolicy::hybrid};

// Mixed precision of every kind. Everything in 16 bits comes first, twice.
inline std::vector<Precision> mixed_precisions() {
  std::vector<Precision> all(5);
  for (const std::size_t i : {0, 2, 4}) all[i].parameters = DType::bf16;
  all[1].parameters = all[1].reduce = all[1].output = DType::f16;
  all[0].reduce = all[3].reduce = DType::bf16;
  all[4].reduce = DType::f16;
  return all;
}

// The rule by which OddNet is divided.
inline UnitRule cells() {
  UnitRule rule;
  rule.kind = UnitRule::Kind::custom;
  rule.is_unit = OddNet::is_unit;
  return rule;
}

// A short run; hybrid in pairs where there are any. odd: of OddNet.
inline RunOptions run_of(ShardingPolicy policy, int ranks, bool odd = false) {
  RunOptions run;
  run.sharding.policy = policy;
  run.steps = 4;
  if (policy == ShardingPolicy::hybrid) {
    const int shard = ranks % 2 == 0 ? 2 : 1;
    run.sharding.mesh = ProcessMesh({{"replicate", ranks / shard}, {"shard", shard}});
  }
  if (odd) run.sharding.units = cells();
  return run;
}

inline std::vector<double> to_doubles(const Tensor& x) {
  if (x.dtype() == DType::f64) return x.to_vector<double>();
  const std::vector<float> narrow = x.to_vector<float>();
  return {narrow.begin(), narrow.end()};
}

// Samples [begin, begin + count) of the step's global batch; equal whoever makes them.
inline std::pair<Tensor, Tensor> make_batch(Context& context, const Workload& work, DType dtype,
                                            int step, std::int64_t begin, std::int64_t count) {
  std::int64_t per_sample = 1;
  for (const std::int64_t side : work.sample) per_sample *= side;
  const Tensor flat = Tensor::empty(context, {count * per_sample}, dtype, MemoryCategory::inputs);
  fill_normal(flat, 0.0, 1.0, RandomStream(11, "test", "images", static_cast<std::uint64_t>(step)),
              begin * per_sample);
  std::vector<std::int64_t> dims{count};
  dims.insert(dims.end(), work.sample.begin(), work.sample.end());
  std::vector<std::int64_t> labels;
  for (std::int64_t i = 0; i < count; ++i) labels.push_back((begin + i + step) % work.classes);
  const Tensor label = Tensor::empty(context, {count}, DType::i64, MemoryCategory::inputs);
  if (!context.is_meta()) label.copy_from_host(labels.data(), labels.size() * sizeof labels[0]);
  return {flat.reshape(Shape(std::span<const std::int64_t>(dims))), label};
}

// One rank of a training run.
class RankTrainer {
 public:
  Context context;
  const Workload work;
  const RunOptions options;
  Communicator& world;
  const std::unique_ptr<Module> model;
  ShardingEngine engine;
  const std::unique_ptr<Optimizer> optimizer;

  RankTrainer(Communicator& ranks, const Workload& workload, const RunOptions& run)
      : context({.device = ranks.on_paper() ? Device::meta : run.device,
                 .device_index = ranks.rank(),
                 .meta_of = run.device,
                 .threads = run.threads,
                 .seed = run.seed,
                 .rank = ranks.rank()}),
        work(workload),
        options(run),
        world(ranks),
        model(workload.model()),
        engine(*model, context, ranks, run.precision, run.sharding),
        optimizer(make_adamw({.weight_decay = 0.1})) {
    engine.initialize();
    engine.prepare(*optimizer);
  }

  // Of samples [from, to) of the step's batch, recorded on the context's tape.
  Variable loss_of(int step, std::int64_t from, std::int64_t to) {
    context.set_random_position({static_cast<std::uint64_t>(step), from});
    // A rank without samples takes part with one of weight zero.
    const auto [images, labels] = make_batch(context, work, options.precision.master, step, from,
                                             std::max<std::int64_t>(1, to - from));
    const Variable loss = cross_entropy((*model)(images), {labels, {}, 0.1}, options.batch);
    return to == from ? scale(loss, 0.0) : loss;
  }

  // This rank's samples in one of the step's passes.
  std::pair<std::int64_t, std::int64_t> samples(std::int64_t pass) const {
    const std::int64_t begin = options.batch * world.rank() / world.size();
    const std::int64_t end = options.batch * (world.rank() + 1) / world.size();
    return {begin + (end - begin) * pass / options.passes,
            begin + (end - begin) * (pass + 1) / options.passes};
  }

  // Up to and with finish_backward().
  GlobalStep forward_backward(int step) {
    if (work.before_step) work.before_step(*model, step);
    double loss_sum = 0.0;
    for (std::int64_t pass = 0; pass < options.passes; ++pass) {
      engine.set_gradient_sync(options.sync_each_pass || pass + 1 == options.passes);
      const auto [from, to] = samples(pass);
      Tape tape(context);
      Variable loss;
      {
        const TapeScope recording(tape);
        loss = loss_of(step, from, to);
      }
      tape.backward(loss);
      if (!context.is_meta()) loss_sum += loss.tensor().item();
    }
    return engine.finish_backward(loss_sum);
  }

  void update(const GlobalStep& all) {
    engine.update(*optimizer, 3e-3, clip_factor(all.grad_norm, 0.5));
  }

  GlobalStep step(int number) {
    const GlobalStep all = forward_backward(number);
    update(all);
    return all;
  }

  // All ranks together.
  void weights_into(RunResult& result) {
    engine.visit_parameters([&](const Parameter& parameter, const Tensor& weights) {
      add_weights(parameter, weights, result);
    });
  }

  static void add_weights(const Parameter& parameter, const Tensor& data, RunResult& result) {
    const HostBytes bytes(contiguous(data));
    result.weights[parameter.name()].assign(bytes.get().begin(), bytes.get().end());
    result.values[parameter.name()] = to_doubles(data);
  }
};

inline RunResult train_rank(Communicator& world, const Workload& work, const RunOptions& options) {
  RankTrainer rank(world, work, options);
  RunResult result;
  for (int step = 0; step < options.steps; ++step) {
    const GlobalStep all = rank.step(step);
    result.losses.push_back(all.loss);
    result.norms.push_back(all.grad_norm);
  }
  rank.weights_into(result);
  return result;
}

// Runs body(RankTrainer) for every rank on threads of this process, and for one rank on meta.
inline void on_threads(int ranks, const Workload& work, const RunOptions& options,
                       const std::function<void(RankTrainer&)>& body) {
  run_rank_threads(ranks, [&](Communicator& world) {
    RankTrainer rank(world, work, options);
    body(rank);
  });
}

inline void on_meta(int rank, int ranks, const Workload& work, const RunOptions& options,
                    const std::function<void(RankTrainer&)>& body) {
  const std::unique_ptr<Communicator> world = make_meta_communicator(rank, ranks);
  RankTrainer trainer(*world, work, options);
  body(trainer);
}

// Runs body on the ranks of `world` again, with faults.
inline void with_faults(Communicator& world, std::vector<Fault> faults,
                        const std::function<void(Communicator&)>& body) {
  std::vector<int> members(static_cast<std::size_t>(world.size()));
  std::iota(members.begin(), members.end(), 0);
  const auto faulty = make_faulty_communicator(world.split(members, "all"), std::move(faults));
  try {
    body(*faulty);
  } catch (...) {
    // So that the run is known to have ended for this reason.
    if (!faulty->end_reason().empty()) world.abort(faulty->end_reason());
    throw;
  }
}

// On threads of this process; the result of rank 0, after checking that all ranks have the same.
inline RunResult train_ranks(int ranks, const Workload& work, const RunOptions& options) {
  std::vector<RunResult> results(static_cast<std::size_t>(ranks));
  run_rank_threads(ranks, [&](Communicator& world) {
    results[static_cast<std::size_t>(world.rank())] = train_rank(world, work, options);
  });
  for (const RunResult& result : results) {
    SHERD_CHECK(result == results.front(), "the ranks of one run ended with different weights");
  }
  return results.front();
}

}  // namespace sherd::test
