// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/training_step.h>

#include <sherd/autograd/operations.h>
#include <sherd/autograd/tape.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/reduce.h>
#include <sherd/tools/trainer/ranks.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace sherd {
namespace {

// A rank that has no samples left takes part with one of weight zero.
void put_in(InputBuffers& inputs, std::int64_t begin, std::int64_t count,
            const std::function<void(std::int64_t, std::int64_t)>& stage) {
  if (count > 0) return stage(begin, count);
  inputs.stage_blank();
}

void call_once(std::function<void()>& work) {
  if (work) std::exchange(work, nullptr)();
}

}  // namespace

TrainingStep::TrainingStep(Context& context, Module& model, ShardingEngine& engine,
                           Optimizer& optimizer, const StepSettings& settings)
    : context_(context),
      model_(model),
      engine_(engine),
      optimizer_(optimizer),
      settings_(settings) {
  settings_.schedule.validate();
  SHERD_CHECK(settings.clip_grad_norm >= 0.0, "--clip-grad-norm: must not be negative, got {}",
              settings.clip_grad_norm);
  SHERD_CHECK(settings.label_smoothing >= 0.0 && settings.label_smoothing <= 1.0,
              "--label-smoothing: must be from 0 to 1, got {}", settings.label_smoothing);
  SHERD_CHECK(settings.micro_batch >= 0, "--micro-batch: must not be negative, got {}",
              settings.micro_batch);
  if (settings.loss_scale) scaler_.emplace(*settings.loss_scale);
  engine_.prepare(optimizer_);
  if (!settings.graph) return;
  graph_refusal_ = CapturedStep::refusal(context, engine, optimizer);
  if (settings.loss_scale && settings.loss_scale->dynamic)
    graph_refusal_ = "the loss scale changes; --precision bf16 needs none";
}

// The loss is divided by the samples of all ranks and passes, so that contributions add up to the
// mean, however many samples each has.
Tensor TrainingStep::forward_backward(const InputBuffers& inputs, std::int64_t samples,
                                      bool weightless) {
  Tape tape(context_);
  Variable loss;
  {
    const TapeScope recording(tape);
    const Variable logits = model_(inputs.images());
    loss = cross_entropy(logits, {inputs.labels(), {}, settings_.label_smoothing}, samples);
    if (weightless) loss = scale(loss, 0.0);
  }
  tape.backward(loss, full(context_, loss.shape(), loss.tensor().dtype(), loss_scale()));
  return loss.tensor();
}

void TrainingStep::for_each_pass(
    std::int64_t samples,
    const std::function<void(std::int64_t begin, std::int64_t count, bool last)>& pass) {
  const Communicator& world = engine_.groups().world;
  const SampleRange mine = rank_slice(samples, world.rank(), world.size());
  const std::int64_t most = rank_slice(samples, 0, world.size()).size;
  const std::int64_t micro = settings_.micro_batch > 0 ? settings_.micro_batch : most;
  for (std::int64_t begin = 0; begin < most; begin += micro) {
    context_.set_random_position({static_cast<std::uint64_t>(steps_), mine.begin + begin});
    pass(begin, std::clamp(mine.size - begin, std::int64_t{0}, micro), begin + micro >= most);
  }
}

// Two steps run as usual first: the allocator, the libraries and the engine's order are then what
// they stay. A step of another size, as at the end of an epoch, runs as usual too.
bool TrainingStep::may_replay(std::int64_t samples) {
  constexpr int kWarmSteps = 2;
  if (!settings_.graph || !graph_refusal_.empty()) return false;
  if (captured_) return samples == captured_samples_;
  if (samples != captured_samples_) {
    captured_samples_ = samples;
    warm_steps_ = 0;
  }
  return warm_steps_++ >= kWarmSteps;
}

// Nothing where the step has to run as usual: it cannot be captured, or its loss or gradient is not
// finite, which a step that runs as usual can explain.
std::optional<GlobalStep> TrainingStep::replay(InputBuffers& inputs, std::int64_t samples,
                                               const Stage& stage, Queued& queued) {
  const bool capturing = captured_ == nullptr;
  std::string reason;
  try {
    if (capturing) captured_ = std::make_unique<CapturedStep>(context_, engine_, optimizer_);
    std::size_t pass = 0;
    for_each_pass(samples, [&](std::int64_t begin, std::int64_t count, bool last) {
      put_in(inputs, begin, count, stage);
      if (!capturing) return captured_->replay_pass(pass++);
      engine_.set_gradient_sync(last);
      captured_->capture_pass([&] { return forward_backward(inputs, samples, count == 0); }, last);
    });
  } catch (const std::exception& error) {
    if (!capturing) throw;
    reason = error.what();
  }
  if (capturing) {
    // All ranks, or none.
    std::int64_t failed = reason.empty() ? 0 : 1;
    // Of the groups that the step itself talks in: a rank that fails alone meets the others there.
    engine_.groups().sum_on_host(&failed, 1, DType::i64, "could all ranks capture the step");
    if (failed != 0) {
      captured_.reset();
      engine_.abandon_step();
      graph_refusal_ = reason.empty() ? "another rank could not capture its step" : reason;
      return {};
    }
  }
  call_once(queued);
  const GlobalStep all = captured_->agree();
  const bool finite = std::isfinite(all.loss) && std::isfinite(all.grad_norm);
  if (finite || capturing) return all;
  return {};
}

StepResult TrainingStep::run_staged(InputBuffers& inputs, std::int64_t samples, const Stage& stage,
                                    Queued queued) {
  const TraceScope trace(context_.trace(), "step", "step");
  model_.set_training(true);
  StepResult result;
  result.step = steps_;
  result.samples = samples;
  result.lr = settings_.schedule.at(steps_);
  std::optional<GlobalStep> all;
  if (may_replay(samples)) all = replay(inputs, samples, stage, queued);
  const bool replayed = all.has_value();
  if (!replayed) {
    std::vector<Tensor> losses;  // read at the end: on a GPU that waits for all that came before
    for_each_pass(samples, [&](std::int64_t begin, std::int64_t count, bool last) {
      put_in(inputs, begin, count, stage);
      engine_.set_gradient_sync(last);
      losses.push_back(forward_backward(inputs, samples, count == 0));
    });
    call_once(queued);
    double loss = 0.0;
    for (const Tensor& part : losses) loss += context_.is_meta() ? 0.0 : part.item();
    losses.clear();
    const TraceScope norm_trace(context_.trace(), "gradient_norm", "optimizer");
    all = engine_.finish_backward(loss);
  }
  result.loss = all->loss;
  result.loss_scale = loss_scale();
  result.grad_norm = all->grad_norm / result.loss_scale;
  if (skip_overflow(result)) return result;
  check_finite(result, inputs);
  const double factor = clip_factor(result.grad_norm, settings_.clip_grad_norm) / result.loss_scale;
  {
    const TraceScope update_trace(context_.trace(), "optimizer", "optimizer");
    if (!replayed) {
      engine_.update(optimizer_, result.lr, factor);
    } else if (captured_->complete()) {
      captured_->replay_update(result.lr, factor);
    } else {
      captured_->capture_update(result.lr, factor);
    }
  }
  if (scaler_) scaler_->good_step();
  ++steps_;
  return result;
}

// The norm is that of all ranks, so all decide alike. A skipped step counts: its batch is used up
// and the schedule goes on, but the optimizer has not seen it. A loss that is not finite is no case
// for the scale, which only backward sees.
bool TrainingStep::skip_overflow(StepResult& result) {
  const bool overflowed = std::isfinite(result.loss) && !std::isfinite(result.grad_norm);
  if (!scaler_ || !overflowed || scaler_->exhausted()) return false;
  scaler_->overflow();
  engine_.abandon_step();
  result.skipped = true;
  ++steps_;
  return true;
}

void TrainingStep::restore(const StepState& state) {
  steps_ = state.steps;
  if (scaler_ && state.loss_scale.scale > 0.0) scaler_->restore(state.loss_scale);
}

StepResult TrainingStep::run(InputBuffers& inputs, const BatchPtr& batch,
                             const std::function<BatchPtr()>& next) {
  const auto prefetch = [&](const BatchPtr& from, std::int64_t begin) {
    const std::int64_t left = from->size - begin, micro = settings_.micro_batch;
    if (left > 0) inputs.prefetch(from, begin, micro > 0 ? std::min(micro, left) : left);
  };
  const auto stage = [&](std::int64_t begin, std::int64_t count) {
    inputs.stage(batch, begin, count);
    prefetch(batch, begin + count);
  };
  const auto queued = [&] {
    const BatchPtr following = next && inputs.copies_ahead() ? next() : nullptr;
    if (following != nullptr) prefetch(following, 0);
  };
  return run_staged(inputs, batch->global_size, stage, queued);
}

StepResult TrainingStep::run_shape(InputBuffers& inputs, std::int64_t samples) {
  return run_staged(inputs, samples,
                    [&](std::int64_t, std::int64_t count) { inputs.stage_shape(count); }, {});
}

// By its place in the model, which backward goes through from the end; -1 where there is none.
std::int64_t TrainingStep::first_non_finite_gradient() const {
  const std::vector<Parameter*> parameters = model_.parameters();
  std::int64_t first = -1;
  for (const ParameterSpan& span : engine_.spans()) {
    if (!span.grad.defined() || first_non_finite(span.grad) < 0) continue;
    const auto found = std::ranges::find(parameters, span.name, &Parameter::name);
    first = std::max<std::int64_t>(first, found - parameters.begin());
  }
  // A rank has pieces of some parameters alone: they find the first of all.
  engine_.groups().world.all_reduce(&first, 1, DType::i64, ReduceOp::max,
                                    "which gradient is not finite");
  return first;
}

void TrainingStep::check_finite(const StepResult& result, const InputBuffers& inputs) {
  if (std::isfinite(result.loss) && std::isfinite(result.grad_norm)) return;
  const auto message = [&](const std::string& place) {
    const bool lost = !std::isfinite(result.loss);
    const std::string scale = scaler_ ? fmt::format(", loss scale {}{}", result.loss_scale,
                                                    lost ? "" : ", which cannot be lowered")
                                      : "";
    const char* more = !scaler_                                ? ""
                       : lost || settings_.loss_scale->dynamic ? ", or --precision bf16"
                                                               : ", or --loss-scale auto";
    return fmt::format(
        "step {}: the {} is not finite (loss {}, gradient norm {}{}); first seen in {}. The step "
        "was not taken; try a lower learning rate, a longer warm-up or clipping{}",
        result.step, std::isfinite(result.loss) ? "gradient" : "loss", result.loss,
        result.grad_norm, scale, place, more);
  };
  // The loss and the norm are those of all ranks, so all come here; perhaps one alone finds where.
  const std::string where = find_non_finite(model_, engine_, inputs.images());
  agree_on_errors(engine_.groups().world, where.empty() ? "" : message(where));
  const std::int64_t first = first_non_finite_gradient();
  throw AgreedError(message(
      first < 0
          ? "the loss itself"
          : "the gradient of " + model_.parameters()[static_cast<std::size_t>(first)]->name()));
}

std::string find_non_finite(Module& model, ShardingEngine& engine, const Tensor& images) {
  std::string where;
  const std::int64_t pixel = first_non_finite(images);
  if (pixel >= 0) where = fmt::format("the input images (element {})", pixel);
  engine.visit_shards([&](const Parameter& parameter, std::int64_t first, const Tensor& elements) {
    if (!where.empty()) return;
    const std::int64_t index = first_non_finite(elements);
    if (index >= 0) {
      where = fmt::format("parameter {} (element {})", parameter.name(), first + index);
    }
  });
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
