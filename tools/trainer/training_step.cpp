// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/training_step.h>

#include <sherd/autograd/operations.h>
#include <sherd/autograd/tape.h>
#include <sherd/kernels/reduce.h>

#include <algorithm>
#include <cmath>

namespace sherd {

TrainingStep::TrainingStep(Context& context, Module& model, Optimizer& optimizer,
                           const StepSettings& settings)
    : context_(context),
      model_(model),
      optimizer_(optimizer),
      settings_(settings),
      parameters_(model.parameters()) {
  settings_.schedule.validate();
  SHERD_CHECK(settings.clip_grad_norm >= 0.0, "--clip-grad-norm: must not be negative, got {}",
              settings.clip_grad_norm);
  SHERD_CHECK(settings.label_smoothing >= 0.0 && settings.label_smoothing <= 1.0,
              "--label-smoothing: must be from 0 to 1, got {}", settings.label_smoothing);
  SHERD_CHECK(settings.micro_batch >= 0, "--micro-batch: must not be negative, got {}",
              settings.micro_batch);
  optimizer_.prepare(parameter_spans(parameters_));
}

double TrainingStep::forward_backward(const InputBuffers& inputs, std::int64_t samples) {
  Tape tape(context_);
  Variable loss;
  {
    const TapeScope recording(tape);
    const Variable logits = model_(inputs.images());
    loss = cross_entropy(logits, {inputs.labels(), {}, settings_.label_smoothing}, samples);
  }
  tape.backward(loss);
  return context_.is_meta() ? 0.0 : loss.tensor().item();
}

StepResult TrainingStep::run_staged(InputBuffers& inputs, std::int64_t samples,
                                    const std::function<void(std::int64_t, std::int64_t)>& stage) {
  const TraceScope trace(context_.trace(), "step", "step");
  model_.set_training(true);
  StepResult result;
  result.step = steps_;
  result.samples = samples;
  result.lr = settings_.schedule.at(steps_);
  const std::int64_t micro = settings_.micro_batch > 0 ? settings_.micro_batch : samples;
  for (std::int64_t begin = 0; begin < samples; begin += micro) {
    context_.set_random_position({static_cast<std::uint64_t>(steps_), begin});
    stage(begin, std::min(micro, samples - begin));
    result.loss += forward_backward(inputs, samples);
  }
  const std::vector<ParameterSpan> spans = parameter_spans(parameters_);
  {
    const TraceScope norm_trace(context_.trace(), "gradient_norm", "optimizer");
    result.grad_norm = gradient_norm(spans);
  }
  check_finite(result, inputs);
  {
    const TraceScope update_trace(context_.trace(), "optimizer", "optimizer");
    optimizer_.step(spans, result.lr, clip_factor(result.grad_norm, settings_.clip_grad_norm));
  }
  model_.clear_gradients();
  ++steps_;
  return result;
}

StepResult TrainingStep::run(InputBuffers& inputs, const Batch& batch) {
  return run_staged(inputs, batch.size, [&](std::int64_t begin, std::int64_t count) {
    inputs.stage(batch, begin, count);
  });
}

StepResult TrainingStep::run_shape(InputBuffers& inputs, std::int64_t samples) {
  return run_staged(inputs, samples,
                    [&](std::int64_t, std::int64_t count) { inputs.stage_shape(count); });
}

void TrainingStep::check_finite(const StepResult& result, const InputBuffers& inputs) {
  if (std::isfinite(result.loss) && std::isfinite(result.grad_norm)) return;
  std::string where = find_non_finite(model_, inputs.images());
  if (where.empty()) {
    // The forward pass is fine: look at gradients in the order in which backward made them.
    for (auto it = parameters_.rbegin(); it != parameters_.rend() && where.empty(); ++it) {
      const Tensor& grad = (*it)->grad();
      if (grad.defined() && first_non_finite(grad) >= 0) {
        where = fmt::format("gradient of {}", (*it)->name());
      }
    }
  }
  fail(
      "step {}: the {} is not finite (loss {}, gradient norm {}); first seen in {}. The step was "
      "not "
      "taken; try a lower learning rate, a longer warm-up or clipping",
      result.step, std::isfinite(result.loss) ? "gradient" : "loss", result.loss, result.grad_norm,
      where.empty() ? "the loss itself" : where);
}

std::string find_non_finite(Module& model, const Tensor& images) {
  const std::int64_t pixel = first_non_finite(images);
  if (pixel >= 0) return fmt::format("the input images (element {})", pixel);
  for (const Parameter* parameter : model.parameters()) {
    const std::int64_t index = first_non_finite(parameter->data());
    if (index >= 0) return fmt::format("parameter {} (element {})", parameter->name(), index);
  }
  std::string where;
  struct Hooks {  // removed even when the forward pass throws
    std::vector<std::pair<Module*, int>> all;
    ~Hooks() {
      for (const auto& [module, id] : all) module->remove_hook(id);
    }
  } hooks;
  model.for_each_module([&](Module& module) {
    hooks.all.emplace_back(
        &module, module.add_post_forward_hook([&where](Module& m, const Variable& y) {
          if (where.empty() && first_non_finite(y.tensor()) >= 0) {
            where = m.name().empty() ? "the model's output" : "the output of layer " + m.name();
          }
          return y;
        }));
  });
  const NoGradScope no_grad(images.context());
  model(images);
  return where;
}

}  // namespace sherd
