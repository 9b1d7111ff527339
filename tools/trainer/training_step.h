// SPDX-License-Identifier: Apache-2.0
// One optimizer step: forward and backward over the micro-batches, gradient norm, clipping, update.
// The same code runs on every device; on meta it plans.
#pragma once

#include <sherd/models/module.h>
#include <sherd/optim/optimizer.h>
#include <sherd/optim/schedule.h>
#include <sherd/tools/trainer/data_source.h>

#include <functional>

namespace sherd {

struct StepSettings {
  LrSchedule schedule;
  double clip_grad_norm = 0.0;  // 0: none
  double label_smoothing = 0.0;
  std::int64_t micro_batch = 0;  // samples of one forward pass; 0: the whole batch
};

struct StepResult {
  std::int64_t step = 0;  // from 0
  std::int64_t samples = 0;
  double lr = 0.0;
  double loss = 0.0;       // mean over the batch
  double grad_norm = 0.0;  // before clipping
};

class SHERD_API TrainingStep {
 public:
  TrainingStep(Context& context, Module& model, Optimizer& optimizer, const StepSettings& settings);

  // Trains on the batch, staging it through `inputs` one micro-batch at a time. Throws when the
  // loss or a gradient is not finite, naming the step and the first layer or parameter where that
  // shows; the weights are then still those before the step.
  StepResult run(InputBuffers& inputs, const Batch& batch);
  // The same on `samples` samples whose values are whatever the buffers hold: for meta and for
  // timing.
  StepResult run_shape(InputBuffers& inputs, std::int64_t samples);

  std::int64_t steps_done() const { return steps_; }

 private:
  // stage(begin, count) puts these samples of the batch into the buffers.
  StepResult run_staged(InputBuffers& inputs, std::int64_t samples,
                        const std::function<void(std::int64_t, std::int64_t)>& stage);
  double forward_backward(const InputBuffers& inputs, std::int64_t samples);
  void check_finite(const StepResult& result, const InputBuffers& inputs);

  Context& context_;
  Module& model_;
  Optimizer& optimizer_;
  StepSettings settings_;
  std::vector<Parameter*> parameters_;
  std::int64_t steps_ = 0;
};

// "parameter ..." or "module ..." where the first non-finite value of a forward pass shows; empty
// if there is none.
SHERD_API std::string find_non_finite(Module& model, const Tensor& images);

}  // namespace sherd
