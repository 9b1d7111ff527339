// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <sherd/runtime/ledger.h>
#include <sherd/tools/planner/compare.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

namespace sherd {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const Comparison::Range& range) {
  return {{"median", range.median}, {"lowest", range.lowest}, {"highest", range.highest}};
}

std::string milliseconds(double seconds) {
  return fmt::format("{:.3f}", seconds * 1e3);
}

// "planned", "traced" and "(lowest to highest)", in milliseconds, and the difference.
std::string times(double planned, const Comparison::Range& traced) {
  const std::string range =
      fmt::format("({} to {})", milliseconds(traced.lowest), milliseconds(traced.highest));
  std::string change;
  if (planned > 0.0) change = fmt::format("{:+.1f}%", 100.0 * (traced.median / planned - 1.0));
  return fmt::format("{:>12} {:>12}  {:<26} {:>9}", milliseconds(planned),
                     milliseconds(traced.median), range, change);
}

// "rank 0: steps 1 to 8, 10"
std::string numbers_text(const std::vector<std::int64_t>& numbers) {
  std::string text;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    if (!text.empty()) text += ", ";
    text += last == i ? fmt::format("{}", numbers[i])
                      : fmt::format("{} to {}", numbers[i], numbers[last]);
    i = last + 1;
  }
  return text;
}

void add_steps(const Comparison& comparison, std::string& text) {
  std::set<int> ranks;
  // Ranks leave out the same steps for the same reasons, unless something is wrong.
  std::map<std::string, std::map<int, std::vector<std::int64_t>>> by_reason;
  for (const Comparison::Step& step : comparison.steps) {
    ranks.insert(step.rank);
    by_reason[step.left_out][step.rank].push_back(step.step);
  }
  for (const auto& [reason, by_rank] : by_reason) {
    std::map<std::vector<std::int64_t>, std::vector<std::int64_t>> ranks_of;
    for (const auto& [rank, steps] : by_rank) ranks_of[steps].push_back(rank);
    for (const auto& [steps, who] : ranks_of) {
      text += fmt::format("{:<15} step{} {}", reason.empty() ? "compared" : "left out",
                          steps.size() == 1 ? "" : "s", numbers_text(steps));
      if (ranks.size() > 1) {
        text += fmt::format(" of rank{} {}", who.size() == 1 ? "" : "s", numbers_text(who));
      }
      text += reason.empty() ? "\n" : fmt::format(": {}\n", reason);
    }
  }
}

void add_verdict(const Comparison& comparison, const char* what, bool Comparison::Step::*same,
                 std::string& text) {
  const auto steps = comparison.compared_steps();
  const auto equal = std::ranges::count_if(comparison.steps, [&](const Comparison::Step& step) {
    return step.left_out.empty() && step.*same;
  });
  text += equal == steps ? fmt::format("{:<15} as planned in all {}\n", what, steps)
                         : fmt::format("{:<15} as planned in {} of {}\n", what, equal, steps);
}

void add_difference(const Comparison::Difference& difference, std::string& text) {
  text += fmt::format("\nrank {}, step {}{}: {}, {} {}:\n", difference.rank, difference.step,
                      difference.more == 0   ? ""
                      : difference.more == 1 ? " and another one"
                                             : fmt::format(" and {} others", difference.more),
                      difference.where, difference.where.ends_with("memory") ? "change" : "event",
                      difference.position);
  text += fmt::format("  planned: {}\n  traced:  {}\n", difference.expected, difference.came);
  for (const std::string& line : difference.before) text += "    both     " + line + "\n";
  for (const std::string& line : difference.planned_next) text += "    planned  " + line + "\n";
  for (const std::string& line : difference.traced_next) text += "    traced   " + line + "\n";
}

std::string bytes_text(double bytes) {
  return fmt::format("{} ({:.0f} bytes)", format_bytes(static_cast<std::int64_t>(bytes)), bytes);
}

}  // namespace

std::string to_text(const Comparison& comparison, std::size_t most) {
  std::string text =
      fmt::format("{:<15} {}\n{:<15} {}\n", "plan", comparison.plan, "run", comparison.run);
  for (const std::string& note : comparison.notes) text += fmt::format("{:<15} {}\n", "note", note);
  add_steps(comparison, text);
  add_verdict(comparison, "events", &Comparison::Step::same_events, text);
  const bool counted = !comparison.memory.empty();
  if (counted) add_verdict(comparison, "memory", &Comparison::Step::same_memory, text);
  if (!counted) text += fmt::format("{:<15} no counters, neither planned nor traced\n", "memory");
  for (const Comparison::Memory& memory : comparison.memory) {
    text += fmt::format("{:<15} {} changes; peak planned {}, traced {}\n",
                        memory.pool == "memory" ? "" : memory.pool, memory.changes,
                        bytes_text(memory.planned_peak), bytes_text(memory.traced_peak));
  }
  for (const Comparison::Difference& difference : comparison.differences) {
    add_difference(difference, text);
  }
  text += fmt::format("\n{:>12} {:>12}  {:<26} {:>9}\n", "planned ms", "traced ms",
                      "(fastest to slowest)", "");
  text += times(comparison.planned_seconds, comparison.traced_seconds) + "  the step\n";
  for (const Comparison::Kind& kind : comparison.kinds) {
    text += times(kind.planned, kind.traced) + "  " + kind.kind +
            (kind.track == "main" ? "" : " (" + kind.track + ")") + "\n";
  }
  if (comparison.events.empty()) return text;
  const std::size_t shown = std::min(most, comparison.events.size());
  text += fmt::format("\nthe {} of {} events that differ most:\n", shown, comparison.events.size());
  for (std::size_t i = 0; i < shown; ++i) {
    const Comparison::Event& event = comparison.events[i];
    text += fmt::format("{}  {} \"{}\"{}\n", times(event.planned, event.traced), event.category,
                        event.name, event.track == "main" ? "" : " (" + event.track + ")");
  }
  return text;
}

Json to_json(const Comparison& comparison) {
  Json json{{"plan", comparison.plan},
            {"run", comparison.run},
            {"same", comparison.same()},
            {"notes", comparison.notes},
            {"compared_steps", comparison.compared_steps()},
            {"planned_seconds", comparison.planned_seconds},
            {"traced_seconds", json_of(comparison.traced_seconds)}};
  for (const char* list : {"steps", "differences", "memory", "kinds", "events"}) {
    json[list] = Json::array();
  }
  for (const Comparison::Step& step : comparison.steps) {
    Json row{{"rank", step.rank}, {"step", step.step}, {"seconds", step.seconds}};
    if (step.left_out.empty()) {
      row["same_events"] = step.same_events;
      row["same_memory"] = step.same_memory;
    } else {
      row["left_out"] = step.left_out;
    }
    json["steps"].push_back(std::move(row));
  }
  for (const Comparison::Difference& difference : comparison.differences) {
    json["differences"].push_back({{"rank", difference.rank},
                                   {"step", difference.step},
                                   {"where", difference.where},
                                   {"position", difference.position},
                                   {"planned", difference.expected},
                                   {"traced", difference.came},
                                   {"before", difference.before},
                                   {"planned_next", difference.planned_next},
                                   {"traced_next", difference.traced_next},
                                   {"more_steps", difference.more}});
  }
  for (const Comparison::Memory& memory : comparison.memory) {
    json["memory"].push_back({{"pool", memory.pool},
                              {"changes", memory.changes},
                              {"planned_peak_bytes", memory.planned_peak},
                              {"traced_peak_bytes", memory.traced_peak}});
  }
  for (const Comparison::Kind& kind : comparison.kinds) {
    json["kinds"].push_back({{"track", kind.track},
                             {"kind", kind.kind},
                             {"planned_seconds", kind.planned},
                             {"traced_seconds", json_of(kind.traced)}});
  }
  for (const Comparison::Event& event : comparison.events) {
    json["events"].push_back({{"track", event.track},
                              {"position", event.position},
                              {"category", event.category},
                              {"name", event.name},
                              {"planned_seconds", event.planned},
                              {"traced_seconds", json_of(event.traced)},
                              {"slowest_rank", event.slowest_rank}});
  }
  return json;
}

}  // namespace sherd
