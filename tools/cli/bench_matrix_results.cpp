// SPDX-License-Identifier: Apache-2.0
// What the cells of a matrix measured, over their rounds and beside each other.
#include "bench_matrix.h"
#include "quantile.h"

#include <sherd/runtime/error.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace sherd::cli {
namespace {

using nlohmann::json;

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

double number(const json& result, const char* key) {
  const auto found = result.find(key);
  return found != result.end() && found->is_number() ? found->get<double>() : kUnknown;
}

double sum(const json& result, const char* key) {
  double total = 0.0;
  if (!result.contains(key)) return kUnknown;
  for (const json& value : result[key]) total += value.get<double>();
  return total;
}

CellSummary unknown_summary(const Cell& cell) {
  CellSummary summary;
  summary.cell = cell;
  summary.status = "not run";
  for (double* value :
       {&summary.seconds, &summary.lower, &summary.upper, &summary.images_per_second,
        &summary.peak_bytes, &summary.resident_bytes, &summary.base_resident_bytes,
        &summary.sent_bytes, &summary.exposed_seconds, &summary.product_rate, &summary.step_flops,
        &summary.efficiency, &summary.against_sherd, &summary.loss_difference})
    *value = kUnknown;
  return summary;
}

CellSummary over_rounds(const Cell& cell, const std::vector<CellRun>& runs) {
  CellSummary summary = unknown_summary(cell);
  std::vector<double> medians, lower, upper, exposed, rates;
  const json* last = nullptr;
  for (const CellRun& run : runs) {
    if (run.cell != cell.name()) continue;
    if (run.status != "ok") {
      if (last == nullptr) summary.status = run.status;
      summary.reason = run.reason;
      continue;
    }
    last = &run.result;
    summary.status = "ok";
    medians.push_back(number(run.result, "seconds_per_step"));
    lower.push_back(number(run.result, "seconds_lower_quartile"));
    upper.push_back(number(run.result, "seconds_upper_quartile"));
    rates.push_back(number(run.result, "matrix_flops_per_second"));
    exposed.push_back(number(run.result, "exposed_seconds_per_step"));
  }
  if (last == nullptr) return summary;
  const bool ours = cell.engine == "sherd";
  summary.rounds = static_cast<int>(medians.size());
  summary.seconds = quantile(medians, 0.5);
  summary.lower = std::ranges::min(lower);
  summary.upper = std::ranges::max(upper);
  summary.product_rate = std::ranges::min(rates);
  summary.images_per_second = static_cast<double>(cell.ranks * cell.micro_batch) / summary.seconds;
  summary.peak_bytes = number(*last, ours ? "peak_bytes" : "device_allocated_bytes");
  summary.resident_bytes = sum(*last, "peak_resident_bytes_of_processes");
  summary.base_resident_bytes = ours ? 0.0 : sum(*last, "base_resident_bytes_of_processes");
  summary.sent_bytes = number(*last, "sent_bytes_per_step");
  if (ours) {
    if (cell.ranks > 1) summary.exposed_seconds = quantile(exposed, 0.5);  // one waits for nobody
    summary.step_flops = number(*last, "flops_per_second") * number(*last, "seconds_per_step");
  }
  for (const json& loss : last->value("losses", json::array()))
    summary.losses.push_back(loss.is_number() ? loss.get<double>() : kUnknown);
  if (ours) {
    summary.version =
        fmt::format("sherd {} ({})", last->value("version", ""), last->value("build", ""));
  } else {
    summary.version = "PyTorch " + last->value("torch", "");
    if (last->contains("deepspeed"))
      summary.version += ", DeepSpeed " + (*last)["deepspeed"].get<std::string>();
  }
  return summary;
}

double difference(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.empty() || a.size() != b.size()) return kUnknown;
  double largest = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double here = std::abs(a[i] - b[i]) / std::abs(b[i]);
    if (std::isnan(here)) return kUnknown;
    largest = std::max(largest, here);
  }
  return largest;
}

// The one that has all this; null where there is none, or it was not measured.
template <typename Predicate>
const CellSummary* find_measured(const std::vector<CellSummary>& all, Predicate matches) {
  const auto found = std::ranges::find_if(
      all, [&](const CellSummary& s) { return s.rounds > 0 && matches(s.cell); });
  return found == all.end() ? nullptr : &*found;
}

void compare(CellSummary& summary, const std::vector<CellSummary>& all) {
  const Cell& cell = summary.cell;
  if (summary.rounds == 0) return;
  const auto same_point = [&](const Cell& other) {
    return other.model == cell.model && other.precision == cell.precision &&
           other.micro_batch == cell.micro_batch;
  };
  const std::string base = cell.engine == "sherd" ? "sherd" : "ddp";
  const CellSummary* single = find_measured(all, [&](const Cell& other) {
    return same_point(other) && other.ranks == 1 && other.policy == "none" && other.engine == base;
  });
  if (single != nullptr) summary.efficiency = single->seconds / summary.seconds;
  if (cell.engine == "sherd") {
    const CellSummary* first = find_measured(all, [&](const Cell& other) {
      return same_point(other) && other.ranks == cell.ranks && other.engine == "sherd";
    });
    summary.against_sherd = 1.0;
    summary.equal_losses = summary.losses == first->losses;
    summary.loss_difference = difference(summary.losses, first->losses);
    return;
  }
  const CellSummary* ours = find_measured(
      all, [&](const Cell& other) { return cell.same_place(other) && other.engine == "sherd"; });
  if (ours == nullptr) return;
  summary.against_sherd = summary.seconds / ours->seconds;
  summary.loss_difference = difference(summary.losses, ours->losses);
}

std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

std::string csv_number(double value) {
  return std::isnan(value) ? std::string() : fmt::format("{}", value);
}

}  // namespace

nlohmann::ordered_json to_json(const CellRun& run) {
  return {{"cell", run.cell},     {"round", run.round},     {"status", run.status},
          {"reason", run.reason}, {"seconds", run.seconds}, {"result", run.result}};
}

CellRun run_from_json(const json& line) {
  CellRun run;
  run.cell = line.at("cell").get<std::string>();
  run.round = line.at("round").get<std::int64_t>();
  run.status = line.at("status").get<std::string>();
  run.reason = line.at("reason").get<std::string>();
  run.seconds = line.at("seconds").get<double>();
  run.result = line.at("result");
  return run;
}

std::vector<CellSummary> summarize(const std::vector<Cell>& cells,
                                   const std::vector<CellRun>& runs) {
  std::vector<CellSummary> summaries;
  for (const Cell& cell : cells) summaries.push_back(over_rounds(cell, runs));
  for (CellSummary& summary : summaries) compare(summary, summaries);
  return summaries;
}

std::string matrix_csv(const std::vector<CellSummary>& summaries) {
  std::string text =
      "model,precision,micro_batch,ranks,policy,engine,status,reason,rounds,step_seconds,"
      "step_seconds_lower_quartile,step_seconds_upper_quartile,images_per_second,"
      "step_seconds_over_sherd,weak_scaling_efficiency,peak_bytes_of_rank,resident_bytes,"
      "resident_bytes_of_libraries,sent_bytes_of_rank,sent_bytes_source,exposed_seconds,"
      "product_flops_per_second,step_flops,first_loss,last_loss,largest_loss_difference,"
      "version\r\n";
  for (const CellSummary& s : summaries) {
    const bool measured = s.rounds > 0;
    const std::vector<std::string> fields{s.cell.model,
                                          s.cell.precision,
                                          fmt::format("{}", s.cell.micro_batch),
                                          fmt::format("{}", s.cell.ranks),
                                          s.cell.policy,
                                          s.cell.engine,
                                          s.status,
                                          s.reason,
                                          fmt::format("{}", s.rounds),
                                          csv_number(s.seconds),
                                          csv_number(s.lower),
                                          csv_number(s.upper),
                                          csv_number(s.images_per_second),
                                          csv_number(s.against_sherd),
                                          csv_number(s.efficiency),
                                          csv_number(s.peak_bytes),
                                          csv_number(s.resident_bytes),
                                          csv_number(s.base_resident_bytes),
                                          csv_number(s.sent_bytes),
                                          !measured                  ? ""
                                          : s.cell.engine == "sherd" ? "counted"
                                                                     : "formula",
                                          csv_number(s.exposed_seconds),
                                          csv_number(s.product_rate),
                                          csv_number(s.step_flops),
                                          s.losses.empty() ? "" : csv_number(s.losses.front()),
                                          s.losses.empty() ? "" : csv_number(s.losses.back()),
                                          csv_number(s.loss_difference),
                                          s.version};
    for (std::size_t i = 0; i < fields.size(); ++i)
      text += (i == 0 ? "" : ",") + csv_field(fields[i]);
    text += "\r\n";
  }
  return text;
}

}  // namespace sherd::cli
