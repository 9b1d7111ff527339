// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/planner/explain.h>

#include <sherd/runtime/error.h>
#include <sherd/tools/planner/choose.h>
#include <sherd/tools/trainer/ranks.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>

namespace sherd {
namespace {

using Event = ShardingEvent::Kind;

std::string count_text(double value) {
  if (value >= 1e12) return fmt::format("{:.2f} trillion", value / 1e12);
  if (value >= 1e9) return fmt::format("{:.2f} billion", value / 1e9);
  return value >= 1e6 ? fmt::format("{:.2f} million", value / 1e6) : fmt::format("{:.0f}", value);
}

class Page {
 public:
  Page(const RecordedStep& step, const TrainSettings& settings, int ranks, const System* system,
       const StepTimes* times)
      : step_(step),
        settings_(settings),
        ranks_(ranks),
        system_(system),
        times_(times),
        options_(sharding_options(settings, ranks)),
        policy_(unit_policy(options_)),
        precision_(training_precision(settings)) {
    for (const PlannedUnit& unit : step.units) {
      if (unit.padded > unit_.padded) unit_ = unit;
    }
    shards_ = unit_.shard > 0 ? static_cast<int>(unit_.padded / unit_.shard) : 1;
  }

  std::string write() {
    title("One training step, " + describe_ranks(settings_, *make_meta_communicator(0, ranks_)));
    model();
    at_rest();
    forward();
    backward();
    update();
    peak();
    if (times_ != nullptr) time();
    alternatives();
    return std::move(text_);
  }

 private:
  void title(const std::string& text) {
    text_ += fmt::format("{}\n{}\n\n", text, std::string(text.size(), '-'));
  }

  // A paragraph, filled to 100 columns.
  void say(const std::string& sentence) {
    std::stringstream words(sentence);
    std::string line;
    for (std::string word; words >> word;) {
      if (!line.empty() && line.size() + 1 + word.size() > 100) {
        text_ += line + "\n";
        line.clear();
      }
      line += (line.empty() ? "" : " ") + word;
    }
    text_ += line + "\n\n";
  }

  std::string rounding() const {
    return precision_.reduce == precision_.master
               ? fmt::format("are sent in {}", name_of(precision_.reduce))
               : fmt::format("are rounded to {} once", name_of(precision_.reduce));
  }

  std::int64_t size(DType dtype) const { return static_cast<std::int64_t>(size_of(dtype)); }

  void model() {
    title("The model in units");
    say(fmt::format(
        "The model has {} parameters. They are cut into {} unit{}: what is gathered, reduced and "
        "released as one. The largest is '{}' with {} parameters. A unit is one flat buffer, "
        "padded "
        "so that every one of {} ranks gets an equal shard of it: {} elements with padding, {} a "
        "rank. Parameters are views of the buffer, so gathering it needs no copy out.",
        count_text(static_cast<double>(step_.plan.parameters)), step_.units.size(),
        step_.units.size() == 1 ? "" : "s", unit_.name,
        count_text(static_cast<double>(unit_.parameters)), shards_, unit_.padded, unit_.shard));
  }

  void at_rest() {
    title("Between steps");
    const std::int64_t p = size(precision_.parameters), m = size(precision_.master);
    const auto where = [](bool shard) { return shard ? "a shard" : "all"; };
    std::string states = fmt::format(
        "Under --shard {} a rank keeps {} of the parameters ({} bytes each), {} of the optimizer's "
        "state ({} bytes: two moments{}), and during backward {} of the summed gradients ({} "
        "bytes).",
        name_of(options_.policy), where(policy_.shard_parameters), p,
        where(policy_.shard_optimizer), 2 * m + (precision_.mixed() ? m : 0),
        precision_.mixed() ? fmt::format(", and the weights in {} that updates are made in",
                                         name_of(precision_.master))
                           : "",
        where(policy_.shard_gradients), m);
    if (options_.offload_optimizer.kind != OffloadTo::Kind::none)
      states += " The optimizer's state is offloaded: the device holds none of it.";
    const MemoryBreakdown live = resting();
    say(states +
        fmt::format(" When this step begins the device holds {}.", format_breakdown(live)));
  }

  // What is live before the first scope opens.
  MemoryBreakdown resting() const {
    MemoryBreakdown live{};
    for (const Schedule::Entry& entry : step_.schedule.entries()) {
      if (entry.kind != Schedule::Kind::memory) break;
      if (entry.pool == MemoryPool::device)
        live[static_cast<std::size_t>(entry.index)] = entry.value;
    }
    return live;
  }

  // The first of the engine's events from one on, as many as that, and before another.
  using Events = std::vector<ShardingEvent>::const_iterator;
  static std::string listing(Events from, Events until, std::ptrdiff_t most) {
    std::string text;
    const Events end = from + std::min(most, until - from);
    for (auto it = from; it != end; ++it) text += "    " + it->to_string() + "\n";
    return text + (end != until ? "    ...\n\n" : "\n");
  }
  Events first(Event kind) const {
    return std::ranges::find(step_.events, kind, &ShardingEvent::kind);
  }

  std::int64_t count(Event kind) const {
    return std::ranges::count(step_.events, kind, &ShardingEvent::kind);
  }

  double gathered_bytes() const {
    return static_cast<double>(unit_.padded * size(precision_.parameters));
  }

  void forward() {
    title("Forward");
    if (!policy_.shard_parameters) {
      say("All parameters are there: nothing is gathered, units only mark where backward will sum "
          "gradients.");
    } else {
      const double bytes = gathered_bytes();
      say(fmt::format(
          "Before a unit computes, its shards are gathered: for '{}' that is {} of {}, of which "
          "a rank has {} and receives the rest, and sends its own to the others: {} by the usual "
          "count. While it computes, {} gathered already (--prefetch {}), so that the next need "
          "not "
          "be waited for. {} The step gathers {} times.",
          unit_.name, format_bytes(static_cast<std::int64_t>(bytes)),
          name_of(precision_.parameters), format_bytes(static_cast<std::int64_t>(bytes / shards_)),
          format_bytes(static_cast<std::int64_t>(bytes * (shards_ - 1) / shards_)),
          options_.prefetch == 0   ? "none is"
          : options_.prefetch == 1 ? "the next unit is"
                                   : fmt::format("the next {} units are", options_.prefetch),
          options_.prefetch,
          policy_.reshard_after_forward
              ? "After it has computed, its parameters are released, and will be gathered again."
              : "After it has computed, its parameters stay until its backward.",
          count(Event::unshard) + count(Event::prefetch)));
    }
    text_ += listing(step_.events.begin(), first(Event::backward), 12);
    std::string kept = "What backward needs of a block is kept: its activations.";
    if (settings_.recompute == "selective")
      kept =
          "Of a block's activations the MLP's are not kept: they are computed again in backward.";
    if (settings_.recompute == "block")
      kept = "Of a block only its input is kept: backward computes the rest again.";
    say(kept + fmt::format(" At the step's peak all of them together are {}.",
                           format_bytes(peak_of(MemoryCategory::activations))));
  }

  std::int64_t peak_of(MemoryCategory category) const {
    return peak_moment(step_.schedule).held[static_cast<std::size_t>(category)];
  }

  void backward() {
    title("Backward");
    std::string text;
    if (policy_.shard_parameters && policy_.reshard_after_forward)
      text =
          "Units come in reverse; each is gathered a second time before its backward. The gather "
          "of the unit before it is asked for first, ahead of this unit's reduction, since both "
          "use one connection. ";
    const double sent = static_cast<double>(unit_.padded * size(precision_.reduce));
    if (ranks_ == 1) {
      text += "There is one rank: nothing is summed.";
    } else if (!policy_.shard_optimizer) {
      const bool rounds = precision_.reduce != precision_.master;
      const auto sends = [&](DType dtype) {
        return format_bytes(unit_.padded * size(dtype) * (ranks_ - 1) / ranks_);
      };
      text += fmt::format(
          "When the last gradient of a unit is there, its {} {} and summed over the {} ranks, all "
          "of which keep the sum ({}).",
          format_bytes(static_cast<std::int64_t>(sent)), rounding(), ranks_,
          rounds
              ? fmt::format("a reduce-scatter and an all-gather of the sums in {}: each sends {} "
                            "and {}",
                            name_of(precision_.master), sends(precision_.reduce),
                            sends(precision_.master))
              : fmt::format("an all-reduce: each sends twice {}", sends(precision_.reduce)));
    } else if (!policy_.shard_gradients) {
      text +=
          "Gradients stay whole until backward is done; then each unit's are summed, and each "
          "rank keeps the sum of its shard.";
    } else {
      text += fmt::format(
          "When the last gradient of a unit is there, its {} {} and summed over the ranks; each "
          "keeps the sum of its shard alone (a reduce-scatter: each sends {}), {} "
          "in {}. The whole gradients are then released, so one unit's live at a time.",
          format_bytes(static_cast<std::int64_t>(sent)), rounding(),
          format_bytes(static_cast<std::int64_t>(sent * (shards_ - 1) / shards_)),
          format_bytes(unit_.shard * size(precision_.master)), name_of(precision_.master));
    }
    if (const int replicas = ranks_ / shards_; policy_.shard_optimizer && replicas > 1) {
      const std::int64_t bytes = unit_.shard * size(precision_.master);
      text += fmt::format(
          " That is among the {} ranks that share a copy of the model; the {} that keep the same "
          "shard in the {} copies then sum theirs (an all-reduce in {}: each sends twice {}).",
          shards_, replicas, replicas, name_of(precision_.master),
          format_bytes(bytes * (replicas - 1) / replicas));
    }
    if (ranks_ > 1) {
      text +=
          step_.device == Device::cuda && !options_.exact_sums
              ? " Sums are taken in NCCL's order; --exact-sums takes them in one fixed tree, "
                "with the same bits under every policy."
              : " Sums are taken in one fixed tree over the ranks, so every policy has the same "
                "bits.";
    }
    say(text);
    text_ += listing(first(Event::backward), step_.events.end(), 10);
  }

  void update() {
    title("Update");
    std::string text =
        "The ranks agree on the norm of the whole gradient, an exact sum, in one short message, "
        "and "
        "clip by it. ";
    text += policy_.shard_optimizer ? "Each then updates its own shard alone."
                                    : "Each then makes the same update of all parameters.";
    const std::int64_t gathers = count(Event::gather_update);
    if (gathers > 0)
      text += fmt::format(" As parameters are kept whole, the {} units are gathered after it.",
                          gathers);
    say(text + fmt::format(" In all a rank sends {} in {} collectives.",
                           format_bytes(step_.plan.sent_bytes), step_.plan.collectives));
  }

  void peak() {
    title("Why the peak is where it is");
    const PeakMoment moment = peak_moment(step_.schedule);
    std::string text = fmt::format(
        "The device holds most in {}, after {:.0f}% of what the step asks for: {}, made of {}. ",
        moment.where, 100.0 * moment.fraction, format_bytes(moment.bytes),
        format_breakdown(moment.held));
    const auto most = std::ranges::max_element(moment.held) - moment.held.begin();
    switch (static_cast<MemoryCategory>(most)) {
      case MemoryCategory::activations:
        text +=
            "Most of it are activations, which grow through forward and are used up through "
            "backward: the peak is where the two meet, and a smaller micro-batch or "
            "recomputation lowers it.";
        break;
      case MemoryCategory::gathered_parameters:
        text +=
            "Most of it are gathered parameters: smaller units, or fewer gathered ahead, lower "
            "it.";
        break;
      case MemoryCategory::gradients:
        text += "Most of it are gradients: a policy that shards them, or smaller units, lower it.";
        break;
      case MemoryCategory::workspace:
      case MemoryCategory::communication:
        text +=
            "Most of it are buffers that kernels and collectives work in, whose size does not "
            "depend on the model: larger models make them a small part.";
        break;
      default:
        text +=
            "Most of it is state that lies there all the time: sharding or offloading it lowers "
            "the peak.";
    }
    if (moment.bytes < step_.plan.device.peak_bytes)
      text += fmt::format(" Before the first step more was held for a moment, {}.",
                          format_bytes(step_.plan.device.peak_bytes));
    say(text);
  }

  void time() {
    title("In time, on " + system_->name);
    const SimulationRules rules = rules_for(step_, *system_, ranks_);
    double gather = 0.0;
    std::int64_t gathers = 0;
    for (const Traffic& traffic : traffic_of(step_.schedule, &rules)) {
      if (traffic.collective != "all_gather" || traffic.purpose != "unshard") continue;
      gather += traffic.seconds;
      gathers += traffic.calls;
    }
    std::string text = fmt::format(
        "The step takes {}: {:.1f} images/s of all ranks. Products take {}, what moves memory {}, "
        "collectives {}, of which {} ({:.1f}% of the step) are waited for.",
        seconds_text(times_->seconds), times_->images_per_second,
        seconds_text(times_->busy[static_cast<std::size_t>(Resource::products)]),
        seconds_text(times_->busy[static_cast<std::size_t>(Resource::memory)]),
        seconds_text(times_->busy[static_cast<std::size_t>(Resource::network)]),
        seconds_text(times_->exposed), 100.0 * times_->exposed / times_->seconds);
    if (gathers > 0) {
      const double computing = times_->seconds - times_->exposed;
      const double each = gather / static_cast<double>(gathers);
      const double unit = computing / (3.0 * static_cast<double>(step_.units.size()));
      text += fmt::format(
          " A gather takes {} on average, a unit's forward about {}: it {} behind it.",
          seconds_text(each), seconds_text(unit), each <= unit ? "hides" : "does not hide");
    }
    say(text);
  }

  void alternatives() {
    title("What each option would change");
    text_ += fmt::format("    {:<44} {:>12} {:>12} {:>12}\n", "", "peak", "sent",
                         times_ != nullptr ? "seconds" : "");
    row("as it is", step_.plan, times_ != nullptr ? times_->seconds : 0.0);
    std::vector<Assignments> changes;
    for (const char* policy : {"none", "zero1", "zero2", "grad_op", "zero3"}) {
      if (ranks_ > 1 && policy != name_of(options_.policy))
        changes.push_back({{"sharding.shard", policy}});
    }
    for (const char* ahead : {"0", "2"}) {
      if (ranks_ > 1 && policy_.shard_parameters) changes.push_back({{"sharding.prefetch", ahead}});
    }
    for (const char* recompute : {"none", "selective", "block"}) {
      if (settings_.recompute != recompute) changes.push_back({{"memory.recompute", recompute}});
    }
    const std::int64_t micro =
        settings_.micro_batch > 0 ? std::min(settings_.micro_batch, step_.samples) : step_.samples;
    if (micro > 1) changes.push_back({{"run.micro_batch", fmt::format("{}", (micro + 1) / 2)}});
    if (settings_.offload_optimizer == "none")
      changes.push_back({{"memory.offload_optimizer", "cpu"}});
    if (dtype_from_name(settings_.precision) == DType::f32)
      changes.push_back({{"precision.precision", "bf16"}});
    for (const Assignments& change : changes) alternative(change);
  }

  void row(const std::string& what, const StepPlan& plan, double seconds) {
    text_ += fmt::format("    {:<44} {:>12} {:>12} {:>12}\n", what,
                         format_bytes(plan.device.peak_bytes), format_bytes(plan.sent_bytes),
                         seconds > 0.0 ? fmt::format("{:.4g}", seconds) : "");
  }

  void alternative(const Assignments& change) {
    TrainSettings changed = settings_;
    std::string what = changes_text(change);
    try {
      for (const auto& [key, value] : change) assign(changed, key, value, key);
      check_used(changed, change);
      if (change[0].first == "sharding.shard" && !changed.mesh.empty()) {
        changed.mesh.clear();
        what += " without --mesh";
      }
      sharding_options(changed, ranks_);
      const auto step = record_step(changed, ranks_);
      const double seconds =
          times_ != nullptr ? time_step(*step, changed, *system_, ranks_).seconds : 0.0;
      row(what, step->plan, seconds);
    } catch (const Error&) {
      row(what + " (not with the rest)", {}, 0.0);
    }
  }

  const RecordedStep& step_;
  const TrainSettings& settings_;
  const int ranks_;
  const System* const system_;
  const StepTimes* const times_;
  const ShardingOptions options_;
  const UnitPolicy policy_;
  const Precision precision_;
  PlannedUnit unit_;  // the largest
  int shards_ = 1;
  std::string text_;
};

}  // namespace

std::string explain(const RecordedStep& step, const TrainSettings& settings, int ranks,
                    const System* system, const StepTimes* times) {
  return Page(step, settings, ranks, system, times).write();
}

}  // namespace sherd
