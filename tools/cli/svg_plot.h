// SPDX-License-Identifier: Apache-2.0
// Plots as inline SVG: grouped bars, and lines or stacked areas over a number. They need no script
// and nothing from elsewhere; their colours are CSS variables that plot_style() gives for light and
// for dark pages, from a palette that colour-blind readers can tell apart (Okabe and Ito, 2008).
//
// Sizes are in pixels; a plot shrinks with its column and keeps its shape. A value that is not
// finite is not drawn. Every mark has a title that a pointer shows.
#pragma once

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace sherd::cli {

// The CSS of all plots of a page, once, inside its <style>.
std::string plot_style();

// Text as HTML and SVG must have it: & < > " ' are escaped.
std::string escape_html(const std::string& text);

// How many colours there are; a plot's series of a higher number begins again from the first.
inline constexpr int kPlotColors = 7;

struct PlotFrame {
  std::string title, x_label, y_label;
  int width = 560, height = 300;
  std::function<std::string(double)> format;  // of values; empty: up to 5 significant digits
  // The top of the axis; NaN: by the values. It begins at 0 where none is below.
  double top = std::numeric_limits<double>::quiet_NaN();
  bool binary = false;  // values are bytes: the axis has round numbers of KiB, MiB, GiB
  // Dashed, its value at the right end and its label in the legend: what others measured, a limit.
  struct Line {
    double value;
    std::string label;
  };
  std::vector<Line> reference_lines;
};

struct BarSeries {
  std::string name;
  int color = 0;
  std::vector<double> values;     // one a category
  std::vector<double> low, high;  // of whiskers; empty: none
};
// Side by side in every category.
std::string bar_plot(const PlotFrame& frame, const std::vector<std::string>& categories,
                     const std::vector<BarSeries>& series);

struct PointSeries {
  std::string name;
  int color = 0;
  std::vector<std::pair<double, double>> points;  // x must not decrease
};
// `x_format`: as frame.format, of the horizontal axis.
std::string line_plot(const PlotFrame& frame, const std::vector<PointSeries>& series,
                      const std::function<std::string(double)>& x_format = {});
// Each on top of those before it, all at the same x; steps: a value holds until the next x.
std::string area_plot(const PlotFrame& frame, const std::vector<PointSeries>& series,
                      bool steps = false, const std::function<std::string(double)>& x_format = {});

// Round numbers from `low` or below to at or above `high`, about `count` of them; with `binary`
// they are round in the largest power of 1024 that fits.
std::vector<double> axis_ticks(double low, double high, int count, bool binary = false);

}  // namespace sherd::cli
