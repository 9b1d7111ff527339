// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/captured_step.h>

#include <sherd/runtime/error.h>

namespace sherd {

std::string CapturedStep::refusal(const Context& context, const ShardingEngine& engine,
                                  const Optimizer& optimizer) {
  if (context.device() != Device::cuda) return "it needs --device cuda";
  if (optimizer.scalar_count() == 0)
    return "its learning rate is no number in the device's memory; --optimizer adamw has that";
  const ShardingOptions& options = engine.options();
  if (options.offload_optimizer.kind != OffloadTo::Kind::none)
    return "--offload-optimizer updates on the host, which a graph does not repeat";
  if (options.offload_parameters.kind == OffloadTo::Kind::nvme)
    return "--offload-parameters nvme reads files, which a graph does not repeat";
  return "";
}

// What graphs work on stays theirs: nothing else may lie there between two replays.
CapturedStep::CapturedStep(Context& context, ShardingEngine& engine, Optimizer& optimizer)
    : context_(context),
      engine_(engine),
      optimizer_(optimizer),
      scalars_(Tensor::zeros(context, {optimizer.scalar_count()}, DType::f64,
                             MemoryCategory::optimizer_state)) {
  engine_.groups().join();
  context_.compute_stream().synchronize();
  context_.allocator().begin_private();
  context_.host_allocator().begin_private();
}

CapturedStep::~CapturedStep() {
  if (!update_) end_private();
  passes_.clear();
  update_.reset();
  context_.allocator().free_private();
  context_.host_allocator().free_private();
}

void CapturedStep::end_private() {
  context_.allocator().end_private();
  context_.host_allocator().end_private();
}

std::unique_ptr<cuda::Graph> CapturedStep::capture(const std::function<void()>& body) {
  struct Capturing {
    Context& context;
    explicit Capturing(Context& c) : context(c) { context.set_capturing(true); }
    ~Capturing() { context.set_capturing(false); }
  } capturing(context_);
  return cuda::Graph::capture(context_.compute_stream(), [&] {
    body();
    engine_.groups().join();
  });
}

void CapturedStep::capture_pass(const std::function<Tensor()>& forward_backward, bool last) {
  passes_.push_back(capture([&] {
    losses_.push_back(forward_backward());
    if (last) gradient_ = engine_.complete_backward();
  }));
  passes_.back()->launch(context_.compute_stream());
}

void CapturedStep::capture_update(double lr, double grad_scale) {
  optimizer_.read_scalars_from(scalars_);
  try {
    update_ = capture([&] { engine_.update(optimizer_, lr, grad_scale); });
  } catch (...) {
    optimizer_.read_scalars_from({});
    throw;
  }
  optimizer_.read_scalars_from({});
  end_private();
  write_scalars(lr, grad_scale);
  update_->launch(context_.compute_stream());
}

void CapturedStep::replay_update(double lr, double grad_scale) {
  optimizer_.count_replayed_step();
  write_scalars(lr, grad_scale);
  update_->launch(context_.compute_stream());
}

void CapturedStep::write_scalars(double lr, double grad_scale) {
  const std::vector<double> values = optimizer_.scalars(lr, grad_scale);
  scalars_.copy_from_host(values.data(), values.size() * sizeof values[0]);
}

GlobalStep CapturedStep::agree() {
  double loss = 0.0;
  for (const Tensor& part : losses_) loss += part.item();
  LocalGradient gradient = *gradient_;
  const GlobalStep all = engine_.agree(loss, gradient);
  if (!update_) engine_.accept(gradient);  // in the step that is captured
  return all;
}

}  // namespace sherd
