// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/planner/step_report.h>

#include <sherd/runtime/error.h>
#include <sherd/runtime/group_digits.h>
#include <sherd/tools/trainer/ranks.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>

namespace sherd {
namespace {

using Json = nlohmann::ordered_json;
using Kind = Schedule::Kind;

std::string flops_text(double flops) {
  static constexpr const char* kUnits[] = {"GFLOP", "TFLOP", "PFLOP", "EFLOP"};
  double value = flops / 1e9;
  std::size_t unit = 0;
  for (; value >= 1000.0 && unit + 1 < std::size(kUnits); ++unit) value /= 1000.0;
  return fmt::format("{:.2f} {}", value, kUnits[unit]);
}

// A label is "UNIT purpose" or "step: purpose"; units have no spaces in their names.
std::string purpose_of(const std::string& label) {
  const std::size_t space = label.find(' ');
  if (label.starts_with("step:") || space == std::string::npos) return label;
  return label.substr(space + 1);
}

Json breakdown_json(const MemoryBreakdown& bytes) {
  Json json = Json::object();
  for (std::size_t i = 0; i < kMemoryCategories; ++i) {
    if (bytes[i] > 0) json[std::string(name_of(static_cast<MemoryCategory>(i)))] = bytes[i];
  }
  return json;
}

std::string limits_text(const StepTimes& times) {
  std::vector<std::pair<double, Resource>> gains;
  for (std::size_t i = 0; i < kResources; ++i) {
    if (times.sensitivity[i] >= 0.005)
      gains.emplace_back(times.sensitivity[i], static_cast<Resource>(i));
  }
  std::ranges::sort(gains, std::greater{});
  std::string text;
  for (const auto& [gain, resource] : gains) {
    text += fmt::format("{}{} {:.1f}%", text.empty() ? "" : ", ", name_of(resource), 100.0 * gain);
  }
  return text;
}

}  // namespace

std::string seconds_text(double seconds) {
  if (seconds >= 1.0) return fmt::format("{:.3f} s", seconds);
  return seconds >= 1e-3 ? fmt::format("{:.3f} ms", seconds * 1e3)
                         : fmt::format("{:.1f} us", seconds * 1e6);
}

PeakMoment peak_moment(const Schedule& schedule) {
  PeakMoment peak;
  MemoryBreakdown live{};
  std::int64_t total = 0;
  std::vector<std::int32_t> open;  // entries that began a scope of the host
  const std::vector<Schedule::Entry>& entries = schedule.entries();
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const Schedule::Entry& entry = entries[i];
    if (entry.kind == Kind::scope_begin && entry.stream == Schedule::kHost)
      open.push_back(static_cast<std::int32_t>(i));
    if (entry.kind == Kind::scope_end && entry.stream == Schedule::kHost)
      std::erase(open, entry.index);
    if (entry.kind != Kind::memory || entry.pool != MemoryPool::device) continue;
    std::int64_t& category = live[static_cast<std::size_t>(entry.index)];
    total += entry.value - category;
    category = entry.value;
    if (total <= peak.bytes) continue;
    peak.bytes = total;
    peak.held = live;
    peak.fraction = static_cast<double>(i) / static_cast<double>(entries.size());
    peak.where.clear();
    for (auto it = open.rbegin(); it != open.rend(); ++it) {
      const Schedule::Entry& scope = entries[static_cast<std::size_t>(*it)];
      const std::string& name = schedule.texts()[static_cast<std::size_t>(scope.index)];
      const std::string& category_name = schedule.texts()[static_cast<std::size_t>(scope.value)];
      if (name == "model" || name == "step") continue;
      peak.where +=
          fmt::format("{}{} ({})", peak.where.empty() ? "" : ", in ", name, category_name);
    }
    if (peak.where.empty()) peak.where = open.empty() ? "between steps" : "step";
  }
  return peak;
}

std::vector<Traffic> traffic_of(const Schedule& schedule, const SimulationRules* rules) {
  std::vector<Traffic> all;
  std::map<std::tuple<std::string, std::string, DType, int>, std::size_t> places;
  std::map<int, std::vector<std::int32_t>> open;  // labels, by stream
  for (const Schedule::Entry& entry : schedule.entries()) {
    if (entry.kind == Kind::scope_begin) open[entry.stream].push_back(entry.index);
    if (entry.kind == Kind::scope_end) open[entry.stream].pop_back();
    if (entry.kind != Kind::work) continue;
    const Work& work = schedule.works()[static_cast<std::size_t>(entry.index)];
    if (work.kind != Work::Kind::collective || work.group.size < 2) continue;
    const std::vector<std::int32_t>& labels = open[entry.stream];
    const std::string label =
        labels.empty() ? "" : schedule.texts()[static_cast<std::size_t>(labels.back())];
    const std::tuple key{purpose_of(label), std::string(work.name), work.dtype, work.group.size};
    const auto [place, is_new] = places.try_emplace(key, all.size());
    if (is_new)
      all.push_back({purpose_of(label), std::string(work.name), work.dtype, work.group.size});
    Traffic& traffic = all[place->second];
    ++traffic.calls;
    traffic.bytes += work.bytes;
    if (rules != nullptr) traffic.seconds += rules->seconds(work);
  }
  return all;
}

Json plan_json(const RecordedStep& step, const TrainSettings& settings, int ranks,
               const System* system, const StepTimes* times) {
  const StepPlan& plan = step.plan;
  const PeakMoment peak = peak_moment(step.schedule);
  const ShardingOptions sharding = sharding_options(settings, ranks);
  Json json{{"program", "sherd"},
            {"model", settings.preset.empty() ? "custom" : settings.preset},
            {"parameters", plan.parameters},
            {"ranks", ranks},
            {"sharding", name_of(sharding.policy)},
            {"mesh", sharding.mesh ? sharding.mesh->to_string() : ""},
            {"batch_size", settings.batch_size},
            {"micro_batch", settings.micro_batch},
            {"precision", describe(training_precision(settings))},
            {"flops_per_rank", plan.flops},
            {"model_flops", step.model_flops},
            {"collectives_per_step", plan.collectives},
            {"sent_bytes_per_step", plan.sent_bytes}};
  json["memory"] = {{"peak_bytes", plan.device.peak_bytes},
                    {"at_peak", breakdown_json(plan.device.at_peak)},
                    {"step_peak_bytes", peak.bytes},
                    {"step_peak_at", peak.where},
                    {"host_peak_bytes", plan.host.peak_bytes}};
  std::optional<SimulationRules> rules;
  if (system != nullptr) rules = rules_for(step, *system, ranks);
  json["collectives"] = Json::array();
  for (const Traffic& t : traffic_of(step.schedule, rules ? &*rules : nullptr)) {
    Json row{{"purpose", t.purpose}, {"collective", t.collective}, {"dtype", name_of(t.dtype)},
             {"ranks", t.ranks},     {"calls", t.calls},           {"bytes", t.bytes}};
    if (rules) row["seconds"] = t.seconds;
    json["collectives"].push_back(std::move(row));
  }
  json["units"] = Json::array();
  for (const PlannedUnit& unit : step.units) {
    json["units"].push_back({{"name", unit.name},
                             {"parameters", unit.parameters},
                             {"padded", unit.padded},
                             {"of_one_rank", unit.shard}});
  }
  if (const std::int64_t limit = memory_limit_of(settings, system, ranks); limit > 0) {
    json["memory"]["limit_bytes"] = limit;
    json["memory"]["fits"] = fits(plan.device.peak_bytes, static_cast<std::size_t>(limit));
  }
  json["events"] = Json::array();
  for (const ShardingEvent& event : step.events) json["events"].push_back(event.to_string());
  if (times == nullptr) return json;
  json["system"] = system->name;
  Json& time = json["step"];
  time = {{"seconds", times->seconds},
          {"images_per_second", times->images_per_second},
          {"mfu", times->mfu},
          {"exposed_communication_seconds", times->exposed},
          {"waited_for_host_seconds", times->simulation.launch_bound}};
  for (std::size_t i = 0; i < kResources; ++i) {
    const std::string name(name_of(static_cast<Resource>(i)));
    time["busy_seconds"][name] = times->busy[i];
    time["saved_if_twice_as_fast"][name] = times->sensitivity[i];
  }
  return json;
}

std::string plan_text(const RecordedStep& step, const TrainSettings& settings, int ranks,
                      const System* system, const StepTimes* times) {
  const StepPlan& plan = step.plan;
  std::string text;
  const auto line = [&text](const char* name, const std::string& value) {
    text += fmt::format("{:<15} {}\n", name, value);
  };
  line("model", fmt::format("{} parameters, batch {}, {}", group_digits(plan.parameters),
                            settings.batch_size, describe(training_precision(settings))));
  line("ranks", describe_ranks(settings, *make_meta_communicator(0, ranks)));
  if (settings.batch_size < ranks) {
    line("", fmt::format("{} of them have no sample: --batch-size is that of all ranks",
                         ranks - settings.batch_size));
  }
  line("products", fmt::format("{} a step of rank 0", flops_text(static_cast<double>(plan.flops))));
  line("peak memory", fmt::format("{} a rank ({})", format_bytes(plan.device.peak_bytes),
                                  format_breakdown(plan.device.at_peak)));
  const PeakMoment peak = peak_moment(step.schedule);
  const bool as_high = peak.bytes == plan.device.peak_bytes;
  line("", as_high ? fmt::format("reached in {}", peak.where)
                   : fmt::format("before the steps; in a step {}, reached in {}",
                                 format_bytes(peak.bytes), peak.where));
  const std::int64_t limit = memory_limit_of(settings, system, ranks);
  if (limit > 0 && !fits(plan.device.peak_bytes, static_cast<std::size_t>(limit))) {
    line("",
         fmt::format("does NOT fit {}; --auto looks for settings that do", format_bytes(limit)));
  }
  if (plan.host.peak_bytes > 0) {
    line("host memory", fmt::format("{} a rank ({})", format_bytes(plan.host.peak_bytes),
                                    format_breakdown(plan.host.at_peak)));
  }
  std::optional<SimulationRules> rules;
  if (system != nullptr) rules = rules_for(step, *system, ranks);
  if (ranks > 1) {
    line("communication", fmt::format("{} collectives a step, {} sent by a rank", plan.collectives,
                                      format_bytes(plan.sent_bytes)));
    for (const Traffic& t : traffic_of(step.schedule, rules ? &*rules : nullptr)) {
      line("", fmt::format("{:>5} {:<14} of {} over {} ranks, {}{}", t.calls, t.collective,
                           name_of(t.dtype), t.ranks, format_bytes(t.bytes),
                           rules ? ", " + seconds_text(t.seconds) : "") +
                   fmt::format("  {}", t.purpose));
    }
  }
  if (times != nullptr) {
    line("system", fmt::format("{}, {} of memory a device", system->name,
                               format_bytes(system->memory_bytes)));
    line("step",
         fmt::format("{} predicted, {:.1f} images/s{}", seconds_text(times->seconds),
                     times->images_per_second,
                     times->mfu > 0.0 ? fmt::format(", MFU {:.1f}%", 100.0 * times->mfu) : ""));
    std::string busy;
    for (std::size_t i = 0; i < kResources; ++i) {
      if (times->busy[i] <= 0.0) continue;
      busy += fmt::format("{}{} {}", busy.empty() ? "" : ", ", name_of(static_cast<Resource>(i)),
                          seconds_text(times->busy[i]));
    }
    line("busy", busy);
    if (ranks > 1) {
      line("exposed",
           fmt::format("{} of communication ({:.1f}% of the step)", seconds_text(times->exposed),
                       100.0 * times->exposed / times->seconds));
    }
    line("limits", fmt::format("twice as fast would save: {}", limits_text(*times)));
  }
  text += fmt::format("\n{:<28} {:>16} {:>17} {:>15}\n", "unit", "parameters", "with padding",
                      "of one rank");
  for (const PlannedUnit& unit : step.units) {
    text += fmt::format("{:<28} {:>16} {:>17} {:>15}\n", unit.name, group_digits(unit.parameters),
                        group_digits(unit.padded), group_digits(unit.shard));
  }
  return text;
}

}  // namespace sherd
