// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/sharding/engine.h>

#include <sherd/autograd/operations.h>
#include <sherd/comm/agreement.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <exception>
#include <map>
#include <utility>

namespace sherd {

using Kind = ShardingEvent::Kind;

namespace {

std::vector<std::string> describe(Module& model, const ShardingOptions& options,
                                  const Precision& precision, std::uint64_t seed) {
  static constexpr const char* kOffload[] = {"in place", "offloaded to the host",
                                             "offloaded to files"};
  static constexpr const char* kReshard[] = {"by policy", "yes", "no", "in groups of "};
  const ReshardAfterForward& reshard = options.reshard_after_forward;
  std::vector<std::string> texts{
      fmt::format("seed {}, {}", seed, describe(precision)),
      fmt::format("policy {}, mesh {}, reshard after forward {}{}, prefetch {}, reduce every {}{}",
                  name_of(options.policy), options.mesh ? options.mesh->to_string() : "of one axis",
                  kReshard[static_cast<int>(reshard.kind)],
                  reshard.group_size > 0 ? std::to_string(reshard.group_size) : "",
                  options.prefetch, options.reduce_every_pass ? "pass" : "step",
                  options.exact_sums ? ", exact sums" : ""),
      fmt::format("optimizer {}, parameters {}",
                  kOffload[static_cast<int>(options.offload_optimizer.kind)],
                  kOffload[static_cast<int>(options.offload_parameters.kind)])};
  std::map<const Parameter*, std::string> unit_of;
  for (const UnitPlan& unit : partition(model, options)) {
    for (const Parameter* parameter : unit.parameters) unit_of[parameter] = unit.name;
  }
  for (const Parameter* parameter : model.parameters()) {
    texts.push_back(fmt::format("'{}' {} in unit {}", parameter->name(),
                                parameter->shape().to_string(), unit_of.at(parameter)));
  }
  return texts;
}

const ShardingOptions& checked(const ShardingOptions& options, const Precision& precision,
                               const Context& context, const Communicator& world) {
  validate(precision);
  validate(options, world.size(), precision);
  SHERD_CHECK(context.is_meta() == world.on_paper(),
              "sharding: a context on {} needs a communicator {}", name_of(context.device()),
              context.is_meta() ? "on paper (make_meta_communicator)" : "of real ranks");
  return options;
}

// Before there are groups: ranks that disagree about those would wait for each other in different
// ones.
Communicator& compared(Communicator& world, Module& model, const ShardingOptions& options,
                       const Precision& precision, std::uint64_t seed) {
  if (model.name().empty()) model.assign_names();
  check_same(world, describe(model, options, precision, seed),
             "hold different models or sharding options");
  return world;
}

}  // namespace

std::string ShardingEvent::to_string() const {
  static constexpr const char* kNames[] = {
      "unshard", "prefetch",    "wait",  "forward", "backward", "reshard",      "drop",
      "reduce",  "wait_reduce", "fetch", "update",  "store",    "gather_update"};
  return fmt::format("{} {}", kNames[static_cast<int>(kind)], unit);
}

ShardingEngine::ShardingEngine(Module& model, Context& context, Communicator& world,
                               const Precision& precision, const ShardingOptions& options)
    : context_(context),
      precision_(precision),
      options_(checked(options, precision, context, world)),
      groups_(context, compared(world, model, options_, precision, context.seed()), options_),
      files_(context, options_),
      exceptions_(std::uncaught_exceptions()) {
  for (UnitPlan& plan : partition(model, options_)) {
    const UnitPolicy policy = plan.kind == UnitPlan::Kind::persistent
                                  ? persistent_unit_policy(options_)
                                  : unit_policy(options_);
    units_.push_back(std::make_unique<ShardedUnit>(context, groups_, files_, std::move(plan),
                                                   policy, precision, options_));
  }
  files_.create();
  model.for_each_module([&](Module& module) {
    if (std::ranges::any_of(stages_, [&](const auto& s) { return s->module == &module; })) return;
    auto stage = std::make_unique<Stage>();
    stage->module = &module;
    stage->is_model = &module == &model;
    stage->name = module.name().empty() ? "(root)" : module.name();
    for (const auto& unit : units_) {
      if (unit->plan().module == &module) stage->units.push_back(unit.get());
    }
    if (stage->units.empty() && &module != &model) return;
    hook(*stage);
    order_.push_back(stage.get());
    stages_.push_back(std::move(stage));
  });
}

ShardingEngine::~ShardingEngine() {
  // Streams wait for their work, which may wait for ranks that wait for this one.
  if (std::uncaught_exceptions() > exceptions_) {
    groups_.world.abort(
        fmt::format("rank {} has stopped in the middle of its work; its own message says why",
                    groups_.world.rank()));
  }
  groups_.drain();
  for (const auto& stage : stages_) {
    stage->module->remove_hook(stage->pre_hook);
    stage->module->remove_hook(stage->post_hook);
  }
}

void ShardingEngine::hook(Stage& stage) {
  stage.pre_hook =
      stage.module->add_pre_forward_hook([this, &stage](Module&, const Variable& input) {
        before_forward(stage);
        return stage.is_model ? cast_to(precision_.parameters, input) : input;
      });
  stage.post_hook =
      stage.module->add_post_forward_hook([this, &stage](Module&, const Variable& output) {
        after_forward(stage, output);
        return stage.is_model ? cast_to(precision_.output, output) : output;
      });
}

// Whole numbers, such as labels or token numbers, stay.
Variable ShardingEngine::cast_to(DType dtype, const Variable& value) const {
  const DType from = value.tensor().dtype();
  return from == dtype || !is_floating(from) ? value : cast(value, dtype);
}

void ShardingEngine::log(Kind kind, const std::string& unit) {
  if (recording_events_) events_.push_back({kind, unit});
}

void ShardingEngine::visit_shards(const ShardVisitor& visit) {
  groups_.synchronize();  // a gather that is not needed any more may still read them
  reshard_all();          // a gathered copy would not see what is written to shards
  for (const auto& unit : units_) unit->visit_shards(visit);
}

void ShardingEngine::fill_shards(const ShardVisitor& fill) {
  groups_.synchronize();
  reshard_all();
  for (const auto& unit : units_) unit->fill_shards(fill);
  // Otherwise the buffers of gathered parameters were written themselves.
  if (precision_.mixed()) gather_updates([](const ShardedUnit&) { return true; });
}

void ShardingEngine::initialize() {
  fill_shards([this](const Parameter& parameter, std::int64_t first, const Tensor& elements) {
    sherd::initialize(elements, parameter.initializer(), context_.seed(), parameter.name(), first);
  });
}

std::vector<ParameterSpan> ShardingEngine::spans() const {
  std::vector<ParameterSpan> all;
  for (const auto& unit : units_) {
    for (ParameterSpan& span : unit->spans()) all.push_back(std::move(span));
  }
  return all;
}

// Note [Life of a call]
// A forward pass through a unit's module is a Call. Before it, "after backward" is put on the tape;
// after it, "before backward", and the call joins the Recording of its tape, unless nothing in it
// leads back to a parameter. Backward meets these in reverse. "Before backward" of call i gathers
// its unit and asks for those of calls i-1, i-2, ...; "after backward" releases it. A module may be
// called several times: its first call is the last in backward, and then all gradients of its units
// are there to be summed.

// --- forward ------------------------------------------------------------------------------------

void ShardingEngine::before_forward(Stage& stage) {
  if (context_.recomputing()) return before_rerun(stage);
  if (open_.empty()) begin_pass();
  check_not_open(&stage);
  const auto call = std::make_shared<Call>(Call{&stage, false, false});
  open_.push_back(call);
  ++stage.running;
  visited_.push_back(&stage);
  unshard(stage, Kind::unshard);
  prefetch_after(stage);
  wait(stage);
  log(Kind::forward, stage.name);
  // The tape is the schedule: what is put on it here runs when the unit's backward is done.
  if (Tape* tape = context_.tape()) {
    tape->on_backward(stage.name + " after backward", [this, call] { after_backward(*call); });
  }
}

void ShardingEngine::after_forward(Stage& stage, const Variable& output) {
  if (context_.recomputing()) return after_rerun();
  const std::shared_ptr<Call> call = open_.back();
  SHERD_INTERNAL_CHECK(call->stage == &stage, "forward of {} ends inside {}", stage.name,
                       call->stage->name);
  open_.pop_back();
  --stage.running;
  Tape* tape = context_.tape();
  const bool recorded = tape != nullptr && output.requires_grad();
  call->recorded = recorded;
  if (recorded) {
    const std::shared_ptr<Recording> recording = recording_of(*tape);
    call->last_in_backward = std::ranges::none_of(
        recording->calls, [&](const auto& other) { return other->stage == &stage; });
    recording->calls.push_back(call);
    tape->on_backward(stage.name + " before backward",
                      [this, recording, index = recording->calls.size() - 1] {
                        before_backward(*recording, index);
                      });
  }
  // The root too, although its backward often comes next: every policy then does what its row of
  // the table says, whatever the units.
  if (stage.running == 0) {
    for (ShardedUnit* unit : stage.units) {
      if (unit->policy().reshard_after_forward || !recorded) reshard(*unit, recorded);
    }
  }
  if (open_.empty()) end_pass();
}

// Note [Rerun]
// Where a module that is recomputed (Module::set_recompute) holds units, their forward comes again
// in the middle of its backward, on a tape that keeps no hooks. This is no Call: backward is there
// already, so nothing is recorded, expected or prefetched. A unit whose backward has begun, or that
// is on its way for it, is gathered and must stay so; the others are gathered for this run alone.
// All ranks come to it at the same place of their tapes.
void ShardingEngine::before_rerun(Stage& stage) {
  rerun_.emplace_back();
  for (ShardedUnit* unit : stage.units) {
    if (!unit->unshard()) continue;
    rerun_.back().push_back(unit);
    log(Kind::unshard, unit->name());
  }
  wait(stage);
  log(Kind::forward, stage.name);
}

// A secondary copy stays what it was: if it is gone, so is the backward that it was for.
void ShardingEngine::after_rerun() {
  for (ShardedUnit* unit : rerun_.back()) reshard(*unit, false);
  rerun_.pop_back();
}

void ShardingEngine::begin_pass() {
  check_trainable();
  for (const auto& unit : units_) unit->begin_pass();
  next_ = 0;
  visited_.clear();
}

// What came to pass is what the next pass is expected to do.
void ShardingEngine::end_pass() {
  for (const auto& stage : stages_) {
    if (stage->prefetched) drop(*stage);
  }
  order_ = visited_;
}

bool ShardingEngine::unshard(Stage& stage, Kind kind) {
  bool any = false;
  for (ShardedUnit* unit : stage.units) {
    if (!unit->unshard()) continue;
    any = true;
    log(kind, unit->name());
  }
  return any;
}

void ShardingEngine::prefetch_after(Stage& stage) {
  stage.prefetched = false;
  const auto expected = order_.begin() + static_cast<std::ptrdiff_t>(next_);
  const auto found = std::find(expected, order_.end(), &stage);
  if (found != order_.end()) {
    // A branch not taken this time: what was gathered for it is not needed.
    for (auto skipped = expected; skipped != found; ++skipped) {
      if ((*skipped)->prefetched) drop(**skipped);
    }
    next_ = static_cast<std::size_t>(found - order_.begin()) + 1;
  }
  const std::size_t end =
      std::min(order_.size(), next_ + static_cast<std::size_t>(options_.prefetch));
  for (std::size_t i = next_; i < end; ++i) {
    Stage& ahead = *order_[i];
    if (ahead.running > 0 || ahead.prefetched) continue;
    ahead.prefetched = unshard(ahead, Kind::prefetch);
  }
}

void ShardingEngine::wait(Stage& stage) {
  for (ShardedUnit* unit : stage.units) {
    if (unit->state() != ShardedUnit::State::unsharding) continue;
    const TraceScope trace(context_.trace(), "wait for " + unit->name(), "waiting");
    timed([&] { return unit->wait(); });
    log(Kind::wait, unit->name());
  }
}

void ShardingEngine::reshard(ShardedUnit& unit, bool keep_secondary, Kind kind) {
  if (unit.reshard(keep_secondary)) log(kind, unit.name());
}

void ShardingEngine::drop(Stage& stage) {
  stage.prefetched = false;
  for (ShardedUnit* unit : stage.units) {
    reshard(*unit, false, Kind::drop);
    context_.trace().instant("dropped " + unit->name(), "sharding", 0);
  }
}

// --- backward -----------------------------------------------------------------------------------

std::shared_ptr<ShardingEngine::Recording> ShardingEngine::recording_of(const Tape& tape) {
  std::erase_if(recordings_, [](const auto& weak) { return weak.expired(); });
  for (const auto& weak : recordings_) {
    if (const auto recording = weak.lock(); recording->tape == tape.id()) return recording;
  }
  const auto recording = std::make_shared<Recording>();
  recording->tape = tape.id();
  recordings_.push_back(recording);
  return recording;
}

// The record says exactly which units backward comes to next. Their gathers are asked for before
// this unit's reduction, so that they do not wait behind it.
void ShardingEngine::before_backward(const Recording& recording, std::size_t index) {
  if (index + 1 == recording.calls.size()) {
    for (const auto& unit : units_) unit->begin_pass();
  }
  Stage& stage = *recording.calls[index]->stage;
  unshard(stage, Kind::unshard);
  const std::size_t ahead = std::min(index, static_cast<std::size_t>(options_.prefetch));
  for (std::size_t i = 1; i <= ahead; ++i) {
    unshard(*recording.calls[index - i]->stage, Kind::prefetch);
  }
  wait(stage);
  log(Kind::backward, stage.name);
}

void ShardingEngine::after_backward(const Call& call) {
  if (!call.recorded) return;
  for (ShardedUnit* unit : call.stage->units) {
    if (call.last_in_backward || unit->policy().reshard_after_forward)
      reshard(*unit, !call.last_in_backward);
    if (!call.last_in_backward) continue;
    unit->drop_secondary();
    if (!unit->trainable()) continue;
    unit->mark_passed();
    // zero1 keeps full gradients, and sums them when backward is done.
    const bool sync = sync_ || options_.reduce_every_pass;
    if (sync && (unit->policy().shard_gradients || !unit->policy().shard_optimizer)) reduce(*unit);
  }
}

void ShardingEngine::reduce(ShardedUnit& unit) {
  finish_reduce();
  unit.start_reduce();
  reducing_ = &unit;
  log(Kind::reduce, unit.name());
}

void ShardingEngine::finish_reduce() {
  ShardedUnit* unit = std::exchange(reducing_, nullptr);
  if (unit == nullptr) return;
  const TraceScope trace(context_.trace(), "wait for the reduction of " + unit->name(), "waiting");
  timed([&] { unit->finish_reduce(); });
  log(Kind::wait_reduce, unit->name());
}

// --- the rest -----------------------------------------------------------------------------------

// Also what a forward without a backward has left gathered.
void ShardingEngine::reshard_all() {
  for (const auto& unit : units_) {
    reshard(*unit, false);
    unit->drop_secondary();
  }
}

std::vector<ParameterPiece> ShardingEngine::owned_pieces() const {
  std::vector<ParameterPiece> all;
  for (const auto& unit : units_) {
    const std::vector<ParameterPiece> pieces = unit->owned_pieces();
    all.insert(all.end(), pieces.begin(), pieces.end());
  }
  return all;
}

void ShardingEngine::visit_owned(const PieceVisitor& visit) {
  for (const auto& unit : units_) unit->visit_owned(visit);
}

void ShardingEngine::fill_state(const StateVisitor& fill) {
  for (const auto& unit : units_) unit->fill_state(fill);
}

void ShardingEngine::visit_parameters(
    const std::function<void(const Parameter&, const Tensor& weights)>& visit) {
  for (const auto& unit : units_) {
    const Tensor weights = timed([&] { return unit->gather_master(); });
    const auto& parameters = unit->plan().parameters;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      visit(*parameters[i], unit->view(weights, i));
    }
    unit->settle();
  }
}

bool ShardingEngine::holds_whole_model() const {
  return between_steps_ && !torn_ &&
         std::ranges::all_of(units_, [](const auto& unit) { return unit->holds_master(); });
}

CommunicationCounters ShardingEngine::counters() {
  groups_.synchronize();
  return groups_.counters();
}

void ShardingEngine::check_not_open(const Stage* entering) const {
  for (const auto& call : open_) {
    SHERD_CHECK(entering != nullptr && call->stage != entering,
                "the last forward pass has not come to its end in {}; after an exception that all "
                "ranks have caught, call abandon_step()",
                call->stage->name);
  }
}

void ShardingEngine::check_trainable() const {
  for (const auto& unit : units_) {
    for (const Parameter* parameter : unit->plan().parameters) {
      SHERD_CHECK(parameter->requires_grad() == unit->trainable(),
                  "parameter {} was {} when the engine was made and is not now; freeze or "
                  "unfreeze before making it",
                  parameter->name(), unit->trainable() ? "trainable" : "frozen");
    }
  }
}

}  // namespace sherd
