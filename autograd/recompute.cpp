// SPDX-License-Identifier: Apache-2.0
#include <sherd/autograd/recompute.h>

#include <sherd/autograd/tape.h>
#include <sherd/runtime/out_of_memory.h>

#include <algorithm>
#include <utility>

namespace sherd {
namespace {

constexpr const char* kAdvice =
    "; what runs again has to do the same both times: depend on its input, its parameters and the "
    "random position alone, and change nothing";

void check_not_written(const Tensor& tensor, std::uint64_t version, std::uint64_t saved_at) {
  SHERD_CHECK(
      version == saved_at,
      "a {} saved for backward was written in place since (version {}, saved at {}); write to "
      "a copy, or after backward",
      tensor.describe(), version, saved_at);
}

}  // namespace

SavedTensor::SavedTensor(const Tensor& tensor) {
  if (!tensor.defined()) return;
  value_ = std::make_shared<Value>(Value{tensor, tensor.storage().version(), nullptr});
  const Tape* tape = tensor.context().tape();
  if (tape != nullptr && tape->recomputation_ != nullptr) tape->recomputation_->add_saved(value_);
}

const Tensor& SavedTensor::get() const {
  SHERD_CHECK(defined(), "a value that backward needs was already freed");
  // A copy: the values let go of it when it has run.
  if (const std::shared_ptr<Recomputation> source = value_->source) source->run_again();
  const Tensor& tensor = value_->tensor;
  check_not_written(tensor, tensor.storage().version(), value_->version);
  return tensor;
}

Variable recompute(const std::string& name, std::function<Variable(const Variable&)> forward,
                   const Variable& input, bool offload_input) {
  Tape* tape = input.context().tape();
  if (tape == nullptr || tape->recomputation_ != nullptr) return forward(input);
  return std::make_shared<Recomputation>(name, std::move(forward), input, offload_input)
      ->run_first(*tape, input);
}

Recomputation::Recomputation(std::string name, Forward forward, const Variable& input,
                             bool offload_input)
    : context_(input.context()),
      name_(std::move(name)),
      forward_(std::move(forward)),
      input_(input.tensor()),
      offload_input_(offload_input && OffloadedTensor::can_move(input.tensor())),
      input_requires_grad_(input.requires_grad()),
      random_position_(context_.random_position()),
      first_serial_(context_.next_storage_serial()) {}

Variable Recomputation::run_first(Tape& tape, const Variable& input) {
  struct Inside {
    Tape& tape;
    ~Inside() { tape.recomputation_ = nullptr; }
  } const inside{tape};
  tape.recomputation_ = this;
  Variable output = forward_(input);
  leave_input(tape);
  return output;
}

// Is there a value that this has to make?
bool Recomputation::is_needed() const {
  return std::ranges::any_of(saved_, [](const Saved& saved) { return !saved.value.expired(); });
}

void Recomputation::leave_input(Tape& tape) {
  if (!is_needed()) return;
  previous_ = std::exchange(tape.last_recomputation_, weak_from_this());
  if (offloaded_) input_.value_->tensor = {};
}

void Recomputation::fetch_input() {
  if (offloaded_) offloaded_->fetch();
}

const Tensor& Recomputation::take_input() {
  if (offloaded_) {
    const Tensor tensor = offloaded_->get();
    check_not_written(tensor, offloaded_->version(), input_.value_->version);
    *input_.value_ = {tensor, tensor.storage().version(), nullptr};
    offloaded_.reset();
  }
  return input_.get();
}

void Recomputation::add_saved(const std::shared_ptr<SavedTensor::Value>& value) {
  const Tensor tensor = value->tensor;
  if (!again_) {
    saved_.push_back({tensor.shape(), tensor.dtype(), {}});
    const bool is_input = tensor.shared_storage() == input_.value_->tensor.shared_storage();
    if (!is_input && tensor.storage().serial() < first_serial_) return;
    value->tensor = {};
    value->source = shared_from_this();
    saved_.back().value = value;
    if (offload_input_ && !offloaded_) offloaded_.emplace(input_.value_->tensor);
    return;
  }
  const std::size_t index = next_++;
  SHERD_CHECK(index < saved_.size(), "it saved {} tensors for backward, and then more{}",
              saved_.size(), kAdvice);
  const Saved& first = saved_[index];
  SHERD_CHECK(tensor.shape() == first.shape && tensor.dtype() == first.dtype,
              "tensor {} of those that it saved for backward was a {} {}, and then a {}{}", index,
              name_of(first.dtype), first.shape.to_string(), tensor.describe(), kAdvice);
  if (const auto wanted = first.value.lock()) {
    wanted->tensor = tensor;
    wanted->version = value->version;
  }
}

void Recomputation::run_again() {
  const TraceScope trace(context_.trace(), name_, "recompute");
  const Tensor& input = take_input();
  if (const auto next = previous_.lock()) next->fetch_input();
  again_ = true;
  for (std::size_t i = 0; i < saved_.size(); ++i) {
    if (!saved_[i].value.expired()) wanted_ = i + 1;
  }
  struct Outside {
    Context& context;
    RandomPosition position = context.random_position();
    ~Outside() {
      context.set_random_position(position);
      context.set_recomputing(false);
    }
  } const outside{context_};
  context_.set_random_position(random_position_);
  context_.set_recomputing(true);
  try {
    Tape scratch(context_, *this);
    const TapeScope recording(scratch);
    forward_(input_requires_grad_ ? scratch.watch(input) : Variable(input));
    SHERD_CHECK(next_ == saved_.size() && operations_again_ == operations_,
                "it recorded {} operations and saved {} tensors for backward, and then {} and {}{}",
                operations_, saved_.size(), operations_again_, next_, kAdvice);
  } catch (const OutOfMemory& error) {
    forget_second_run();
    throw OutOfMemory(fmt::format("running the forward of {} again", name_), error);
  } catch (const Error& error) {
    forget_second_run();
    fail("running the forward of {} again: {}", name_, error.what());
  } catch (...) {
    forget_second_run();
    throw;
  }
  for (const Saved& saved : saved_) {
    if (const auto value = saved.value.lock()) value->source = nullptr;
  }
}

void Recomputation::forget_second_run() {
  for (const Saved& saved : saved_) {
    if (const auto value = saved.value.lock()) value->tensor = {};
  }
  again_ = false;
  next_ = wanted_ = 0;
  operations_again_ = 0;
}

}  // namespace sherd
