// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/planner/choose.h>

#include <sherd/runtime/error.h>
#include <sherd/tools/trainer/ranks.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace sherd {
namespace {

constexpr const char* kShard = "sharding.shard";
constexpr const char* kMesh = "sharding.mesh";
constexpr const char* kUnit = "sharding.unit";
constexpr const char* kPrefetch = "sharding.prefetch";
constexpr const char* kRecompute = "memory.recompute";
constexpr const char* kMicroBatch = "run.micro_batch";
constexpr const char* kOffloadOptimizer = "memory.offload_optimizer";
constexpr const char* kOffloadParameters = "memory.offload_parameters";

class Chooser {
 public:
  Chooser(const TrainSettings& settings, const std::vector<std::string>& fixed,
          const System& system, int ranks)
      : settings_(settings), fixed_(fixed), system_(system), ranks_(ranks) {
    if (settings_.recompute == "auto") {  // that is what is done here
      settings_.recompute = "none";
      std::erase(fixed_, kRecompute);
    }
    choices_.limit_bytes = memory_limit_of(settings, &system, ranks);
  }

  Choices run() {
    for (const Assignments& policy : policies()) try_policy(policy);
    refine();
    std::ranges::sort(choices_.ranked, {}, &Choice::seconds);
    if (choices_.ranked.empty()) fail("{}", nothing_fits());
    for (Choice& choice : choices_.ranked) choice.reason = reason_of(choice);
    return std::move(choices_);
  }

 private:
  bool is_free(const char* key) const { return std::ranges::find(fixed_, key) == fixed_.end(); }

  // Where replicas of a group of shards make sense: groups that fit a node, and larger ones.
  std::vector<Assignments> policies() const {
    if (!is_free(kShard) || ranks_ == 1) return {{}};
    std::vector<Assignments> all;
    for (const char* name : {"none", "zero1", "zero2", "grad_op", "zero3"})
      all.push_back({{kShard, name}});
    if (!is_free(kMesh)) return all;
    for (int group = system_.near_devices(); group < ranks_; group *= 4) {
      if (group < 2 || ranks_ % group != 0) continue;
      all.push_back({{kShard, "hybrid"},
                     {kMesh, fmt::format("replicate={},shard={}", ranks_ / group, group)}});
    }
    return all;
  }

  // For each micro-batch the least that fits: recomputation and offloading only ever cost time.
  void try_policy(const Assignments& policy) {
    constexpr int kHalvings = 6;  // more only where nothing fits
    std::int64_t samples = rank_slice(settings_.batch_size, 0, ranks_).size;
    Assignments micro;
    Choice smallest, before;
    bool any = false;
    for (int halvings = 0;; ++halvings) {
      before = smallest;
      any |= try_micro_batch(joined(policy, micro), smallest);
      const bool goes_on = halvings < kHalvings || (!any && may_fit(before, smallest));
      if (!is_free(kMicroBatch) || samples <= 1 || !goes_on) break;
      samples = (samples + 1) / 2;
      micro = {{kMicroBatch, fmt::format("{}", samples)}};
    }
    if (!any && smallest.peak_bytes > 0) choices_.too_large.push_back(std::move(smallest));
  }

  // Whether something fits.
  bool try_micro_batch(const Assignments& base, Choice& smallest) {
    for (const Assignments& saving : savings()) {
      Choice choice = evaluate(joined(base, saving));
      if (choice.peak_bytes == 0) continue;  // cannot be combined
      if (choice.fits) {
        choices_.ranked.push_back(std::move(choice));
        return true;
      }
      if (smallest.peak_bytes == 0 || choice.peak_bytes < smallest.peak_bytes)
        smallest = std::move(choice);
    }
    return false;
  }

  // The smallest of all micro-batches, and of all but the last one, which halved it. What halving
  // saved it may save once more in all, however often.
  bool may_fit(const Choice& before, const Choice& now) const {
    return 2 * now.peak_bytes - before.peak_bytes <= choices_.limit_bytes;
  }

  // From the cheapest.
  std::vector<Assignments> savings() const {
    std::vector<Assignments> recompute{{}};
    if (is_free(kRecompute) && settings_.recompute == "none") {
      recompute.push_back({{kRecompute, "selective"}});
      recompute.push_back({{kRecompute, "block"}});
    }
    std::vector<Assignments> all = recompute;
    if (!is_free(kOffloadOptimizer) || settings_.offload_optimizer != "none") return all;
    for (const Assignments& again : recompute)
      all.push_back(joined(again, {{kOffloadOptimizer, "cpu"}}));
    if (!is_free(kOffloadParameters) || settings_.offload_parameters != "none") return all;
    all.push_back(
        joined(recompute.back(), {{kOffloadOptimizer, "cpu"}, {kOffloadParameters, "cpu"}}));
    return all;
  }

  // What is gathered as one, and how far ahead, around the best.
  void refine() {
    std::ranges::sort(choices_.ranked, {}, &Choice::seconds);
    constexpr std::size_t kRefined = 4;
    const std::size_t count = std::min(kRefined, choices_.ranked.size());
    for (std::size_t i = 0; i < count; ++i) {
      const Assignments base = choices_.ranked[i].changes;
      std::vector<Assignments> around;
      if (is_free(kPrefetch) && ranks_ > 1) {
        for (const char* ahead : {"0", "2", "4"}) around.push_back({{kPrefetch, ahead}});
      }
      if (is_free(kUnit) && ranks_ > 1) {
        const std::int64_t block = 12 * settings_.dim * settings_.dim;
        around.push_back({{kUnit, fmt::format("params:{}", 2 * block)}});
        around.push_back({{kUnit, fmt::format("params:{}", std::max<std::int64_t>(1, block / 2))}});
      }
      for (const Assignments& more : around) {
        Choice choice = evaluate(joined(base, more));
        if (choice.fits) choices_.ranked.push_back(std::move(choice));
      }
    }
  }

  static Assignments joined(const Assignments& first, const Assignments& second) {
    Assignments all = first;
    all.insert(all.end(), second.begin(), second.end());
    return all;
  }

  // Nothing in it where the settings cannot be combined so.
  Choice evaluate(const Assignments& changes) {
    Choice choice;
    choice.changes = changes;
    choice.settings = settings_;
    ++choices_.tried;
    std::unique_ptr<RecordedStep> step;
    try {
      for (const auto& [key, value] : changes) assign(choice.settings, key, value, key);
      check_used(choice.settings, changes);
      check_step(choice.settings, ranks_);
      step = record_step(choice.settings, ranks_);
    } catch (const Error& error) {
      if (first_error_.empty()) first_error_ = error.what();
      return {};
    }
    choice.peak_bytes = step->plan.device.peak_bytes;
    choice.fits = sherd::fits(choice.peak_bytes, static_cast<std::size_t>(choices_.limit_bytes));
    if (!choice.fits) return choice;
    const StepTimes times = time_step(*step, choice.settings, system_, ranks_);
    choice.seconds = times.seconds;
    choice.exposed = times.exposed;
    choice.mfu = times.mfu;
    return choice;
  }

  // Beside the fastest.
  std::string reason_of(const Choice& choice) const {
    const Choice& best = choices_.ranked.front();
    const double exposed = 100.0 * choice.exposed / choice.seconds;
    std::string text = fmt::format("{:.1f}% exposed communication", exposed);
    if (&choice == &best) return text + "; the fastest that fits";
    return text + fmt::format("; {:.1f}% slower", 100.0 * (choice.seconds / best.seconds - 1.0));
  }

  std::string nothing_fits() const {
    const auto closest = std::ranges::min_element(choices_.too_large, {}, &Choice::peak_bytes);
    const std::string limit = format_bytes(choices_.limit_bytes);
    if (closest == choices_.too_large.end()) {
      return fmt::format(
          "--auto: none of {} combinations can be run with these settings on {} ranks; of the "
          "first "
          "one: {}",
          choices_.tried, ranks_, first_error_);
    }
    return fmt::format(
        "--auto: none of {} combinations fits {}; the smallest is {} with {}. Use more ranks, a "
        "smaller batch or model, or a shorter precision",
        choices_.tried, limit, format_bytes(closest->peak_bytes), changes_text(closest->changes));
  }

  TrainSettings settings_;
  std::vector<std::string> fixed_;
  const System& system_;
  const int ranks_;
  Choices choices_;
  std::string first_error_;
};

}  // namespace

Choices choose(const TrainSettings& settings, const std::vector<std::string>& fixed,
               const System& system, int ranks) {
  return Chooser(settings, fixed, system, ranks).run();
}

std::string changes_text(const Assignments& changes) {
  if (changes.empty()) return "as given";
  std::string text;
  for (const auto& [key, value] : changes) {
    const auto setting = std::ranges::find(setting_table(), key, &Setting::key);
    text += fmt::format("{}{} {}", text.empty() ? "" : " ", setting->flag(), value);
  }
  return text;
}

nlohmann::ordered_json choices_json(const Choices& choices) {
  using Json = nlohmann::ordered_json;
  Json json{{"limit_bytes", choices.limit_bytes}, {"tried", choices.tried}};
  for (const auto& [name, list] :
       {std::pair{"ranked", &choices.ranked}, std::pair{"too_large", &choices.too_large}}) {
    json[name] = Json::array();
    for (const Choice& choice : *list) {
      Json row{{"settings", changes_text(choice.changes)}, {"peak_bytes", choice.peak_bytes}};
      if (choice.fits) {
        row["seconds"] = choice.seconds;
        row["exposed_seconds"] = choice.exposed;
        row["mfu"] = choice.mfu;
        row["reason"] = choice.reason;
      }
      json[name].push_back(std::move(row));
    }
  }
  return json;
}

std::string choices_text(const Choices& choices, std::size_t most) {
  std::string text =
      fmt::format("{:>4} {:>10} {:>11} {:>6}  {}\n", "", "seconds", "peak", "MFU", "settings");
  const std::size_t count = std::min(most, choices.ranked.size());
  for (std::size_t i = 0; i < count; ++i) {
    const Choice& choice = choices.ranked[i];
    text += fmt::format("{:>4} {:>10.4g} {:>11} {:>5.1f}%  {}  ({})\n", i + 1, choice.seconds,
                        format_bytes(choice.peak_bytes), 100.0 * choice.mfu,
                        changes_text(choice.changes), choice.reason);
  }
  for (const Choice& choice : choices.too_large) {
    text += fmt::format("   - {:>10} {:>11} {:>6}  {}  (does not fit {})\n", "",
                        format_bytes(choice.peak_bytes), "", changes_text(choice.changes),
                        format_bytes(choices.limit_bytes));
  }
  return text;
}

}  // namespace sherd
