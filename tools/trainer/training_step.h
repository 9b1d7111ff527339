// SPDX-License-Identifier: Apache-2.0
// One optimizer step: forward and backward over the micro-batches, gradient norm, clipping, update.
// The same code runs on every device and on any number of ranks; on meta it plans.
#pragma once

#include <sherd/comm/sharding/engine.h>
#include <sherd/models/module.h>
#include <sherd/optim/loss_scaler.h>
#include <sherd/optim/optimizer.h>
#include <sherd/optim/schedule.h>
#include <sherd/tools/trainer/captured_step.h>
#include <sherd/tools/trainer/data_source.h>

#include <functional>
#include <optional>
#include <string>

namespace sherd {

struct StepSettings {
  LrSchedule schedule;
  double clip_grad_norm = 0.0;  // 0: none
  double label_smoothing = 0.0;
  // Samples of one rank's forward pass; 0: its whole part of the batch. All ranks make as many
  // passes as the one with the most samples; one that has none left takes part with weight zero.
  std::int64_t micro_batch = 0;
  std::optional<LossScaleSettings> loss_scale;  // for fp16
  bool graph = false;  // steps are captured and replayed, where they can be
};

struct StepResult {
  std::int64_t step = 0;  // from 0
  std::int64_t samples = 0;
  double lr = 0.0;
  double loss = 0.0;        // mean over the batch of all ranks
  double grad_norm = 0.0;   // before clipping
  double loss_scale = 1.0;  // of this step
  bool skipped = false;     // the scaled gradient overflowed, on some rank: nothing was updated
};

// What a checkpoint keeps of it.
struct StepState {
  std::int64_t steps = 0;        // done, skipped ones too
  LossScaler::State loss_scale;  // where one is scaled
};

class SHERD_API TrainingStep {
 public:
  // The engine must shard `model`. All ranks call everything together.
  TrainingStep(Context& context, Module& model, ShardingEngine& engine, Optimizer& optimizer,
               const StepSettings& settings);

  // Trains on the global batch of which `batch` is this rank's part, staging it through `inputs`
  // one micro-batch at a time. Throws an AgreedError when the loss or a gradient is not finite,
  // naming the step and the first layer or parameter where that shows; the weights are then still
  // those before the step. Where only the gradient overflowed, and the loss scale
  // can be lowered, the step is skipped instead.
  // `next`, where given and where the buffers copy ahead, is asked for the next step's batch when
  // the device has all work of this one but the update. It may return null.
  StepResult run(InputBuffers& inputs, const BatchPtr& batch,
                 const std::function<BatchPtr()>& next = {});
  // The same on a global batch of this size whose values are whatever the buffers hold: for meta
  // and for timing.
  StepResult run_shape(InputBuffers& inputs, std::int64_t samples);

  StepState state() const { return {steps_, scaler_ ? scaler_->state() : LossScaler::State()}; }
  void restore(const StepState& state);
  std::int64_t steps_done() const { return steps_; }                      // skipped ones too
  double loss_scale() const { return scaler_ ? scaler_->scale() : 1.0; }  // of the next step
  // Why steps are not captured although settings.graph asks for it; empty while nothing is known.
  const std::string& graph_refusal() const { return graph_refusal_; }
  bool replays() const { return captured_ != nullptr; }

 private:
  // stage(begin, count) puts these samples of the rank's part into the buffers.
  using Stage = std::function<void(std::int64_t begin, std::int64_t count)>;
  // queued() is called once, when the host has nothing to do but to wait for the passes.
  using Queued = std::function<void()>;
  StepResult run_staged(InputBuffers& inputs, std::int64_t samples, const Stage& stage,
                        Queued queued);
  Tensor forward_backward(const InputBuffers& inputs, std::int64_t samples, bool weightless);
  bool may_replay(std::int64_t samples);
  std::optional<GlobalStep> replay(InputBuffers& inputs, std::int64_t samples, const Stage& stage,
                                   Queued& queued);
  void for_each_pass(std::int64_t samples,
                     const std::function<void(std::int64_t begin, std::int64_t count, bool last)>&);
  bool skip_overflow(StepResult& result);
  void check_finite(const StepResult& result, const InputBuffers& inputs);
  std::int64_t first_non_finite_gradient() const;

  Context& context_;
  Module& model_;
  ShardingEngine& engine_;
  Optimizer& optimizer_;
  StepSettings settings_;
  std::optional<LossScaler> scaler_;
  std::int64_t steps_ = 0;
  std::unique_ptr<CapturedStep> captured_;
  std::int64_t captured_samples_ = 0;
  int warm_steps_ = 0;  // of that size, that ran as usual
  std::string graph_refusal_;
};

// "parameter ..." or "module ..." where the first non-finite value of a forward pass shows on this
// rank; empty if there is none. All ranks together.
SHERD_API std::string find_non_finite(Module& model, ShardingEngine& engine, const Tensor& images);

}  // namespace sherd
