// SPDX-License-Identifier: Apache-2.0
#include "matrix_report.h"

#include "svg_plot.h"

#include <sherd/runtime/ledger.h>
#include <sherd/tools/trainer/setup.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

namespace sherd::cli {
namespace {

using nlohmann::ordered_json;
using Summaries = std::vector<CellSummary>;
using Value = std::function<double(const CellSummary&)>;

// What the article that the matrix repeats measured (PyTorch FSDP and DeepSpeed on V100s).
constexpr double kArticleFsdp = 1.35, kArticleDeepSpeed = 1.26;  // ViT-H / ViT-L, seconds a step
constexpr double kArticleLeast = 1.25, kArticleMost = 1.30;      // micro-batch 16 / 4, the same

const char* const kStyle =
    "body{margin:0 auto;max-width:1320px;padding:24px;background:var(--page);color:var(--ink);"
    "font:15px/1.5 system-ui,sans-serif}\n"
    "h1{font-size:26px;margin:0 0 4px}h2{font-size:19px;margin:36px 0 6px}\n"
    "p,li{max-width:900px}.muted{color:var(--muted)}\n"
    ".plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,540px),1fr));"
    "gap:20px}\n"
    ".scroll{overflow-x:auto}\n"
    "table{border-collapse:collapse;font-size:12px;font-variant-numeric:tabular-nums}\n"
    "th,td{padding:3px 7px;text-align:right;border-bottom:1px solid var(--grid);"
    "white-space:nowrap}\n"
    "th{color:var(--muted);font-weight:600;vertical-align:bottom;white-space:normal}\n"
    "th.t,td.t{text-align:left}td.why{text-align:left;white-space:normal;min-width:300px}\n"
    "tr.first td{border-top:2px solid var(--muted)}\n"
    "tr.ours td{font-weight:600}.bad{color:var(--s4)}\n"
    "dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;margin:8px 0}"
    "dt{color:var(--muted)}dd{margin:0}\n";

std::string seconds_text(double value) {
  if (value == 0.0) return "0 s";
  if (std::abs(value) < 1e-3) return fmt::format("{:.3g} µs", value * 1e6);
  if (std::abs(value) < 1.0) return fmt::format("{:.3g} ms", value * 1e3);
  return fmt::format("{:.3g} s", value);
}

std::string bytes_text(double value) {
  return format_bytes(static_cast<std::int64_t>(std::llround(value)));
}

std::string or_dash(double value, const std::function<std::string(double)>& format) {
  return std::isnan(value) ? "–" : escape_html(format(value));
}

std::string fixed(double value) {
  return fmt::format("{:.2f}", value);
}

std::string short_model(const std::string& model) {
  if (model.starts_with("vit_tiny")) return "ViT-Ti";
  if (model.starts_with("vit_small")) return "ViT-S";
  if (model.starts_with("vit_base")) return "ViT-B";
  if (model.starts_with("vit_large")) return "ViT-L";
  return model.starts_with("vit_huge") ? "ViT-H" : model;
}

struct System {
  const char* id;
  const char* name;
  int color;
};
constexpr System kSystems[] = {
    {"sherd", "Sherd", 0}, {"torch", "PyTorch DDP / FSDP2", 1}, {"deepspeed", "DeepSpeed ZeRO", 2}};

template <typename T, typename Field>
std::vector<T> distinct(const Summaries& all, Field field) {
  std::vector<T> values;
  for (const CellSummary& summary : all) {
    const T value = field(summary.cell);
    if (std::ranges::find(values, value) == values.end()) values.push_back(value);
  }
  return values;
}

// One panel: the places of the cells that `inside` takes, side by side, and a bar of each system.
std::string panel(const Summaries& all, const std::string& title, const PlotFrame& look,
                  const std::function<bool(const Cell&)>& inside, const Value& value,
                  const Value& low, const Value& high) {
  std::vector<Cell> places;
  for (const CellSummary& summary : all) {
    if (!inside(summary.cell) || !std::isfinite(value(summary))) continue;
    const bool known = std::ranges::any_of(
        places, [&](const Cell& place) { return place.same_place(summary.cell); });
    if (!known) places.push_back(summary.cell);
  }
  std::vector<std::string> categories;
  for (const Cell& place : places)
    categories.push_back(fmt::format("{} ×{}", place.policy, place.ranks));
  std::vector<BarSeries> series;
  for (const System& system : kSystems) {
    BarSeries bars{system.name, system.color, {}, {}, {}};
    bool any = false;
    for (const Cell& place : places) {
      const auto found = std::ranges::find_if(all, [&](const CellSummary& summary) {
        return summary.cell.same_place(place) && summary.cell.system() == system.id;
      });
      const double nothing = std::numeric_limits<double>::quiet_NaN();
      bars.values.push_back(found == all.end() ? nothing : value(*found));
      bars.low.push_back(found == all.end() || !low ? nothing : low(*found));
      bars.high.push_back(found == all.end() || !high ? nothing : high(*found));
      any = any || std::isfinite(bars.values.back());
    }
    if (any) series.push_back(std::move(bars));
  }
  if (series.empty()) return {};
  PlotFrame frame = look;
  frame.title = title;
  return bar_plot(frame, categories, series);
}

// A section of panels, one for each model, precision and micro-batch.
std::string section(const Summaries& all, const std::string& title, const std::string& text,
                    const PlotFrame& look, const Value& value, const Value& low = {},
                    const Value& high = {}) {
  std::string plots;
  for (const auto& model : distinct<std::string>(all, [](const Cell& c) { return c.model; })) {
    for (const auto& precision :
         distinct<std::string>(all, [](const Cell& c) { return c.precision; })) {
      for (const auto micro :
           distinct<std::int64_t>(all, [](const Cell& c) { return c.micro_batch; })) {
        plots += panel(
            all, fmt::format("{}, {}, micro-batch {}", short_model(model), precision, micro), look,
            [&](const Cell& c) {
              return c.model == model && c.precision == precision && c.micro_batch == micro;
            },
            value, low, high);
      }
    }
  }
  if (plots.empty()) return {};
  return fmt::format("<h2>{}</h2>\n<p>{}</p>\n<div class=\"plots\">\n{}</div>\n", title, text,
                     plots);
}

const CellSummary* measured_like(const Summaries& all, Cell cell) {
  const auto found = std::ranges::find_if(all, [&](const CellSummary& s) {
    return s.rounds > 0 && s.cell.same_place(cell) && s.cell.engine == cell.engine;
  });
  return found == all.end() ? nullptr : &*found;
}

// Seconds of a cell over those of the cell that `change` makes of it; panels as in section().
std::string ratio_section(const Summaries& all, const std::string& title, const std::string& text,
                          const PlotFrame& look, const std::function<bool(const Cell&)>& inside,
                          const std::function<Cell(Cell)>& change) {
  Summaries chosen;
  for (const CellSummary& summary : all) {
    if (summary.rounds > 0 && inside(summary.cell)) chosen.push_back(summary);
  }
  return section(chosen, title, text, look, [&](const CellSummary& summary) {
    const CellSummary* base = measured_like(all, change(summary.cell));
    return base == nullptr ? std::numeric_limits<double>::quiet_NaN()
                           : summary.seconds / base->seconds;
  });
}

std::string slowdown_sections(const Summaries& all) {
  const auto models = distinct<std::string>(all, [](const Cell& c) { return c.model; });
  std::string text;
  for (std::size_t i = 1; i < models.size(); ++i) {
    const std::string from = models[i - 1], to = models[i];
    PlotFrame look;
    look.y_label = "times as long a step";
    look.format = fixed;
    std::string article;
    if (from.starts_with("vit_large") && to.starts_with("vit_huge")) {
      look.reference_lines = {{kArticleFsdp, "the article, FSDP: 1.35"},
                              {kArticleDeepSpeed, "the article, DeepSpeed: 1.26"}};
      article =
          " The dashed lines are what the published comparison reported on V100s, where other work "
          "than the model's took most of a step.";
    }
    double products = 0.0;
    for (const CellSummary& s : all) {
      if (s.cell.model != to || s.cell.engine != "sherd" || s.rounds == 0) continue;
      Cell smaller = s.cell;
      smaller.model = from;
      const CellSummary* base = measured_like(all, smaller);
      if (base != nullptr) products = s.step_flops / base->step_flops;
    }
    if (products > 0.0)
      look.reference_lines.push_back({products, fmt::format("products: {:.2f}", products)});
    text += ratio_section(
        all, fmt::format("From {} to {}", short_model(from), short_model(to)),
        fmt::format("How much longer a step of {} takes than one of {}, all else the same. A step "
                    "that is all products takes as much longer as it has more of them.{}",
                    short_model(to), short_model(from), article),
        look, [&](const Cell& c) { return c.model == to; },
        [&](Cell c) {
          c.model = from;
          return c;
        });
  }
  return text;
}

std::string micro_batch_sections(const Summaries& all) {
  auto sizes = distinct<std::int64_t>(all, [](const Cell& c) { return c.micro_batch; });
  std::ranges::sort(sizes);
  std::string text;
  for (std::size_t i = 1; i < sizes.size(); ++i) {
    const std::int64_t from = sizes[i - 1], to = sizes[i];
    PlotFrame look;
    look.y_label = "times as long a step";
    look.format = fixed;
    const double samples = static_cast<double>(to) / static_cast<double>(from);
    look.reference_lines = {{samples, fmt::format("samples: {:.3g}", samples)}};
    std::string article;
    if (from == 4 && to == 16) {
      look.reference_lines.push_back(
          {(kArticleLeast + kArticleMost) / 2, "the article: 1.25 to 1.30"});
      article =
          " The published comparison reported 25 to 30% for four times the samples: nine tenths of "
          "its step did not depend on the batch.";
    }
    text += ratio_section(
        all, fmt::format("From micro-batch {} to {}", from, to),
        fmt::format("How much longer a step takes. A step that is all products takes as much "
                    "longer as it has more samples.{}",
                    article),
        look, [&](const Cell& c) { return c.micro_batch == to; },
        [&](Cell c) {
          c.micro_batch = from;
          return c;
        });
  }
  return text;
}

std::string header(const MatrixReport& report) {
  const MatrixOptions& o = report.options;
  const ordered_json& s = report.settings;
  std::vector<std::pair<std::string, std::string>> facts{
      {"machine",
       fmt::format(
           "{}, {} processors, {} of memory{}", s["machine"].value("processor", ""),
           s["machine"]["processors"].dump(), bytes_text(s["machine"].value("memory", 0.0)),
           s["machine"].contains("gpu") ? ", " + s["machine"].value("gpu", "") : std::string())},
      {"Sherd", fmt::format("{} ({})", s.value("sherd", ""), s.value("build", ""))}};
  std::string peers;
  for (const auto& [name, version] : s["peers"].items())
    peers += fmt::format("{}{} {}", peers.empty() ? "" : ", ",
                         name == "torch" ? "PyTorch" : "DeepSpeed", version.get<std::string>());
  facts.push_back({"peers", peers.empty() ? "none measured" : peers});
  facts.push_back(
      {"steps", fmt::format("{} timed after {} of warm-up, {} round{}; {} thread{} a "
                            "rank; images {}, {} classes; device {}",
                            o.steps, o.warmup, o.rounds, o.rounds == 1 ? "" : "s", o.threads,
                            o.threads == 1 ? "" : "s", o.image_size, o.classes, o.device)});
  std::string text = "<h1>Sherd bench matrix</h1>\n<dl>";
  for (const auto& [name, value] : facts)
    text += fmt::format("<dt>{}</dt><dd>{}</dd>\n", name, escape_html(value));
  text += "</dl>\n";
  std::int64_t missing = 0, failed = 0;
  for (const CellSummary& summary : report.summaries) {
    missing += summary.status == "not run" ? 1 : 0;
    failed += summary.rounds == 0 && summary.status != "not run" ? 1 : 0;
  }
  if (missing > 0)
    text += fmt::format("<p class=\"bad\">{} of {} cells are not measured yet.</p>\n", missing,
                        report.summaries.size());
  if (failed > 0)
    text += fmt::format("<p class=\"bad\">{} of {} cells failed; the table says why.</p>\n", failed,
                        report.summaries.size());
  return text;
}

// Ours beside theirs, in a sentence; and the losses.
std::string findings(const Summaries& all) {
  std::string text = "<ul>\n";
  int faster = 0, compared = 0;
  double least = std::numeric_limits<double>::infinity(), most = 0.0, apart = 0.0;
  double apart_bf16 = 0.0;
  int policies = 0, equal = 0;
  for (const CellSummary& s : all) {
    if (s.rounds == 0) continue;
    if (s.cell.engine == "sherd") {
      ++policies;
      equal += s.equal_losses ? 1 : 0;
      continue;
    }
    if (std::isnan(s.against_sherd)) continue;
    ++compared;
    faster += s.against_sherd > 1.0 ? 1 : 0;
    least = std::min(least, s.against_sherd);
    most = std::max(most, s.against_sherd);
    double& where = s.cell.precision == "fp32" ? apart : apart_bf16;
    if (!std::isnan(s.loss_difference)) where = std::max(where, s.loss_difference);
  }
  if (compared > 0) {
    text += fmt::format(
        "<li>Sherd is faster in {} of {} comparisons with a peer: the peer's step takes {:.2f} to "
        "{:.2f} times as long.</li>\n",
        faster, compared, least, most);
    text += fmt::format(
        "<li>All start from the same weights, images and learning rates. Over the steps, losses of "
        "peers differ from Sherd's by at most {:.2g} (relative) in fp32{}.</li>\n",
        apart, apart_bf16 > 0.0 ? fmt::format(" and {:.2g} in bf16", apart_bf16) : "");
  }
  text += fmt::format(
      "<li>{} of {} cells of Sherd have, bit for bit, the losses of the first policy with the same "
      "ranks, micro-batch and precision.</li>\n",
      equal, policies);
  return text + "</ul>\n";
}

std::string rules() {
  return "<h2>Rules</h2>\n<ul>\n"
         "<li>Weak scaling: a micro-batch is of one rank; ranks × micro-batch images a step.</li>\n"
         "<li>One unit a block, for all: what is gathered, reduced or bucketed at once.</li>\n"
         "<li>Timed: forward, loss, backward, the global gradient norm clipped to 1, AdamW. Not "
         "timed: warm-up, and the barrier before each step. A step lasts as long as its slowest "
         "rank; shown are medians, with whiskers from the lower to the upper quartile, over all "
         "rounds the farthest.</li>\n"
         "<li>Engines of one place run one after the other, each in processes of their own. "
         "Sherd's "
         "ranks are threads of one process; peers' are processes.</li>\n"
         "<li>bf16: Sherd, FSDP2 and DeepSpeed compute and send in bf16 and keep fp32 weights for "
         "the update; DDP computes under autocast and sends fp32 gradients.</li>\n"
         "<li>Bytes are counted by Sherd; those of peers are by formula, as ring collectives send "
         "them.</li>\n"
         "<li>Product: the rate of a large matrix product in the precision's type, on every rank "
         "at "
         "once, in the same process. A cell whose rate is far below its neighbours' met a "
         "disturbed "
         "machine, and is marked.</li>\n"
         "</ul>\n";
}

// The best rate of a system in this precision with so many ranks.
double best_rate(const Summaries& all, const CellSummary& one) {
  double best = 0.0;
  for (const CellSummary& s : all) {
    if (s.rounds > 0 && s.cell.system() == one.cell.system() &&
        s.cell.precision == one.cell.precision && s.cell.ranks == one.cell.ranks)
      best = std::max(best, s.product_rate);
  }
  return best;
}

std::string table(const Summaries& all) {
  std::string text =
      "<h2>All cells</h2>\n<div class=\"scroll\"><table>\n<tr><th class=t>model</th><th "
      "class=t>precision</th><th>micro-batch</th><th>ranks</th><th class=t>policy</th><th "
      "class=t>engine</th><th>step</th><th>quartiles</th><th>images/s</th><th>over "
      "Sherd</th><th>efficiency</th><th>peak a rank</th><th>resident, all</th><th>sent a "
      "rank</th><th>exposed</th><th>last loss</th><th>loss apart</th><th>product, "
      "GFLOP/s</th></tr>\n";
  const CellSummary* before = nullptr;
  for (const CellSummary& s : all) {
    const bool first = before == nullptr || !before->cell.same_place(s.cell);
    before = &s;
    text += fmt::format(
        "<tr class=\"{}{}\"><td class=t>{}</td><td class=t>{}</td><td>{}</td><td>{}</td><td "
        "class=t>{}</td><td class=t>{}</td>",
        first ? "first " : "", s.cell.engine == "sherd" ? "ours" : "",
        escape_html(short_model(s.cell.model)), escape_html(s.cell.precision), s.cell.micro_batch,
        s.cell.ranks, escape_html(s.cell.policy), escape_html(s.cell.engine));
    if (s.rounds == 0) {
      text += fmt::format("<td class=\"why bad\" colspan=12>{}{}</td></tr>\n", s.status,
                          s.reason.empty() ? "" : ": " + escape_html(s.reason));
      continue;
    }
    const bool disturbed = s.product_rate < 0.85 * best_rate(all, s);
    const std::string apart =
        s.cell.engine == "sherd" && s.equal_losses
            ? "equal"
            : or_dash(s.loss_difference, [](double v) { return fmt::format("{:.1e}", v); });
    text += fmt::format(
        "<td>{}</td><td>{} – {}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>"
        "<td>{}</td><td>{}</td><td>{}</td><td>{}</td><td{}>{}{}</td></tr>\n",
        or_dash(s.seconds, seconds_text), or_dash(s.lower, seconds_text),
        or_dash(s.upper, seconds_text),
        or_dash(s.images_per_second, [](double v) { return fmt::format("{:.4g}", v); }),
        or_dash(s.against_sherd, fixed), or_dash(s.efficiency, fixed),
        or_dash(s.peak_bytes, bytes_text), or_dash(s.resident_bytes, bytes_text),
        or_dash(s.sent_bytes, bytes_text), or_dash(s.exposed_seconds, seconds_text),
        s.losses.empty() ? "–" : fmt::format("{:.5f}", s.losses.back()), apart,
        disturbed ? " class=bad" : "",
        or_dash(s.product_rate, [](double v) { return fmt::format("{:.1f}", v / 1e9); }),
        disturbed ? " (low)" : "");
  }
  return text + "</table></div>\n";
}

std::string left_out(const std::vector<LeftOut>& list) {
  if (list.empty()) return {};
  std::string text = "<h2>Left out</h2>\n<ul>\n";
  for (const LeftOut& left : list)
    text += fmt::format("<li>{}: {}</li>\n", escape_html(left.what), escape_html(left.reason));
  return text + "</ul>\n";
}

PlotFrame look_of(const char* label, std::function<std::string(double)> format) {
  PlotFrame look;
  look.y_label = label;
  look.format = std::move(format);
  return look;
}

PlotFrame bytes_look(const char* label) {
  PlotFrame look = look_of(label, bytes_text);
  look.binary = true;
  return look;
}

}  // namespace

std::string matrix_html(const MatrixReport& report) {
  const Summaries& all = report.summaries;
  const bool gpu = report.options.device == "cuda";
  PlotFrame efficiency = look_of("of one rank's speed", fixed);
  efficiency.reference_lines = {{1.0, "perfect: 1"}};
  std::string text =
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta "
      "name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<meta "
      "name=\"color-scheme\" content=\"light dark\">\n<title>Sherd bench "
      "matrix</title>\n<style>\n" +
      plot_style() + kStyle + "</style>\n</head>\n<body>\n";
  text += header(report) + findings(all) + rules() + left_out(report.left_out);
  text += section(
      all, "Time of a step", "Below each group its policy and the number of ranks.",
      look_of("a step", seconds_text), [](const CellSummary& s) { return s.seconds; },
      [](const CellSummary& s) { return s.lower; }, [](const CellSummary& s) { return s.upper; });
  text += section(all, "Throughput", "Of all ranks together.", look_of("images a second", {}),
                  [](const CellSummary& s) { return s.images_per_second; });
  text += gpu ? section(all, "Peak memory of a GPU",
                        "What the steps had allocated at most: by Sherd's ledger, and by PyTorch's "
                        "allocator.",
                        bytes_look("a rank"), [](const CellSummary& s) { return s.peak_bytes; })
              : section(all, "Peak memory",
                        "Resident memory of all ranks together while the timed steps ran, as the "
                        "system counts it, without what PyTorch's own libraries hold before there "
                        "is a model.",
                        bytes_look("all ranks"), [](const CellSummary& s) {
                          return s.resident_bytes - s.base_resident_bytes;
                        });
  text += section(
      all, "Bytes sent", "By one rank in a step.", bytes_look("a rank"), [](const CellSummary& s) {
        return s.cell.ranks == 1 ? std::numeric_limits<double>::quiet_NaN() : s.sent_bytes;
      });
  text += section(
      all, "Exposed communication",
      "The part of a step in which a rank waits for others; Sherd's alone, peers do not "
      "count it.",
      look_of("a step", seconds_text), [](const CellSummary& s) {
        return s.cell.ranks == 1 ? std::numeric_limits<double>::quiet_NaN() : s.exposed_seconds;
      });
  text += section(
      all, "Weak-scaling efficiency",
      "One rank's step without sharding over this step, each system by its own (DeepSpeed by "
      "DDP's). Where ranks together have more threads than the machine has processors, it cannot "
      "reach 1; memory bandwidth is shared by all.",
      efficiency, [](const CellSummary& s) {
        return s.cell.ranks == 1 ? std::numeric_limits<double>::quiet_NaN() : s.efficiency;
      });
  text += slowdown_sections(all) + micro_batch_sections(all) + table(all);
  return text + "</body>\n</html>\n";
}

ordered_json matrix_json(const MatrixReport& report) {
  ordered_json cells = ordered_json::array();
  for (const CellSummary& s : report.summaries) {
    cells.push_back({{"cell", s.cell.name()},
                     {"model", s.cell.model},
                     {"precision", s.cell.precision},
                     {"micro_batch", s.cell.micro_batch},
                     {"ranks", s.cell.ranks},
                     {"policy", s.cell.policy},
                     {"engine", s.cell.engine},
                     {"status", s.status},
                     {"reason", s.reason},
                     {"rounds", s.rounds},
                     {"step_seconds", s.seconds},
                     {"step_seconds_lower_quartile", s.lower},
                     {"step_seconds_upper_quartile", s.upper},
                     {"images_per_second", s.images_per_second},
                     {"step_seconds_over_sherd", s.against_sherd},
                     {"weak_scaling_efficiency", s.efficiency},
                     {"peak_bytes_of_rank", s.peak_bytes},
                     {"resident_bytes", s.resident_bytes},
                     {"resident_bytes_of_libraries", s.base_resident_bytes},
                     {"sent_bytes_of_rank", s.sent_bytes},
                     {"exposed_seconds", s.exposed_seconds},
                     {"product_flops_per_second", s.product_rate},
                     {"step_flops", s.step_flops},
                     {"losses", s.losses},
                     {"losses_equal_to_first_policy", s.equal_losses},
                     {"largest_loss_difference", s.loss_difference},
                     {"version", s.version}});
  }
  ordered_json left = ordered_json::array();
  for (const LeftOut& one : report.left_out)
    left.push_back({{"what", one.what}, {"reason", one.reason}});
  return {{"program", "sherd bench matrix"},
          {"settings", report.settings},
          {"rounds", report.options.rounds},
          {"left_out", left},
          {"cells", cells}};
}

}  // namespace sherd::cli
