// SPDX-License-Identifier: Apache-2.0
// The end of a step: what ranks agree on, and the update.
#include <sherd/comm/sharding/engine.h>

#include <sherd/kernels/reduce.h>
#include <sherd/runtime/error.h>

#include <cmath>
#include <utility>

namespace sherd {

using Kind = ShardingEvent::Kind;

GlobalStep ShardingEngine::finish_backward(double loss) {
  LocalGradient gradient = complete_backward();
  const GlobalStep all = agree(loss, gradient);
  accept(gradient);
  return all;
}

// Every element of the gradient is counted by one rank.
LocalGradient ShardingEngine::complete_backward() {
  check_not_open();
  finish_reduce();
  for (auto it = units_.rbegin(); it != units_.rend(); ++it) {
    if ((*it)->unreduced()) reduce(**it);
  }
  finish_reduce();
  LocalGradient local{SquareSum(context_), {}};
  for (const auto& unit : units_) {
    const Tensor gradient = groups_.replica == 0 ? unit->own_gradient() : Tensor();
    if (gradient.defined()) local.squares.add(gradient);
    local.arrivals.insert(local.arrivals.end(), unit->arrivals().begin(), unit->arrivals().end());
  }
  return local;
}

// One message for all that ranks must agree on: the exact sums behind the norm and the loss, and
// which parameters have a gradient.
GlobalStep ShardingEngine::agree(double loss, LocalGradient& gradient) {
  ExactSum losses;
  losses.add(loss);
  std::vector<std::int64_t> message;
  for (const ExactSum& sum : {gradient.squares.read(), losses}) {
    const ExactSum::Words words = sum.words();
    message.insert(message.end(), words.begin(), words.end());
  }
  message.insert(message.end(), gradient.arrivals.begin(), gradient.arrivals.end());
  // On the stream as well, so that a rank that does something else meets this call there.
  static constexpr const char* kLabel = "step: norm, loss and which gradients there are";
  const Event summed = groups_.enqueue(kLabel, [&] {
    groups_.sum_on_host(message.data(), static_cast<std::int64_t>(message.size()), DType::i64,
                        kLabel);
  });
  {
    const TraceScope trace(context_.trace(), "wait for the norm of all ranks", "waiting");
    timed([&] { summed.wait(); });
  }
  const auto sum_at = [&](std::size_t index) {
    ExactSum::Words words;
    std::copy_n(message.begin() + static_cast<std::ptrdiff_t>(index * words.size()), words.size(),
                words.begin());
    return ExactSum::from_words(words).value();
  };
  std::copy(message.begin() + 2 * ExactSum::kWords, message.end(), gradient.arrivals.begin());
  if (context_.is_meta()) return {0.0, 1.0};
  return {sum_at(1), std::sqrt(sum_at(0))};
}

// Until here a rank that is left by the others can save its weights.
void ShardingEngine::accept(const LocalGradient& gradient) {
  const std::int64_t* next = gradient.arrivals.data();
  for (const auto& unit : units_) {
    unit->set_arrivals(next);
    next += unit->arrivals().size();
  }
  between_steps_ = false;
}

void ShardingEngine::gather_updates(const std::function<bool(const ShardedUnit&)>& changed) {
  std::vector<Event> updates;
  for (const auto& unit : units_) {
    if (!unit->gathers_update() || !changed(*unit)) continue;
    updates.push_back(unit->start_gather_update());
    log(Kind::gather_update, unit->name());
  }
  if (updates.empty()) return;
  const TraceScope trace(context_.trace(), "wait for updated parameters", "waiting");
  timed([&] {
    for (const Event& event : updates) context_.compute_stream().wait(event);
  });
}

void ShardingEngine::prepare(Optimizer& optimizer) {
  const std::size_t states = optimizer.state_names().size();
  prepared_ = &optimizer;
  state_files_.emplace(context_, options_);
  std::vector<std::pair<ShardedUnit*, std::size_t>> span_of;  // unit, place among its spans
  for (const auto& unit : units_) {
    unit->make_state(states, *state_files_);
    const std::size_t count = unit->spans().size();
    for (std::size_t i = 0; i < count; ++i) span_of.emplace_back(unit.get(), i);
  }
  state_files_->create();
  optimizer.prepare(spans(), [&](std::size_t span, std::size_t state) {
    return span_of[span].first->state(span_of[span].second, state);
  });
}

// Note [Update from files]
// What the update of a unit needs from files is read while the unit before is updated, and written
// while the next one is: at most three units are in the host's memory.
void ShardingEngine::update_units(Optimizer& optimizer, double lr, double grad_scale) {
  files_.check_present();
  if (state_files_) state_files_->check_present();
  SHERD_CHECK(state_files_ || options_.offload_optimizer.kind == OffloadTo::Kind::none,
              "update: the optimizer's state is not where --offload-optimizer wants it; let "
              "engine.prepare(optimizer) make it");
  optimizer.begin_step(spans());
  torn_ = true;
  struct UnitUpdate {
    ShardedUnit* unit;
    std::size_t first_span;
  };
  std::vector<UnitUpdate> work;
  std::size_t span_count = 0;
  for (const auto& unit : units_) {
    if (unit->trainable() && unit->has_gradient()) work.push_back({unit.get(), span_count});
    span_count += unit->spans().size();
  }
  const auto fetch = [&](std::size_t i) {
    if (i < work.size() && work[i].unit->start_fetch()) log(Kind::fetch, work[i].unit->name());
  };
  const auto traced = [&](const char* what, const ShardedUnit& unit) {
    return TraceScope(context_.trace(), what + unit.name(), "optimizer");
  };
  const auto settle = [&](std::size_t i) {
    const TraceScope trace = traced("settle ", *work[i].unit);
    work[i].unit->settle();
  };
  fetch(0);
  for (std::size_t i = 0; i < work.size(); ++i) {
    ShardedUnit& unit = *work[i].unit;
    fetch(i + 1);
    {
      const TraceScope trace = traced("wait for ", unit);
      if (unit.wait_fetch()) log(Kind::update, unit.name());
    }
    {
      const TraceScope trace = traced("update ", unit);
      const std::optional<FlatSpans> flat =
          prepared_ == &optimizer ? unit.flat_spans() : std::nullopt;
      const bool at_once = flat && optimizer.update_flat(*flat, lr, grad_scale);
      std::size_t index = work[i].first_span;
      for (const ParameterSpan& span : at_once ? std::vector<ParameterSpan>() : unit.spans())
        optimizer.update(index++, span, lr, grad_scale);
      if (unit.finish_update(at_once && flat->rounded.defined())) log(Kind::store, unit.name());
    }
    if (i > 0) settle(i - 1);
  }
  if (!work.empty()) settle(work.size() - 1);
}

void ShardingEngine::update(Optimizer& optimizer, double lr, double grad_scale) {
  const FileTraffic before = file_traffic();
  last_update_ = {};
  {
    const SecondsScope seconds(last_update_.seconds);
    update_units(optimizer, lr, grad_scale);
  }
  const FileTraffic after = file_traffic();
  last_update_.files = {after.read - before.read, after.written - before.written};
  finish_step();
}

FileTraffic ShardingEngine::file_traffic() {
  FileTraffic all = files_.traffic();
  if (!state_files_) return all;
  const FileTraffic more = state_files_->traffic();
  return {all.read + more.read, all.written + more.written};
}

void ShardingEngine::finish_step() {
  const auto changed = [](const ShardedUnit& unit) { return unit.has_gradient(); };
  for (const auto& unit : units_) {
    if (changed(*unit)) unit->mark_updated();
  }
  gather_updates(changed);
  for (const auto& unit : units_) unit->clear_gradients();
  reshard_all();
  between_steps_ = true;
  torn_ = false;
}

void ShardingEngine::abandon_step() {
  finish_reduce();
  between_steps_ = true;
  for (const auto& unit : units_) unit->clear_gradients();
  open_.clear();
  rerun_.clear();
  for (const auto& stage : stages_) {
    stage->running = 0;
    stage->prefetched = false;
  }
  reshard_all();
}

}  // namespace sherd
