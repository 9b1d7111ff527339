// SPDX-License-Identifier: Apache-2.0
// Training in fp16 where a step overflows on one rank: every rank leaves out that very step.
#include <doctest/doctest.h>
#include <sherd/comm/agreement.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/runtime/data/synthetic.h>
#include <sherd/tools/trainer/training_step.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "sharding_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

using P = ShardingPolicy;

constexpr int kSteps = 5, kBadStep = 2;
constexpr std::int64_t kBatch = 11;  // ranks have different numbers of samples and passes
constexpr double kScale = 8192.0;
constexpr float kBadSample = 1500.0f;

// What overflows on the last rank, in the first of its passes.
enum class Place { forward, backward, sent_from_f16, sent_from_f32 };
constexpr Place kPlaces[] = {Place::forward, Place::backward, Place::sent_from_f16,
                             Place::sent_from_f32};
// The places that a lower scale can answer.
constexpr Place kGradients[] = {Place::backward, Place::sent_from_f16, Place::sent_from_f32};

// A sample far from all others makes sums over samples that only rounding for the way cannot hold.
bool by_sample(Place place) {
  return place == Place::sent_from_f16 || place == Place::sent_from_f32;
}

struct Passes {
  std::int64_t micro_batch = 0;
  bool reduce_every = false;
};
int key_of(const Passes& passes) {
  return static_cast<int>(passes.micro_batch) + (passes.reduce_every ? 1 : 0);
}
constexpr Passes kPasses[] = {{0, false}, {2, false}, {2, true}};

Workload workload(Place place) {
  return by_sample(place) ? odd_net() : tied_vit();
}

RunOptions options_of(Place place, const Passes& passes, P policy, int ranks) {
  RunOptions run = run_of(policy, ranks, by_sample(place));
  Precision precision;
  precision.reduce = DType::f16;
  if (place != Place::sent_from_f32) precision.parameters = DType::f16;
  run.precision = precision;
  run.sharding.reduce_every_pass = passes.reduce_every;
  return run;
}

StepSettings settings_of(const Passes& passes, const LossScaleSettings& scale) {
  StepSettings settings;
  settings.schedule = {.base_lr = 3e-3, .total_steps = kSteps + 1};
  settings.clip_grad_norm = 0.5;
  settings.label_smoothing = 0.1;
  settings.micro_batch = passes.micro_batch;
  settings.loss_scale = scale;
  return settings;
}

// One rank with the batches of every step, for a TrainingStep or by hand.
class BatchedRank {
 public:
  BatchedRank(RankTrainer& rank, Place place, const StepSettings& settings)
      : trainer_(rank),
        place_(place),
        settings_(settings),
        mine_(rank_slice(kBatch, rank.world.rank(), rank.world.size())),
        most_(rank_slice(kBatch, 0, rank.world.size()).size),
        micro_(settings.micro_batch > 0 ? settings.micro_batch : most_),
        inputs_(rank.context, *images_like(rank.work), kBatch, DType::f32) {
    Module& model = *rank.model;
    if (by_sample(place)) {
      model.add_pre_forward_hook([](Module&, const Variable& x) {
        return reshape(x, {x.shape().numel() / OddNet::kWidth, OddNet::kWidth});
      });
      return;
    }
    const bool forward = place == Place::forward;
    Module& where =
        forward ? *model.child("vit")->child("blocks")->child("1")->child("mlp") : model;
    // Armed for one pass, and for the search for what overflowed in it.
    where.add_post_forward_hook([this, forward](Module&, const Variable& y) {
      return armed_ && pass_++ % passes() == 0 ? scale(y, forward ? 1e9 : 1e6) : y;
    });
  }

  std::int64_t passes() const { return (most_ + micro_ - 1) / micro_; }

  StepResult step(TrainingStep& training, int batch_number) {
    const bool bad = batch_number == kBadStep && trainer_.world.rank() + 1 == trainer_.world.size();
    const BatchPtr batch = load(batch_number);
    if (bad && by_sample(place_)) {
      for (int i = 0; i < OddNet::kWidth; ++i) images_[static_cast<std::size_t>(i)] *= kBadSample;
    }
    pass_ = 0;
    armed_ = bad && !by_sample(place_);
    struct Disarm {
      bool& armed;
      ~Disarm() { armed = false; }
    } disarm{armed_};
    return training.run(inputs_, batch);
  }

  // The same without TrainingStep, with a scale and a batch of the caller's choice.
  GlobalStep step_by_hand(int number, int batch_number, double loss_scale) {
    const BatchPtr batch = load(batch_number);
    trainer_.model->set_training(true);
    double sum = 0.0;
    for (std::int64_t begin = 0; begin < most_; begin += micro_) {
      const std::int64_t count = std::clamp(mine_.size - begin, std::int64_t{0}, micro_);
      trainer_.engine.set_gradient_sync(begin + micro_ >= most_);
      trainer_.context.set_random_position(
          {static_cast<std::uint64_t>(number), mine_.begin + begin});
      if (count > 0) {
        inputs_.stage(batch, begin, count);
      } else {
        inputs_.stage_blank();
      }
      Tape tape(trainer_.context);
      Variable loss;
      {
        const TapeScope recording(tape);
        loss =
            cross_entropy((*trainer_.model)(inputs_.images()), {inputs_.labels(), {}, 0.1}, kBatch);
        if (count == 0) loss = scale(loss, 0.0);
      }
      tape.backward(loss, full(trainer_.context, loss.shape(), DType::f32, loss_scale));
      sum += loss.tensor().item();
    }
    GlobalStep all = trainer_.engine.finish_backward(sum);
    all.grad_norm /= loss_scale;
    trainer_.optimizer->step(trainer_.engine.spans(), settings_.schedule.at(number),
                             clip_factor(all.grad_norm, settings_.clip_grad_norm) / loss_scale);
    trainer_.engine.finish_step();
    return all;
  }

 private:
  static std::unique_ptr<ImageDataset> images_like(const Workload& work) {
    SyntheticOptions options{.size = 1, .channels = 1, .classes = work.classes};
    options.height = work.sample.size() == 3 ? work.sample[1] : 1;
    options.width = work.sample.back();
    return make_synthetic_dataset(options);
  }

  BatchPtr load(int number) {
    Context host({.threads = 1});
    const auto [images, labels] =
        make_batch(host, trainer_.work, DType::f32, number, mine_.begin, mine_.size);
    images_ = images.to_vector<float>();
    labels_ = labels.to_vector<std::int64_t>();
    Batch batch;
    batch.images = images_;
    batch.labels = labels_;
    batch.size = mine_.size;
    batch.begin = mine_.begin;
    batch.global_size = kBatch;
    return std::make_shared<const Batch>(batch);
  }

  RankTrainer& trainer_;
  Place place_;
  StepSettings settings_;
  SampleRange mine_;
  std::int64_t most_, micro_;
  InputBuffers inputs_;
  std::vector<float> images_;
  std::vector<std::int64_t> labels_;
  bool armed_ = false;
  std::int64_t pass_ = 0;
};

// What a rank keeps between steps, bit for bit.
struct Kept {
  std::map<std::string, std::vector<std::uint8_t>> bytes;
  std::int64_t updates = 0;
  MemoryBreakdown live{};
  bool operator==(const Kept&) const = default;
};

Kept kept_by(RankTrainer& rank) {
  Kept kept;
  kept.live = rank.context.ledger().live();  // visit_shards() would let go of what is left over
  const auto add = [&](const std::string& name, const Tensor& x) {
    std::vector<std::uint8_t>& all = kept.bytes[name];
    const auto* first = static_cast<const std::uint8_t*>(x.raw_data());
    all.insert(all.end(), first, first + static_cast<std::size_t>(x.numel()) * size_of(x.dtype()));
  };
  rank.engine.visit_shards(
      [&](const Parameter& parameter, std::int64_t first, const Tensor& elements) {
        add(fmt::format("{} from {}", parameter.name(), first), elements);
      });
  for (const auto& [name, state] : rank.optimizer->state()) add(name, state);
  kept.updates = rank.optimizer->steps_done();
  return kept;
}

struct Outcome {
  RunResult result;
  Kept kept;
};

// Runs body on all ranks, which must agree on the result.
std::vector<Outcome> run_all(int ranks, Place place, const RunOptions& run,
                             const std::function<void(RankTrainer&, RunResult&)>& body) {
  std::vector<Outcome> all(static_cast<std::size_t>(ranks));
  on_threads(ranks, workload(place), run, [&](RankTrainer& rank) {
    Outcome& mine = all[static_cast<std::size_t>(rank.world.rank())];
    body(rank, mine.result);
    rank.weights_into(mine.result);
    mine.kept = kept_by(rank);
  });
  for (const Outcome& outcome : all) CHECK(outcome.result == all.front().result);
  return all;
}

// With the scale that each step had; a step of scale 0 never was.
std::vector<Outcome> run_by_hand(int ranks, Place place, const Passes& passes,
                                 const RunOptions& run, const std::vector<double>& scales) {
  return run_all(ranks, place, run, [&](RankTrainer& rank, RunResult& result) {
    BatchedRank batched(rank, place, settings_of(passes, {}));
    for (int step = 0; step < kSteps; ++step) {
      if (scales[static_cast<std::size_t>(step)] == 0.0) continue;
      const GlobalStep all =
          batched.step_by_hand(step, step, scales[static_cast<std::size_t>(step)]);
      result.losses.push_back(all.loss);
      result.norms.push_back(all.grad_norm);
    }
  });
}

// Calls body for every number of ranks, way to divide a batch, and policy that goes with it.
void for_each_run(Place place,
                  const std::function<void(int, const Passes&, const RunOptions&)>& body) {
  for (const int ranks : {1, 2, 3, 4}) {
    CAPTURE(ranks);
    for (const Passes& passes : kPasses) {
      CAPTURE(passes.micro_batch);
      CAPTURE(passes.reduce_every);
      for (const P policy : kPolicies) {
        const RunOptions run = options_of(place, passes, policy, ranks);
        if (passes.reduce_every && !unit_policy(run.sharding).shard_gradients) continue;
        CAPTURE(name_of(policy));
        body(ranks, passes, run);
      }
    }
  }
}

}  // namespace

TEST_CASE("loss scale: where one rank overflows, all skip that step, as if it had never been") {
  for (const Place place : kGradients) {
    CAPTURE(static_cast<int>(place));
    for (const std::int64_t hysteresis : {1, 2}) {
      CAPTURE(hysteresis);
      const double after = hysteresis == 1 ? kScale / 2 : kScale;
      const std::vector<double> scales{kScale, kScale, kScale, after, after};
      std::map<std::pair<int, int>, RunResult> expected;  // by ranks and passes: of all policies
      for_each_run(place, [&](int ranks, const Passes& passes, const RunOptions& run) {
        const auto outcomes = run_all(ranks, place, run, [&](RankTrainer& rank, RunResult& result) {
          const StepSettings settings =
              settings_of(passes, {.initial = kScale, .hysteresis = hysteresis});
          BatchedRank batched(rank, place, settings);
          TrainingStep step(rank.context, *rank.model, rank.engine, *rank.optimizer, settings);
          for (int number = 0; number < kSteps; ++number) {
            const bool bad = number == kBadStep;
            const Kept before = kept_by(rank);
            const StepResult now = batched.step(step, number);
            SHERD_CHECK(now.step == number && step.steps_done() == number + 1, "step {} of {}",
                        now.step, step.steps_done());
            SHERD_CHECK(now.skipped == bad, "step {}: skipped: {}, loss {}, norm {}", number,
                        now.skipped, now.loss, now.grad_norm);
            SHERD_CHECK(now.loss_scale == scales[static_cast<std::size_t>(number)],
                        "step {}: scale {}", number, now.loss_scale);
            SHERD_CHECK((kept_by(rank) == before) == bad, "step {}: {}", number,
                        bad ? "something has changed" : "nothing has changed");
            if (bad) {
              SHERD_CHECK(std::isfinite(now.loss) && !std::isfinite(now.grad_norm),
                          "loss {}, norm {}", now.loss, now.grad_norm);
              continue;
            }
            result.losses.push_back(now.loss);
            result.norms.push_back(now.grad_norm);
          }
        });
        std::vector<double> others = scales;
        others[kBadStep] = 0.0;
        const auto reference = run_by_hand(ranks, place, passes, run, others);
        for (std::size_t i = 0; i < outcomes.size(); ++i) {
          CHECK(outcomes[i].result == reference[i].result);
          CHECK(outcomes[i].kept.bytes == reference[i].kept.bytes);
          CHECK(outcomes[i].kept.updates == kSteps - 1);
        }
        const auto first =
            expected.emplace(std::pair(ranks, key_of(passes)), outcomes.front().result).first;
        CHECK(outcomes.front().result == first->second);
      });
    }
  }
}

TEST_CASE("loss scale: an overflow that cannot be answered is an error that all ranks share") {
  for (const Place place : kPlaces) {
    CAPTURE(static_cast<int>(place));
    std::map<std::pair<int, int>, std::string> said;  // by ranks and passes: of all policies
    for_each_run(place, [&](int ranks, const Passes& passes, const RunOptions& run) {
      const bool fixed = passes.reduce_every;
      std::vector<std::string> messages(static_cast<std::size_t>(ranks));
      run_all(ranks, place, run, [&](RankTrainer& rank, RunResult&) {
        // With a fixed scale as with the lowest; for a loss whatever the scale.
        LossScaleSettings scale{.initial = kScale,
                                .minimum = place == Place::forward ? 1.0 : kScale};
        scale.dynamic = !fixed;
        const StepSettings settings = settings_of(passes, scale);
        BatchedRank batched(rank, place, settings);
        TrainingStep step(rank.context, *rank.model, rank.engine, *rank.optimizer, settings);
        for (int number = 0; number < kBadStep; ++number) batched.step(step, number);
        const Kept before = kept_by(rank);
        try {
          batched.step(step, kBadStep);
        } catch (const AgreedError& error) {
          messages[static_cast<std::size_t>(rank.world.rank())] = error.what();
        }
        rank.engine.abandon_step();
        SHERD_CHECK(kept_by(rank) == before, "something has changed");
        SHERD_CHECK(step.steps_done() == kBadStep, "{} steps are counted", step.steps_done());
        // The ranks can go on together.
        const StepResult next = batched.step(step, kBadStep + 1);
        SHERD_CHECK(!next.skipped && next.step == kBadStep && next.loss_scale == kScale,
                    "step {}, scale {}", next.step, next.loss_scale);
      });
      const std::string& message = messages.front();
      CAPTURE(message);
      for (const std::string& other : messages) CHECK(other == message);
      const bool forward = place == Place::forward;
      CHECK(message.find(fmt::format("step {}: the {} is not finite (loss ", kBadStep,
                                     forward ? "loss" : "gradient")) != std::string::npos);
      CHECK(message.find(forward ? ", loss scale 8192); first seen in "
                                 : ", loss scale 8192, which cannot be lowered); first seen in ") !=
            std::string::npos);
      CHECK(message.find(forward ? "first seen in the output of layer vit.blocks.1.mlp"
                                 : "first seen in the gradient of ") != std::string::npos);
      CHECK(message.find(fixed && !forward ? ", or --loss-scale auto" : ", or --precision bf16") !=
            std::string::npos);
      const auto first = said.emplace(std::pair(ranks, key_of(passes)), message).first;
      CHECK(message == first->second);
    });
  }
}
