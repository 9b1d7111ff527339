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
  return tensor.context().is_meta() ? nullptr : tensor.raw_address();
}

// Whether communicators reach it: those of a GPU do not reach the host's memory.
bool reaches(const Tensor& tensor) {
  return tensor.device() == tensor.context().device();
}

}  // namespace

ShardedUnit::ShardedUnit(Context& context, ShardingGroups& groups, OffloadFiles& files,
                         UnitPlan plan, UnitPolicy policy, const Precision& precision,
                         const ShardingOptions& options)
    : context_(context),
      groups_(groups),
      plan_(std::move(plan)),
      policy_(policy),
      precision_(precision),
      layout_(make_layout(plan_, groups.shard_count)),
      segments_(layout_.segments(groups.shard_rank)),
      offload_optimizer_(options.offload_optimizer),
      arrivals_(plan_.parameters.size(), 0) {
  if (!trainable()) policy_.shard_gradients = policy_.shard_optimizer = false;
  const Shape full{layout_.padded_numel()};
  if (policy_.shard_parameters) {
    flat_ =
        Tensor::released(context, full, precision.parameters, MemoryCategory::gathered_parameters);
    flat_.storage().set_owner("unit " + name());
  } else {
    flat_ = Tensor::zeros(context, full, precision.parameters, MemoryCategory::parameters);
    state_ = State::unsharded;
  }
  using Kind = OffloadTo::Kind;
  constexpr auto kParameters = MemoryCategory::parameters;
  const OffloadTo &to_optimizer = options.offload_optimizer, &to_shard = options.offload_parameters;
  if (to_optimizer.kind != Kind::none) gradient_pool_ = MemoryPool::host;
  const std::int64_t kept = keeps_shard() ? layout_.shard_numel() : layout_.padded_numel();
  if (precision.mixed()) {
    master_ = make_kept(kept, precision.master, kParameters, to_optimizer, files.optimizer,
                        "master weights", master_page_);
    if (policy_.shard_parameters && to_optimizer.kind != Kind::none) {
      shard_ = make_kept(layout_.shard_numel(), precision.parameters, kParameters, to_shard,
                         files.parameters, "parameters", shard_page_);
    }
  } else if (policy_.shard_parameters) {
    master_ = shard_ = make_kept(kept, precision.master, kParameters, to_shard, files.parameters,
                                 "parameters", master_page_);
  } else {
    master_ = keeps_shard() ? piece(flat_) : flat_;
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
  if (!full_grad_.defined()) full_grad_ = empty_gradient(layout_.padded_numel());
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

Tensor ShardedUnit::empty_gradient(std::int64_t numel, MemoryPool pool) const {
  return Tensor::empty(context_, {numel}, precision_.master, MemoryCategory::gradients, pool);
}

bool ShardedUnit::arrives_apart() const {
  return gradient_pool_ == MemoryPool::host && context_.target() == Device::cuda;
}

Tensor ShardedUnit::make_kept(std::int64_t numel, DType dtype, MemoryCategory category,
                              const OffloadTo& to, OffloadFile& file, const char* what,
                              std::unique_ptr<FilePage>& page) {
  if (to.kind != OffloadTo::Kind::nvme) {
    const bool host = to.kind == OffloadTo::Kind::cpu;
    return Tensor::zeros(context_, {numel}, dtype, category,
                         host ? MemoryPool::host : MemoryPool::device);
  }
  page = std::make_unique<FilePage>(context_, file, numel, dtype, category,
                                    fmt::format("{} of unit {}", what, name()));
  return page->tensor();
}

void ShardedUnit::fill_shards(const ShardVisitor& fill) {
  if (master_page_) {
    master_page_->create();
    sherd::fill(master_, 0.0);  // padding too
  }
  visit_kept(fill);
  round_master();
  for (FilePage* page : pages()) page->store();
  settle();
}

void ShardedUnit::visit_shards(const ShardVisitor& visit) {
  if (master_page_) master_page_->wait();
  visit_kept(visit);
  if (master_page_) master_page_->discard();
}

void ShardedUnit::visit_kept(const ShardVisitor& visit) const {
  if (holds_master()) {
    for (std::size_t i = 0; i < plan_.parameters.size(); ++i) {
      const Parameter& parameter = *plan_.parameters[i];
      if (parameter.numel() > 0)
        visit(parameter, 0, view(all_master(), i).reshape({parameter.numel()}));
    }
    return;
  }
  for (const ShardSegment& segment : segments_) {
    visit(*plan_.parameters[segment.parameter], segment.offset_in_parameter,
          master_.slice(0, segment.offset_in_shard, segment.offset_in_shard + segment.numel));
  }
}

std::vector<ShardSegment> ShardedUnit::kept_segments() const {
  if (keeps_shard()) return segments_;
  std::vector<ShardSegment> all;
  for (std::size_t i = 0; i < plan_.parameters.size(); ++i) {
    const std::int64_t numel = plan_.parameters[i]->numel();
    if (numel > 0) all.push_back({i, 0, layout_.offset(i), numel});
  }
  return all;
}

// Ranks that keep the same share it evenly.
std::vector<ShardSegment> ShardedUnit::owned_segments() const {
  const int copies = groups_.world.size() / (keeps_shard() ? groups_.shard_count : 1);
  const int copy = keeps_shard() ? groups_.replica : groups_.world.rank();
  const auto cut = [&](int index) {
    const std::int64_t numel = master_.numel(), step = FlatLayout::kDefaultAlignment;
    return index == copies ? numel : numel / step * index / copies * step;
  };
  const std::int64_t begin = cut(copy), end = cut(copy + 1);
  std::vector<ShardSegment> owned;
  for (ShardSegment s : kept_segments()) {
    const std::int64_t first = std::max(s.offset_in_shard, begin),
                       last = std::min(s.offset_in_shard + s.numel, end);
    if (first >= last) continue;
    s.offset_in_parameter += first - s.offset_in_shard;
    owned.push_back({s.parameter, s.offset_in_parameter, first, last - first});
  }
  return owned;
}

std::vector<ParameterPiece> ShardedUnit::owned_pieces() const {
  std::vector<ParameterPiece> pieces;
  for (const ShardSegment& s : owned_segments()) {
    pieces.push_back({plan_.parameters[s.parameter], s.offset_in_parameter, s.numel, trainable()});
  }
  return pieces;
}

void ShardedUnit::visit_owned(const PieceVisitor& visit) {
  for (FilePage* page : {master_page_.get(), state_page_.get()}) {
    if (page != nullptr) page->wait();
  }
  std::vector<Tensor> state(states_);
  for (const ShardSegment& s : owned_segments()) {
    const auto part = [&](const Tensor& all, std::int64_t begin) {
      return all.slice(0, begin, begin + s.numel);
    };
    for (std::size_t i = 0; i < states_; ++i) {
      state[i] = part(optimizer_state_,
                      static_cast<std::int64_t>(i) * master_.numel() + s.offset_in_shard);
    }
    visit({plan_.parameters[s.parameter], s.offset_in_parameter, s.numel, trainable()},
          part(master_, s.offset_in_shard), state);
  }
  for (FilePage* page : {master_page_.get(), state_page_.get()}) {
    if (page != nullptr) page->discard();
  }
}

void ShardedUnit::fill_state(const StateVisitor& fill) {
  if (states_ == 0) return;
  if (state_page_) {
    state_page_->create();
    sherd::fill(optimizer_state_, 0.0);  // padding too
  }
  for (std::size_t i = 0; i < states_; ++i) {
    for (const ShardSegment& s : kept_segments()) {
      const std::int64_t begin = static_cast<std::int64_t>(i) * master_.numel() + s.offset_in_shard;
      fill(*plan_.parameters[s.parameter], i, s.offset_in_parameter,
           optimizer_state_.slice(0, begin, begin + s.numel));
    }
  }
  if (state_page_) {
    state_page_->store();
    state_page_->settle();
  }
}

Tensor ShardedUnit::gather_master() {
  if (master_page_) master_page_->wait();
  if (holds_master()) return all_master();
  const Tensor full = Tensor::empty(context_, {layout_.padded_numel()}, precision_.master,
                                    MemoryCategory::gathered_parameters);
  Tensor source = master_;
  if (!reaches(source)) {
    source = piece(full);
    copy(source, master_);
  }
  const void* from = address(source);
  void* to = address(full);
  std::string label = name() + " gather weights";
  context_.compute_stream().wait(groups_.enqueue(
      label, [=, group = groups_.shard, count = layout_.shard_numel(), dtype = precision_.master] {
        group->all_gather(from, to, count, dtype, label);
      }));
  return full;
}

bool ShardedUnit::unshard() {
  if (state_ != State::sharded) return false;
  flat_.storage().restore();
  const bool near = secondary_.defined();
  Communicator* group = near ? groups_.secondary : groups_.shard;
  Tensor source = near ? secondary_ : shard_;
  gathering_ = near ? nullptr : precision_.mixed() ? shard_page_.get() : master_page_.get();
  if (gathering_ != nullptr) gathering_->fetch();
  if (!source.defined()) {
    source = piece(flat_);
    const RefillScope refill(flat_.storage());
    copy(source, master_);
  }
  const std::int64_t count = source.numel();
  const void* from = address(source);
  void* to = address(flat_);
  void* place = reaches(source) ? nullptr : address(piece(flat_));
  std::string label = name() + (near ? " unshard from neighbours" : " unshard");
  const Event on_paper = gathering_ != nullptr ? gathering_->arrival_on_paper() : Event();
  const bool crosses =
      context_.target() == Device::cuda && source.storage().pool() == MemoryPool::host;
  Schedule* const paper = crosses ? context_.schedule() : nullptr;
  const auto gather = [=, groups = &groups_, dtype = precision_.parameters,
                       read = gathering_ != nullptr ? gathering_->arrival() : BlockTransfer()] {
    const std::size_t bytes = static_cast<std::size_t>(count) * size_of(dtype);
    if (paper != nullptr) {
      paper->add({.kind = Work::Kind::copy,
                  .name = "copy_to_device",
                  .dtype = dtype,
                  .bytes = static_cast<std::int64_t>(bytes)});
    }
    if (place != nullptr) {
      groups->copy_when_read(place, from, bytes, read);
      return group->all_gather(place, to, count, dtype, label);
    }
    try {
      read.wait();
    } catch (const Error& error) {
      fail("{}: {}", label, error.what());
    }
    group->all_gather(from, to, count, dtype, label);
  };
  gathered_ = groups_.enqueue(label, gather, on_paper);
  flat_.storage().record_use(gathered_);
  source.storage().record_use(gathered_);
  flat_.storage().set_arriving(true);
  state_ = State::unsharding;
  return true;
}

bool ShardedUnit::wait() {
  if (state_ != State::unsharding) return false;
  context_.compute_stream().wait(gathered_);
  if (gathering_ != nullptr) {
    gathering_->wait();  // throws where the file was cut meanwhile
    std::exchange(gathering_, nullptr)->discard();
  }
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
  if (gathering_ != nullptr) std::exchange(gathering_, nullptr)->discard();
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
  if (!full_grad_.defined()) full_grad_ = empty_gradient(layout_.padded_numel());
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
  // Rounded once, whatever the policy; what comes back stays in the type of the sum.
  const bool rounds = precision_.reduce != precision_.master;
  input_ = rounds ? cast(full_grad_, precision_.reduce, MemoryCategory::communication) : full_grad_;
  // The next pass must not write into what is being summed. Where full gradients stay, there is no
  // next pass, see check_not_summed().
  adds_ = grad_shard_.defined();
  const Tensor full = full_grad_;
  if (policy_.shard_gradients) full_grad_ = {};
  if (!policy_.shard_gradients) {
    result_ = piece(full);
  } else if (!adds_) {
    result_ = grad_shard_ = empty_gradient(layout_.shard_numel(), gradient_pool_);
  }
  // A second reduction of a step arrives apart, to be added then; so does what a GPU sums for the
  // host's memory.
  if (policy_.shard_gradients && (adds_ || arrives_apart())) {
    result_ = rounds ? empty_gradient(layout_.shard_numel()) : piece(input_);
  }
  const bool all = !policy_.shard_optimizer;
  const void* from = address(input_);
  void* to = address(result_);
  void* everything = all ? address(full) : nullptr;
  const std::int64_t count = layout_.shard_numel();
  std::string label = name() + " reduce";
  reduced_ = groups_.enqueue(
      label, [=, groups = &groups_, numel = layout_.padded_numel(), types = precision_] {
        if (all && !rounds) return groups->sum_over_all(everything, numel, types.master, label);
        groups->shard->reduce_scatter_wide(from, to, count, types.reduce, ReduceOp::sum, label);
        if (groups->replicate) {
          groups->replicate->all_reduce(to, count, types.master, ReduceOp::sum, label);
        }
        if (all) groups->shard->all_gather(to, everything, count, types.master, label);
      });
  input_.storage().record_use(reduced_);
  result_.storage().record_use(reduced_);
}

void ShardedUnit::finish_reduce() {
  context_.compute_stream().wait(reduced_);
  Tensor result = std::exchange(result_, {});
  input_ = {};
  if (!policy_.shard_gradients || (!adds_ && !arrives_apart())) return;
  if (arrives_apart()) {
    const Tensor arrived = adds_ ? empty_gradient(result.numel(), MemoryPool::host) : grad_shard_;
    copy(arrived, result);
    if (!adds_) return;
    result = arrived;
  }
  add_inplace(grad_shard_, result);
}

Tensor ShardedUnit::own_gradient() const {
  if (!reduced_once_) return {};
  return policy_.shard_gradients ? grad_shard_ : piece(full_grad_);
}

Tensor ShardedUnit::update_gradient() const {
  if (host_gradient_.defined()) return host_gradient_;
  return policy_.shard_optimizer ? own_gradient() : full_grad_;
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
      add(segment.parameter, updated(), update_gradient(), segment.offset_in_shard, segment.numel);
    }
  } else {
    for (std::size_t i = 0; i < plan_.parameters.size(); ++i) {
      add(i, updated(), update_gradient(), layout_.offset(i), plan_.parameters[i]->numel());
    }
  }
  return spans;
}

std::optional<FlatSpans> ShardedUnit::flat_spans() const {
  if (!trainable() || states_ == 0 || std::ranges::count(arrivals_, 0) > 0) return {};
  FlatSpans flat;
  flat.value = updated();
  flat.grad = update_gradient();
  for (std::size_t i = 0; i < states_; ++i) {
    const auto begin = static_cast<std::int64_t>(i) * master_.numel();
    flat.state.push_back(optimizer_state_.slice(0, begin, begin + master_.numel()));
  }
  if (!flat.grad.defined()) return {};
  const auto add = [&](std::size_t parameter, std::int64_t begin, std::int64_t numel) {
    if (numel > 0) flat.begins.emplace_back(begin, plan_.parameters[parameter]->weight_decay());
  };
  if (policy_.shard_optimizer) {
    for (const ShardSegment& s : segments_) add(s.parameter, s.offset_in_shard, s.numel);
  } else {
    for (std::size_t i = 0; i < plan_.parameters.size(); ++i)
      add(i, layout_.offset(i), plan_.parameters[i]->numel());
  }
  const bool whole =
      !flat.begins.empty() && flat.begins.front().first == 0 &&
      std::ranges::all_of(flat.begins, [](const auto& b) { return b.first % 16 == 0; });
  if (!whole) return {};
  const Tensor place = rounding_place();
  if (place.defined() && !shard_page_ && place.device() == updated().device()) flat.rounded = place;
  return flat;
}

void ShardedUnit::make_state(std::size_t states, OffloadFiles& files) {
  states_ = trainable() ? states : 0;
  optimizer_state_ = {};
  state_page_.reset();
  if (!trainable() || states == 0) return;
  optimizer_state_ = make_kept(static_cast<std::int64_t>(states) * master_.numel(),
                               precision_.master, MemoryCategory::optimizer_state,
                               offload_optimizer_, files.optimizer, "optimizer state", state_page_);
}

Tensor ShardedUnit::state(std::size_t span, std::size_t state) const {
  std::int64_t begin = static_cast<std::int64_t>(state) * master_.numel(), numel = 0;
  if (policy_.shard_optimizer) {
    begin += segments_.at(span).offset_in_shard;
    numel = segments_[span].numel;
  } else {
    begin += layout_.offset(span);
    numel = plan_.parameters.at(span)->numel();
  }
  return optimizer_state_.slice(0, begin, begin + numel);
}

bool ShardedUnit::start_fetch() {
  if (master_page_) master_page_->fetch();
  if (state_page_) state_page_->fetch();
  return master_page_ || state_page_;
}

bool ShardedUnit::wait_fetch() {
  if (master_page_) master_page_->wait();
  if (state_page_) state_page_->wait();
  if (!arrives_apart()) return master_page_ || state_page_;
  const auto to_host = [&](const Tensor& x, MemoryCategory category) {
    if (!x.defined() || x.storage().pool() == MemoryPool::host) return Tensor();
    const Tensor host = Tensor::empty(context_, x.shape(), x.dtype(), category, MemoryPool::host);
    copy(host, x);
    return host;
  };
  host_gradient_ = to_host(update_gradient(), MemoryCategory::gradients);
  host_master_ = to_host(master_, MemoryCategory::parameters);
  return master_page_ || state_page_;
}

bool ShardedUnit::finish_update(bool rounded) {
  host_gradient_ = {};
  if (host_master_.defined()) copy(master_, std::exchange(host_master_, {}));
  if (!rounded) round_master();
  rounded_ = true;
  bool any = false;
  for (FilePage* page : pages()) any = page->store() || any;
  return any;
}

void ShardedUnit::settle() {
  for (FilePage* page : pages()) page->settle();
}

std::vector<FilePage*> ShardedUnit::pages() const {
  std::vector<FilePage*> all;
  for (FilePage* page : {master_page_.get(), shard_page_.get(), state_page_.get()}) {
    if (page != nullptr) all.push_back(page);
  }
  return all;
}

void ShardedUnit::round_master() {
  if (shard_page_ && precision_.mixed()) shard_page_->create();
  const Tensor place = rounding_place();
  if (place.defined()) copy(place, master_);
}

// Where master weights are rounded to after an update; undefined where that is not before they
// travel, or not at all.
Tensor ShardedUnit::rounding_place() const {
  if (!precision_.mixed()) return {};
  if (shard_.defined()) return shard_;
  if (policy_.shard_parameters) return {};
  return policy_.shard_optimizer ? piece(flat_) : flat_;
}

void ShardedUnit::mark_updated() {
  if (!std::exchange(rounded_, false)) {
    round_master();
    if (shard_page_ && shard_page_->store()) shard_page_->settle();
  }
  flat_.storage().mark_modified();
}

Event ShardedUnit::start_gather_update() {
  const void* from = address(piece(flat_));
  void* to = address(flat_);
  Communicator* group = groups_.shard;
  std::string label = name() + " update";
  const Event gathered =
      groups_.enqueue(label, [=, count = layout_.shard_numel(), dtype = precision_.parameters] {
        group->all_gather(from, to, count, dtype, label);
      });
  flat_.storage().record_use(gathered);
  return gathered;
}

void ShardedUnit::clear_gradients() {
  for (Parameter* parameter : plan_.parameters) parameter->clear_grad();
  full_grad_ = grad_shard_ = input_ = result_ = {};
  passed_ = reduced_once_ = closed_ = agreed_ = false;
  std::ranges::fill(arrivals_, 0);
}

}  // namespace sherd
