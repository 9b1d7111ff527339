// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/planner/published_plan.h>

#include <sherd/runtime/error.h>
#include <sherd/tools/planner/planned_step.h>

#include <cmath>
#include <map>

namespace sherd {
namespace {

const char* unit_text(PublishedCase::Unit unit) {
  switch (unit) {
    case PublishedCase::Unit::tflops: return "TFLOP/s";
    case PublishedCase::Unit::tokens: return "tokens/s";
    case PublishedCase::Unit::seconds: break;
  }
  return "s";
}

// The others' mean is that of logarithms, so that twice and half cancel.
double relative_error(const PublishedResult& result, const std::vector<PublishedResult*>& all) {
  if (!result.published->ratio_to.empty()) return result.error;
  double sum = 0.0;
  int others = 0;
  for (const PublishedResult* other : all) {
    if (other == &result || other->published->system != result.published->system ||
        !other->published->ratio_to.empty())
      continue;
    sum += std::log1p(other->error);
    ++others;
  }
  return others == 0 ? result.error : (1.0 + result.error) / std::exp(sum / others) - 1.0;
}

}  // namespace

PublishedResult plan_published(const PublishedCase& published) {
  SHERD_CHECK(published.waiting.empty(), "published case {}: waits for {}", published.name,
              published.waiting);
  const System system = read_system(published.system);
  TrainSettings settings = published_settings(published);
  settings.device = system.cuda ? "cuda" : "cpu";
  settings.ranks = published.ranks;
  const auto step = record_step(settings, published.ranks);
  SimulationRules rules = rules_for(*step, system, published.ranks);
  rules.seconds = [&, alone = rules.seconds](const Work& work) {
    return alone(with_terms(published, work)) + more_seconds(published, work, system);
  };
  rules.seconds_beside_collective = [&,
                                     beside = rules.seconds_beside_collective](const Work& work) {
    return beside(with_terms(published, work)) + more_seconds(published, work, system);
  };
  const Simulation simulation = simulate(step->schedule, rules);
  PublishedResult result;
  result.published = &published;
  result.step_seconds = simulation.seconds;
  // The vocabulary's products depend on each other and on nothing that travels.
  for (const Work& work : vocabulary_work(published)) result.step_seconds += rules.seconds(work);
  result.exposed_seconds = simulation.exposed;
  result.figure = published_figure(published, result.step_seconds);
  result.peak_gib =
      static_cast<double>(step->plan.device.peak_bytes + vocabulary_bytes(published)) /
      1073741824.0;
  return result;
}

PublishedSummary plan_published_cases() {
  PublishedSummary summary;
  std::map<std::string, double> figures;
  for (const PublishedCase& published : published_cases()) {
    if (!published.waiting.empty()) {
      summary.waiting.push_back(&published);
      continue;
    }
    summary.results.push_back(plan_published(published));
    figures[published.name] = summary.results.back().figure;
  }
  std::vector<PublishedResult*> compared;
  for (PublishedResult& result : summary.results) {
    if (!result.published->ratio_to.empty())
      result.figure /= figures.at(result.published->ratio_to);
    if (result.published->published <= 0.0) continue;
    result.error = result.figure / result.published->published - 1.0;
    compared.push_back(&result);
  }
  for (PublishedResult* result : compared) {
    result->relative_error = relative_error(*result, compared);
    const auto count = static_cast<double>(compared.size());
    summary.mean_error += std::abs(result->error) / count;
    summary.mean_relative_error += std::abs(result->relative_error) / count;
  }
  return summary;
}

std::string to_text(const PublishedSummary& summary) {
  std::string text = fmt::format(
      "{:<15} {:>6} {:>10} {:>11} {:>11} {:>7} {:>8} {:>9} {:>8} {:>9}  {}\n", "case", "ranks",
      "step", "predicted", "published", "error", "relative", "exposed", "GiB", "published", "what");
  for (const PublishedResult& result : summary.results) {
    const PublishedCase& published = *result.published;
    const bool known = published.published > 0.0, ratio = !published.ratio_to.empty();
    text += fmt::format(
        "{:<15} {:>6} {:>8.3f} s {:>11.5g} {:>11} {:>7} {:>8} {:>8.1f}% {:>8.1f} {:>9}  {}: {}\n",
        published.name, published.ranks, result.step_seconds, result.figure,
        known ? fmt::format("{:.5g}", published.published) : "-",
        known ? fmt::format("{:+.1f}%", 100.0 * result.error) : "-",
        known ? fmt::format("{:+.1f}%", 100.0 * result.relative_error) : "-",
        100.0 * result.exposed_seconds / result.step_seconds, result.peak_gib,
        published.published_gib > 0.0 ? fmt::format("{:.1f}", published.published_gib) : "-",
        ratio ? "of " + published.ratio_to : unit_text(published.unit), published.about);
  }
  for (const PublishedCase* waiting : summary.waiting) {
    text += fmt::format("{:<15} {:>6} waits for {}: {}\n", waiting->name, waiting->ranks,
                        waiting->waiting, waiting->about);
  }
  return text + fmt::format(
                    "\nmean error {:.1f}%; {:.1f}% once scaled by what the other cases on the same "
                    "system are off by (relative)\n",
                    100.0 * summary.mean_error, 100.0 * summary.mean_relative_error);
}

}  // namespace sherd
