// SPDX-License-Identifier: Apache-2.0
#include <sherd/autograd/recompute.h>
#include <sherd/autograd/tape.h>
#include <sherd/kernels/dispatch.h>
#include <sherd/kernels/elementwise.h>

namespace sherd {
namespace {

struct ParameterNode final : Node {
  explicit ParameterNode(Parameter& p) : parameter(p) {}
  Parameter& parameter;
  const char* name() const override { return "parameter"; }
  void backward(Gradients& g) override { parameter.accumulate_grad(g.output()); }
};

}  // namespace

bool Gradients::wants(int input) const {
  return inputs_[static_cast<std::size_t>(input)] >= 0;
}

void Gradients::set(int input, Tensor gradient) {
  const int slot = inputs_[static_cast<std::size_t>(input)];
  if (slot >= 0) tape_.accumulate(slot, std::move(gradient));
}

Tensor Gradients::place(int input) const {
  const int slot = inputs_[static_cast<std::size_t>(input)];
  if (slot < 0) return {};
  const Tape::Slot& target = tape_.slots_[static_cast<std::size_t>(slot)];
  if (target.parameter == nullptr || target.gradient.defined()) return {};
  return target.parameter->grad_place();
}

Tensor Gradients::accumulated(int input) const {
  const int slot = inputs_[static_cast<std::size_t>(input)];
  if (slot < 0) return {};
  const Tape::Slot& target = tape_.slots_[static_cast<std::size_t>(slot)];
  // A kernel adds in the value's type, which a parameter's gradient need not have.
  if (target.parameter != nullptr && target.parameter->data().dtype() != target.dtype) return {};
  const Tensor& sum = target.gradient;
  // Others may hold the same storage (an addition hands one gradient to both inputs).
  return sum.is_sole_owner() ? sum : Tensor();
}

Node::~Node() = default;

Tape::Tape(Context& context) : context_(context), id_(context.next_tape_id()) {}

Tape::Tape(Context& context, Recomputation& rerun) : Tape(context) {
  recomputation_ = &rerun;
  rerun_ = true;
}

Tape::~Tape() {
  if (context_.tape() == this) context_.set_tape(nullptr);
}

bool Tape::rerun_is_over_after(std::size_t saves) const {
  return rerun_ && recomputation_->is_over_after(saves);
}

void Tape::append(Record record) {
  if (!rerun_) records_.push_back(std::move(record));
}

int Tape::new_slot(const Tensor& tensor, bool keep) {
  slots_.push_back({{}, tensor.shape(), tensor.dtype(), keep, nullptr});
  return static_cast<int>(slots_.size()) - 1;
}

Variable Tape::watch(const Tensor& tensor) {
  return {tensor, id_, new_slot(tensor, true)};
}

Tensor Tape::gradient(const Variable& watched) const {
  check_owner(watched);
  const Slot& slot = slots_[static_cast<std::size_t>(watched.slot_)];
  SHERD_CHECK(slot.keep, "gradient: only a watched tensor keeps its gradient; call watch() on it");
  return slot.gradient;
}

Variable Tape::parameter(Parameter& parameter) {
  const auto found = parameters_.find(&parameter);
  const Tensor& data = parameter.data();
  // The data may have moved to other bytes since the first use; the place on the tape is the same.
  if (found != parameters_.end()) return {data, id_, found->second};
  const Variable variable(data, id_, new_slot(data, false));
  slots_.back().parameter = &parameter;
  slots_.back().dtype = compute_dtype(data.dtype());
  append({std::make_unique<ParameterNode>(parameter), {}, {}, {}, variable.slot_, 1});
  parameters_.emplace(&parameter, variable.slot_);
  return variable;
}

void Tape::check_owner(const Variable& variable) const {
  SHERD_CHECK(
      variable.slot_ < 0 || (variable.tape_id_ == id_ && &variable.context() == &context_),
      "a {} recorded on another tape is used on this one; detach() it, or watch() its tensor",
      variable.tensor().describe());
}

bool Tape::records(std::span<const Variable> inputs) const {
  bool any = false;
  for (const Variable& input : inputs) {
    check_owner(input);
    any = any || input.requires_grad();
  }
  return any;
}

std::vector<Variable> Tape::add(std::unique_ptr<Node> node, std::span<const Variable> inputs,
                                std::span<const Tensor> outputs) {
  SHERD_CHECK(!finished_, "{}: this tape has run backward already; record on a new one",
              node->name());
  Record record;
  record.node = std::move(node);
  for (const Variable& input : inputs) record.inputs.push_back(input.slot_);
  record.first_output = static_cast<int>(slots_.size());
  record.outputs = static_cast<int>(outputs.size());
  std::vector<Variable> variables;
  for (const Tensor& output : outputs) {
    variables.push_back(Variable(output, id_, new_slot(output, false)));
  }
  append(std::move(record));
  if (recomputation_ != nullptr) recomputation_->add_operation();
  return variables;
}

Variable Tape::add(std::unique_ptr<Node> node, std::span<const Variable> inputs,
                   const Tensor& output) {
  return add(std::move(node), inputs, std::span<const Tensor>(&output, 1)).front();
}

void Tape::on_backward(std::string label, std::function<void()> hook) {
  SHERD_CHECK(!finished_, "{}: this tape has run backward already; record on a new one", label);
  append({nullptr, std::move(hook), std::move(label), {}, 0, 0});
}

void Tape::accumulate(int index, Tensor gradient) {
  Slot& slot = slots_[static_cast<std::size_t>(index)];
  SHERD_INTERNAL_CHECK(gradient.shape() == slot.shape && is_floating(gradient.dtype()),
                       "a gradient is {}, expected {} {}", gradient.describe(), name_of(slot.dtype),
                       slot.shape.to_string());
  if (gradient.dtype() != slot.dtype) gradient = cast(gradient, slot.dtype);
  if (!slot.gradient.defined()) {
    slot.gradient = std::move(gradient);
  } else if (slot.gradient.is_sole_owner()) {
    add_inplace(slot.gradient, gradient);
  } else {
    slot.gradient = sherd::add(slot.gradient, gradient);
  }
}

void Tape::run(Record& record) {
  if (record.hook) {
    record.hook();
    return;
  }
  std::vector<Tensor> outputs;
  bool any = false;
  for (int i = 0; i < record.outputs; ++i) {
    Slot& slot = slots_[static_cast<std::size_t>(record.first_output + i)];
    any = any || slot.gradient.defined();
    outputs.push_back(std::move(slot.gradient));
    slot.gradient = {};
  }
  if (!any) return;
  const TraceScope trace(context_.trace(), record.node->name(), "backward");
  Gradients gradients(*this, record.inputs, outputs);
  record.node->backward(gradients);
}

void Tape::backward(const Variable& output, Tensor grad_output) {
  SHERD_CHECK(!finished_, "backward: this tape has run backward already and freed what it saved");
  SHERD_CHECK(!rerun_,
              "backward: this tape belongs to a forward that runs again, and keeps nothing");
  SHERD_CHECK(output.requires_grad(),
              "backward: the {} does not depend on anything that requires a gradient",
              output.tensor().describe());
  check_owner(output);
  if (!grad_output.defined()) {
    SHERD_CHECK(output.tensor().numel() == 1,
                "backward: an output gradient is needed for a {} (only a one-element output has a "
                "gradient of 1 by default)",
                output.tensor().describe());
    grad_output = full(context_, output.shape(), output.tensor().dtype(), 1.0);
  }
  SHERD_CHECK(
      grad_output.shape() == output.shape() && grad_output.dtype() == output.tensor().dtype(),
      "backward: output gradient is {}, output is {}", grad_output.describe(),
      output.tensor().describe());
  finished_ = true;
  const NoGradScope no_grad(context_);
  accumulate(output.slot_, std::move(grad_output));
  while (!records_.empty()) {
    Record record = std::move(records_.back());
    records_.pop_back();
    try {
      run(record);
    } catch (const Error& error) {
      const std::string place =
          fmt::format("backward of {}", record.node ? record.node->name() : record.label.c_str());
      if (const auto* memory = dynamic_cast<const OutOfMemory*>(&error))
        throw OutOfMemory(place, *memory);
      fail("{}: {}", place, error.what());
    }
  }
}

TapeScope::TapeScope(Tape& tape) : context_(tape.context()), previous_(context_.tape()) {
  context_.set_tape(&tape);
}
TapeScope::~TapeScope() {
  context_.set_tape(previous_);
}

NoGradScope::NoGradScope(Context& context) : context_(context), previous_(context.tape()) {
  context_.set_tape(nullptr);
}
NoGradScope::~NoGradScope() {
  context_.set_tape(previous_);
}

}  // namespace sherd
