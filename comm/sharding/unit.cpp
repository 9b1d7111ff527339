// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/sharding/unit.h>

#include <sherd/kernels/elementwise.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <utility>

namespace sherd {
namespace {

FlatLayout make_layout(const UnitPlan& plan, int ranks) {
  std::vector<FlatParameter> flat;
  for (const Parameter* parameter : plan.parameters) {
    flat.push_back({parameter->name(), parameter->numel()});
  }
  return {std::move(flat), ranks};
}

// For work on a stream, which captures addresses; on meta there are none.
void* address(const Tensor& tensor) {
  return tensor.context().is_meta() ? nullptr : tensor.raw_data();
}

}  // namespace

ShardedUnit::ShardedUnit(Context& context, ShardingGroups& groups, UnitPlan plan, UnitPolicy policy,
                         DType dtype)
    : context_(context),
      groups_(groups),
      plan_(std::move(plan)),
      policy_(policy),
      dtype_(dtype),
      layout_(make_layout(plan_, groups.shard_count)),
      segments_(layout_.segments(groups.shard_rank)),
      arrivals_(plan_.parameters.size(), 0) {
  if (!trainable()) policy_.shard_gradients = policy_.shard_optimizer = false;
  const Shape full{layout_.padded_numel()};
  if (policy_.shard_parameters) {
    shard_ = Tensor::zeros(context, {layout_.shard_numel()}, dtype, MemoryCategory::parameters);
    flat_ = Tensor::released(context, full, dtype, MemoryCategory::gathered_parameters);
    flat_.storage().set_owner("unit " + name());
  } else {
    flat_ = Tensor::zeros(context, full, dtype, MemoryCategory::parameters);
    shard_ = piece(flat_);
    state_ = State::unsharded;
  }
  for (std::size_t i = 0; i < plan_.parameters.size(); ++i) {
    plan_.parameters[i]->set_data(view(flat_, i));
    if (!trainable()) continue;
    plan_.parameters[i]->set_grad_place([this, i] { return gradient_place(i); });
  }
}

ShardedUnit::~ShardedUnit() {
  for (Parameter* parameter : plan_.parameters) {
    parameter->set_grad_place({});
    parameter->clear_grad();
  }
}

// Asked for at the first contribution of each pass, since start_reduce() clears what came before.
Tensor ShardedUnit::gradient_place(std::size_t parameter) {
  SHERD_CHECK(!closed_,
              "parameter {} was used outside the forward of unit {}, which holds it, so its "
              "gradient comes after the unit's have been summed over the ranks; use it inside "
              "that module alone, or choose units of which one contains all its uses",
              plan_.parameters[parameter]->name(), name());
  check_not_summed();
  if (!full_grad_.defined()) {
    full_grad_ =
        Tensor::empty(context_, {layout_.padded_numel()}, dtype_, MemoryCategory::gradients);
  }
  return view(full_grad_, parameter);
}

Tensor ShardedUnit::view(const Tensor& flat, std::size_t parameter) const {
  const std::int64_t begin = layout_.offset(parameter);
  const Parameter& p = *plan_.parameters[parameter];
  return flat.slice(0, begin, begin + p.numel()).reshape(p.shape());
}

Tensor ShardedUnit::piece(const Tensor& flat) const {
  const std::int64_t begin = layout_.shard_offset(groups_.shard_rank);
  return flat.slice(0, begin, begin + layout_.shard_numel());
}

void ShardedUnit::visit_shards(const ShardVisitor& visit) const {
  if (!policy_.shard_parameters) {
    for (const Parameter* parameter : plan_.parameters) {
      if (parameter->numel() > 0) {
        visit(*parameter, 0, parameter->data().reshape({parameter->numel()}));
      }
    }
    return;
  }
  for (const ShardSegment& segment : segments_) {
    visit(*plan_.parameters[segment.parameter], segment.offset_in_parameter,
          shard_.slice(0, segment.offset_in_shard, segment.offset_in_shard + segment.numel));
  }
}

bool ShardedUnit::unshard() {
  if (state_ != State::sharded) return false;
  flat_.storage().restore();
  const bool near = secondary_.defined();
  Communicator* group = near ? groups_.secondary.get() : groups_.shard.get();
  const Tensor& source = near ? secondary_ : shard_;
  const std::int64_t count = source.numel();
  const void* from = address(source);
  void* to = address(flat_);
  std::string label = name() + (near ? " unshard from neighbours" : " unshard");
  gathered_ = groups_.enqueue(
      label, [=, dtype = dtype_] { group->all_gather(from, to, count, dtype, label); });
  flat_.storage().record_use(gathered_);
  source.storage().record_use(gathered_);
  flat_.storage().set_arriving(true);
  state_ = State::unsharding;
  return true;
}

bool ShardedUnit::wait() {
  if (state_ != State::unsharding) return false;
  gathered_.wait();
  flat_.storage().set_arriving(false);
  state_ = State::unsharded;
  return true;
}

bool ShardedUnit::reshard(bool keep_secondary) {
  if (!policy_.shard_parameters || state_ == State::sharded) return false;
  if (keep_secondary && groups_.secondary != nullptr && !secondary_.defined()) {
    const std::int64_t count = layout_.padded_numel() / groups_.secondary->size();
    const std::int64_t begin = groups_.secondary->rank() * count;
    secondary_ = clone(flat_.slice(0, begin, begin + count), MemoryCategory::gathered_parameters);
  }
  flat_.storage().record_use(context_.compute_stream().record());
  flat_.storage().release();
  state_ = State::sharded;
  return true;
}

// Full gradients stay where they were summed, so nothing can be added to them any more; nor to any
// once the ranks have agreed on the norm.
void ShardedUnit::check_not_summed() const {
  SHERD_CHECK(!agreed_ && (!reduced_once_ || policy_.shard_gradients),
              "unit {}: another backward pass after this step's gradients were summed over the "
              "ranks; call set_gradient_sync(false) for all passes of a step but the last, and "
              "finish_step() between steps",
              name());
}

void ShardedUnit::mark_passed() {
  check_not_summed();
  passed_ = true;
}

// Also where a module below this unit's was called by itself.
bool ShardedUnit::unreduced() const {
  return passed_ || (full_grad_.defined() && (policy_.shard_gradients || !reduced_once_));
}

// The buffer comes uninitialised: padding, and parameters not used in this pass, count as zero.
void ShardedUnit::zero_what_did_not_arrive() {
  if (!full_grad_.defined()) {
    full_grad_ =
        Tensor::empty(context_, {layout_.padded_numel()}, dtype_, MemoryCategory::gradients);
  }
  std::int64_t written = 0;
  const auto zero_until = [&](std::int64_t end) {
    if (written < end) sherd::fill(full_grad_.slice(0, written, end), 0.0);
  };
  for (std::size_t i = 0; i < plan_.parameters.size(); ++i) {
    const Parameter& parameter = *plan_.parameters[i];
    if (!parameter.grad().defined()) continue;
    arrivals_[i] = 1;
    zero_until(layout_.offset(i));
    written = layout_.offset(i) + parameter.numel();
  }
  zero_until(layout_.padded_numel());
}

void ShardedUnit::start_reduce() {
  zero_what_did_not_arrive();
  for (Parameter* parameter : plan_.parameters) parameter->clear_grad();
  passed_ = false;
  reduced_once_ = closed_ = true;
  // The next pass must not write into what is being summed. Where full gradients stay, there is no
  // next pass, see check_not_summed().
  input_ = full_grad_;
  adds_ = grad_shard_.defined();
  if (policy_.shard_gradients) full_grad_ = {};
  if (policy_.shard_gradients && !adds_) {
    grad_shard_ =
        Tensor::empty(context_, {layout_.shard_numel()}, dtype_, MemoryCategory::gradients);
  }
  // A second reduction of a step arrives in this rank's piece of its own input, to be added then.
  const bool all = !policy_.shard_optimizer;
  const Tensor result = all                                 ? input_
                        : policy_.shard_gradients && !adds_ ? grad_shard_
                                                            : piece(input_);
  const void* from = address(input_);
  void* to = address(result);
  const std::int64_t count = result.numel();
  std::string label = name() + " reduce";
  reduced_ = groups_.enqueue(label, [=, groups = &groups_, dtype = dtype_] {
    if (all) return groups->sum_over_all(to, count, dtype, label);
    groups->shard->reduce_scatter(from, to, count, dtype, ReduceOp::sum, label);
    if (groups->replicate) {
      groups->replicate->all_reduce(to, count, dtype, ReduceOp::sum, label);
    }
  });
  input_.storage().record_use(reduced_);
  result.storage().record_use(reduced_);
}

void ShardedUnit::finish_reduce() {
  reduced_.wait();
  const Tensor input = std::exchange(input_, {});
  if (policy_.shard_gradients && adds_) add_inplace(grad_shard_, piece(input));
}

Tensor ShardedUnit::own_gradient() const {
  if (!reduced_once_) return {};
  return policy_.shard_gradients ? grad_shard_ : piece(full_grad_);
}

void ShardedUnit::set_arrivals(const std::int64_t* sums) {
  std::copy_n(sums, arrivals_.size(), arrivals_.begin());
  agreed_ = true;
}

bool ShardedUnit::has_gradient() const {
  return std::ranges::any_of(arrivals_, [](std::int64_t count) { return count > 0; });
}

std::vector<ParameterSpan> ShardedUnit::spans() const {
  std::vector<ParameterSpan> spans;
  if (!trainable()) return spans;
  const auto add = [&](std::size_t index, const Tensor& values, const Tensor& grads,
                       std::int64_t begin, std::int64_t numel) {
    const Parameter& parameter = *plan_.parameters[index];
    const bool has_grad = grads.defined() && arrivals_[index] > 0;
    spans.push_back({parameter.name(), values.slice(0, begin, begin + numel),
                     has_grad ? grads.slice(0, begin, begin + numel) : Tensor(),
                     parameter.weight_decay()});
  };
  if (policy_.shard_optimizer) {
    for (const ShardSegment& segment : segments_) {
      add(segment.parameter, shard_, own_gradient(), segment.offset_in_shard, segment.numel);
    }
  } else {
    for (std::size_t i = 0; i < plan_.parameters.size(); ++i) {
      add(i, flat_, full_grad_, layout_.offset(i), plan_.parameters[i]->numel());
    }
  }
  return spans;
}

Event ShardedUnit::start_gather_update() {
  const void* from = address(shard_);
  void* to = address(flat_);
  Communicator* group = groups_.shard.get();
  std::string label = name() + " update";
  const Event gathered = groups_.enqueue(label, [=, count = layout_.shard_numel(), dtype = dtype_] {
    group->all_gather(from, to, count, dtype, label);
  });
  flat_.storage().record_use(gathered);
  return gathered;
}

void ShardedUnit::mark_updated() {
  if (has_gradient()) flat_.storage().mark_modified();
}

void ShardedUnit::clear_gradients() {
  for (Parameter* parameter : plan_.parameters) parameter->clear_grad();
  full_grad_ = grad_shard_ = input_ = {};
  passed_ = reduced_once_ = closed_ = agreed_ = false;
  std::ranges::fill(arrivals_, 0);
}

}  // namespace sherd
