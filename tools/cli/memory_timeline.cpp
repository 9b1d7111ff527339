// SPDX-License-Identifier: Apache-2.0
#include "memory_timeline.h"

#include "svg_plot.h"

#include <fmt/format.h>
#include <sherd/runtime/ledger.h>

#include <algorithm>
#include <array>

namespace sherd::cli {
namespace {

// As many as there are colours: what is small is one.
constexpr std::string_view kBands[] = {"parameters",          "optimizer state",
                                       "gradients",           "activations",
                                       "gathered parameters", "communication, workspace, inputs"};
constexpr std::size_t kOther = std::size(kBands) - 1;

std::size_t band_of(MemoryCategory category) {
  switch (category) {
    case MemoryCategory::parameters: return 0;
    case MemoryCategory::optimizer_state: return 1;
    case MemoryCategory::gradients: return 2;
    case MemoryCategory::activations: return 3;
    case MemoryCategory::gathered_parameters: return 4;
    default: return kOther;
  }
}

}  // namespace

std::string memory_timeline(const RecordedStep& step, const Simulation& simulation, bool timed,
                            std::int64_t limit_bytes) {
  std::vector<PointSeries> bands;
  for (std::size_t i = 0; i < std::size(kBands); ++i)
    bands.push_back({std::string(kBands[i]), static_cast<int>(i), {}});
  MemoryBreakdown live{};
  const auto add_points = [&](double time) {
    std::array<double, std::size(kBands)> sums{};
    for (std::size_t i = 0; i < kMemoryCategories; ++i)
      sums[band_of(static_cast<MemoryCategory>(i))] += static_cast<double>(live[i]);
    for (std::size_t i = 0; i < std::size(kBands); ++i) bands[i].points.emplace_back(time, sums[i]);
  };
  for (const Simulation::Memory& change : simulation.memory) {
    if (change.pool != MemoryPool::device) continue;
    live[static_cast<std::size_t>(change.category)] = change.live;
    add_points(timed ? change.time : static_cast<double>(bands[0].points.size()));
  }
  add_points(timed ? simulation.seconds : static_cast<double>(bands[0].points.size()));
  PlotFrame frame;
  frame.title = fmt::format("Memory of a rank over one step, peak {}",
                            format_bytes(step.plan.device.peak_bytes));
  frame.x_label = timed ? "seconds" : "changes of memory, in order";
  frame.width = 960;
  frame.height = 480;
  frame.binary = true;
  frame.format = [](double bytes) { return format_bytes(static_cast<std::int64_t>(bytes)); };
  if (limit_bytes > 0 && limit_bytes < 2 * step.plan.device.peak_bytes)
    frame.reference_lines.push_back({static_cast<double>(limit_bytes), "memory of the device"});
  std::string svg = area_plot(frame, bands, true);
  // By itself it needs the style that a page would have, and its name.
  const std::size_t end_of_tag = svg.find('>');
  svg.insert(end_of_tag + 1, "<style>" + plot_style() + "</style>");
  if (svg.find("xmlns=") == std::string::npos)
    svg.insert(svg.find("<svg") + 4, " xmlns=\"http://www.w3.org/2000/svg\"");
  return svg + "\n";
}

}  // namespace sherd::cli
