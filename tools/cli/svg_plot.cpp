// SPDX-License-Identifier: Apache-2.0
#include "svg_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace sherd::cli {
namespace {

constexpr double kLabelWidth = 6.4;    // of a letter at 11 pixels, about
constexpr double kLabelHeight = 11.0;  // of a line of them

double text_width(const std::string& text) {
  return kLabelWidth * static_cast<double>(text.size());
}

class Canvas {
 public:
  Canvas(const PlotFrame& frame, double low, double high, std::vector<std::string> legend_names,
         const std::vector<int>& legend_colors, double bottom)
      : frame_(frame) {
    for (const PlotFrame::Line& line : frame.reference_lines) high = std::max(high, line.value);
    if (std::isfinite(frame.top)) high = frame.top;
    ticks_ = axis_ticks(std::min(low, 0.0), high, 5, frame.binary);
    double widest = 0.0;
    for (const double tick : ticks_) widest = std::max(widest, text_width(label(tick)));
    left_ = widest + (frame.y_label.empty() ? 14.0 : 30.0);
    double beside = 12.0;
    for (const PlotFrame::Line& line : frame.reference_lines)
      beside = std::max(beside, text_width(label(line.value)) + 8.0);
    right_ = frame.width - beside;
    text_ = fmt::format(
        "<svg class=\"plot\" viewBox=\"0 0 {} {}\" width=\"{}\" role=\"img\" aria-label=\"{}\">\n",
        frame.width, frame.height, frame.width, escape_html(frame.title));
    label_at(left_, 16, "title", "start", frame.title);
    add_legend(legend_names, legend_colors);
    bottom_ = frame.height - bottom - (frame.x_label.empty() ? 0.0 : 16.0);
    if (!frame.x_label.empty())
      label_at((left_ + right_) / 2, frame.height - 5.0, "label", "middle", frame.x_label);
    if (!frame.y_label.empty()) {
      text_ += fmt::format(
          "<text class=\"label\" text-anchor=\"middle\" transform=\"translate(11 {:.1f}) "
          "rotate(-90)\">{}</text>\n",
          (top_ + bottom_) / 2, escape_html(frame.y_label));
    }
    for (const double tick : ticks_) {
      text_ += fmt::format(
          "<line class=\"{}\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>\n",
          tick == 0.0 ? "axis" : "grid", left_, right_, y(tick), y(tick));
      label_at(left_ - 5, y(tick) + 4, "tick", "end", label(tick));
    }
  }

  double left() const { return left_; }
  double right() const { return right_; }
  double bottom() const { return bottom_; }
  double y(double value) const {
    const double low = ticks_.front(), high = ticks_.back();
    return bottom_ - (std::clamp(value, low, high) - low) / (high - low) * (bottom_ - top_);
  }
  std::string label(double value) const {
    return frame_.format ? frame_.format(value) : fmt::format("{:.5g}", value);
  }

  void add(const std::string& text) { text_ += text; }
  void label_at(double x, double y, const char* kind, const char* anchor, const std::string& text) {
    text_ +=
        fmt::format("<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n",
                    kind, x, y, anchor, escape_html(text));
  }

  std::string finish() {
    std::vector<double> values;
    for (const PlotFrame::Line& line : frame_.reference_lines) values.push_back(line.value);
    std::ranges::sort(values, std::greater<>());  // from the top down
    double above = -kLabelHeight;
    for (const double value : values) {
      text_ += fmt::format(
          "<line class=\"reference\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>\n",
          left_, right_, y(value), y(value));
      above = std::max(y(value) + 4, above + kLabelHeight);
      label_at(right_ + 4, above, "tick", "start", label(value));
    }
    return text_ + "</svg>\n";
  }

 private:
  void add_legend(const std::vector<std::string>& names, const std::vector<int>& colors) {
    double x = left_, row = 34.0;
    const auto place = [&](const std::string& name) {
      const double width = 20.0 + text_width(name) + 12.0;
      if (x > left_ && x + width > frame_.width) {
        x = left_;
        row += 16.0;
      }
      label_at(x + 17.0, row, "tick", "start", name);
      x += width;
      return x - width;
    };
    for (std::size_t i = 0; i < names.size(); ++i) {
      const double at = place(names[i]);
      text_ += fmt::format(
          "<rect class=\"s{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"12\" height=\"12\" rx=\"2\"/>\n",
          colors[i] % kPlotColors, at, row - 10.0);
    }
    for (const PlotFrame::Line& line : frame_.reference_lines) {
      const double at = place(line.label);
      text_ += fmt::format(
          "<line class=\"reference\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>\n",
          at, at + 13.0, row - 4.0, row - 4.0);
    }
    top_ = names.empty() && frame_.reference_lines.empty() ? 30.0 : row + 14.0;
  }

  const PlotFrame& frame_;
  std::vector<double> ticks_;
  double left_ = 0.0, right_ = 0.0, top_ = 0.0, bottom_ = 0.0;
  std::string text_;
};

void widen(double value, double& low, double& high) {
  if (!std::isfinite(value)) return;
  low = std::min(low, value);
  high = std::max(high, value);
}

// Over a number: the axis and where a value of it lies.
struct Axis {
  double low = 0.0, high = 1.0, left = 0.0, right = 1.0;
  double at(double x) const { return left + (x - low) / (high - low) * (right - left); }
};

Axis add_x_axis(Canvas& canvas, const std::vector<PointSeries>& series,
                const std::function<std::string(double)>& format) {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (const PointSeries& one : series) {
    for (const auto& [x, y] : one.points) widen(x, low, high);
  }
  if (!(low < high)) {
    low = std::isfinite(low) ? low : 0.0;
    high = low + 1.0;
  }
  const Axis axis{low, high, canvas.left(), canvas.right()};
  for (const double tick : axis_ticks(low, high, 6)) {
    if (tick < low || tick > high) continue;
    canvas.add(fmt::format(
        "<line class=\"axis\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.1f}\" y2=\"{2:.1f}\"/>\n",
        axis.at(tick), canvas.bottom(), canvas.bottom() + 4));
    canvas.label_at(axis.at(tick), canvas.bottom() + 16, "tick", "middle",
                    format ? format(tick) : fmt::format("{:.4g}", tick));
  }
  return axis;
}

// Those that have a value there: the others leave no gap.
std::vector<const BarSeries*> series_at(const std::vector<BarSeries>& series, std::size_t c) {
  std::vector<const BarSeries*> here;
  for (const BarSeries& one : series) {
    if (c < one.values.size() && std::isfinite(one.values[c])) here.push_back(&one);
  }
  return here;
}

template <typename Series>
std::pair<std::vector<std::string>, std::vector<int>> legend_of(const std::vector<Series>& series) {
  std::pair<std::vector<std::string>, std::vector<int>> legend;
  for (const Series& one : series) {
    legend.first.push_back(one.name);
    legend.second.push_back(one.color);
  }
  return legend;
}

}  // namespace

std::string plot_style() {
  // Okabe and Ito's, without black, and with a yellow that a white page shows; lighter where the
  // page is dark.
  static const char* const kLight[kPlotColors] = {"#0072b2", "#e69f00", "#009e73", "#cc79a7",
                                                  "#d55e00", "#56b4e9", "#b8a800"};
  static const char* const kDark[kPlotColors] = {"#4aa8e0", "#f0b432", "#2cc79b", "#dd98bf",
                                                 "#ee7f33", "#8fd0f5", "#f0e442"};
  const auto variables = [](const char* const* colors) {
    std::string text;
    for (int i = 0; i < kPlotColors; ++i) text += fmt::format("--s{}:{};", i, colors[i]);
    return text;
  };
  std::string style = fmt::format(
      ":root{{--ink:#1c2430;--muted:#5a6675;--grid:#e3e7ec;--page:#fff;{}}}\n"
      "@media(prefers-color-scheme:dark){{:root{{--ink:#e8edf3;--muted:#a3afbd;--grid:#333d49;"
      "--page:#14191f;{}}}}}\n",
      variables(kLight), variables(kDark));
  style +=
      ".plot{max-width:100%;height:auto;font:11px system-ui,sans-serif}\n"
      ".plot .title{font-size:13px;font-weight:600;fill:var(--ink)}\n"
      ".plot .label,.plot .tick{fill:var(--muted)}\n"
      ".plot .grid{stroke:var(--grid)}.plot .axis{stroke:var(--muted)}\n"
      ".plot .reference{stroke:var(--ink);stroke-dasharray:5 4}\n"
      ".plot .whisker{stroke:var(--ink);stroke-width:1.2}\n"
      ".plot polyline{fill:none;stroke-width:2}\n";
  for (int i = 0; i < kPlotColors; ++i)
    style += fmt::format(".plot .s{0}{{fill:var(--s{0})}}.plot .l{0}{{stroke:var(--s{0})}}\n", i);
  return style;
}

std::string escape_html(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&': escaped += "&amp;"; break;
      case '<': escaped += "&lt;"; break;
      case '>': escaped += "&gt;"; break;
      case '"': escaped += "&quot;"; break;
      case '\'': escaped += "&#39;"; break;
      default: escaped += c;
    }
  }
  return escaped;
}

std::vector<double> axis_ticks(double low, double high, int count, bool binary) {
  if (!(high > low)) high = low + 1.0;
  const double raw = (high - low) / count;
  const double unit =
      binary && raw > 1.0 ? std::pow(1024.0, std::floor(std::log2(high - low) / 10.0)) : 1.0;
  const double power = unit * std::pow(10.0, std::floor(std::log10(raw / unit)));
  double step = power;
  for (const double factor : {1.0, 2.0, 2.5, 5.0, 10.0}) {
    step = factor * power;
    if (step >= raw * 0.999) break;
  }
  std::vector<double> ticks;
  const auto first = static_cast<long>(std::floor(low / step + 1e-9));
  for (long i = first;; ++i) {
    ticks.push_back(static_cast<double>(i) * step);
    if (ticks.size() > 1 && ticks.back() >= high * (1.0 - 1e-9)) return ticks;
  }
}

std::string bar_plot(const PlotFrame& frame, const std::vector<std::string>& categories,
                     const std::vector<BarSeries>& series) {
  double low = 0.0, high = 0.0;
  for (const BarSeries& one : series) {
    for (const std::vector<double>* values : {&one.values, &one.high}) {
      for (const double value : *values) widen(value, low, high);
    }
  }
  const double group =
      (frame.width - 80.0) / static_cast<double>(std::max<std::size_t>(1, categories.size()));
  double widest = 0.0;
  for (const std::string& name : categories) widest = std::max(widest, text_width(name));
  const bool slanted = widest > group - 4.0;
  const auto [names, colors] = legend_of(series);
  Canvas canvas(frame, low, high, names, colors, slanted ? 0.7 * widest + 22.0 : 26.0);
  const double room = (canvas.right() - canvas.left()) /
                      static_cast<double>(std::max<std::size_t>(1, categories.size()));
  std::size_t most = 1;  // bars of a category
  for (std::size_t c = 0; c < categories.size(); ++c)
    most = std::max(most, series_at(series, c).size());
  const double width = std::min(34.0, 0.8 * room / static_cast<double>(most));
  for (std::size_t c = 0; c < categories.size(); ++c) {
    const double begin = canvas.left() + room * static_cast<double>(c);
    const double middle = begin + room / 2;
    if (slanted) {
      canvas.add(
          fmt::format("<text class=\"tick\" text-anchor=\"end\" transform=\"translate({:.1f} "
                      "{:.1f}) rotate(-40)\">{}</text>\n",
                      middle + 4, canvas.bottom() + 14, escape_html(categories[c])));
    } else {
      canvas.label_at(middle, canvas.bottom() + 16, "tick", "middle", categories[c]);
    }
    const std::vector<const BarSeries*> here = series_at(series, c);
    double x = middle - width * static_cast<double>(here.size()) / 2;
    for (const BarSeries* one : here) {
      const double value = one->values[c];
      const double from = canvas.y(std::max(value, 0.0)), to = canvas.y(std::min(value, 0.0));
      canvas.add(fmt::format(
          "<rect class=\"s{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\">"
          "<title>{}, {}: {}</title></rect>\n",
          one->color % kPlotColors, x + 1, from, std::max(1.0, width - 2), std::max(0.5, to - from),
          escape_html(categories[c]), escape_html(one->name), escape_html(canvas.label(value))));
      if (c < one->low.size() && c < one->high.size() && std::isfinite(one->low[c]) &&
          std::isfinite(one->high[c])) {
        const double at = x + width / 2, a = canvas.y(one->low[c]), b = canvas.y(one->high[c]);
        canvas.add(
            fmt::format("<path class=\"whisker\" d=\"M{0:.1f} {2:.1f}h6M{1:.1f} {2:.1f}V{3:.1f}"
                        "M{0:.1f} {3:.1f}h6\"/>\n",
                        at - 3, at, a, b));
      }
      x += width;
    }
  }
  return canvas.finish();
}

std::string line_plot(const PlotFrame& frame, const std::vector<PointSeries>& series,
                      const std::function<std::string(double)>& x_format) {
  double low = 0.0, high = 0.0;
  for (const PointSeries& one : series) {
    for (const auto& [x, y] : one.points) widen(y, low, high);
  }
  const auto [names, colors] = legend_of(series);
  Canvas canvas(frame, low, high, names, colors, 26.0);
  const Axis axis = add_x_axis(canvas, series, x_format);
  for (const PointSeries& one : series) {
    std::string points, marks;
    for (const auto& [x, y] : one.points) {
      if (!std::isfinite(y)) continue;
      points += fmt::format("{:.1f},{:.1f} ", axis.at(x), canvas.y(y));
      marks += fmt::format(
          "<circle class=\"s{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"2.5\"><title>{}: {}</title>"
          "</circle>\n",
          one.color % kPlotColors, axis.at(x), canvas.y(y), escape_html(one.name),
          escape_html(canvas.label(y)));
    }
    canvas.add(
        fmt::format("<polyline class=\"l{}\" points=\"{}\"/>\n", one.color % kPlotColors, points));
    if (one.points.size() <= 100) canvas.add(marks);
  }
  return canvas.finish();
}

std::string area_plot(const PlotFrame& frame, const std::vector<PointSeries>& series, bool steps,
                      const std::function<std::string(double)>& x_format) {
  const std::size_t count = series.empty() ? 0 : series.front().points.size();
  std::vector<double> below(count, 0.0), above(count, 0.0);
  double low = 0.0, high = 0.0;
  for (const PointSeries& one : series) {
    for (std::size_t i = 0; i < count; ++i) above[i] += one.points[i].second;
  }
  for (const double value : above) widen(value, low, high);
  const auto [names, colors] = legend_of(series);
  Canvas canvas(frame, low, high, names, colors, 26.0);
  const Axis axis = add_x_axis(canvas, series, x_format);
  for (const PointSeries& one : series) {
    for (std::size_t i = 0; i < count; ++i) above[i] = below[i] + one.points[i].second;
    std::string path;
    const auto edge = [&](const std::vector<double>& values, std::size_t i, bool forward) {
      const double x = axis.at(one.points[i].first);
      const auto add = [&](double to) {
        path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", x, canvas.y(to));
      };
      // With steps a value reaches to the next x, where the line goes up or down.
      if (steps && forward && i > 0) add(values[i - 1]);
      add(values[i]);
      if (steps && !forward && i > 0) add(values[i - 1]);
    };
    for (std::size_t i = 0; i < count; ++i) edge(above, i, true);
    for (std::size_t i = count; i-- > 0;) edge(below, i, false);
    canvas.add(fmt::format("<path class=\"s{}\" d=\"{}Z\"><title>{}</title></path>\n",
                           one.color % kPlotColors, path, escape_html(one.name)));
    below = above;
  }
  return canvas.finish();
}

}  // namespace sherd::cli
