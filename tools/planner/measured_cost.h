// SPDX-License-Identifier: Apache-2.0
// MeasuredCosts: seconds of a kernel, product or collective from what a machine was measured to
// take, `sherd bench calibrate`.
//
// The tables are of one number of threads a rank and of ranks that work at once, as the memory's
// bandwidth is shared. Between the points that were measured a rate is interpolated, and beyond
// them that of the nearest holds (Note [Interpolated rates]).
#pragma once

#include <sherd/runtime/schedule.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace sherd {

class SHERD_API MeasuredCosts {
 public:
  // A point as it is written: what was asked for, and the median seconds it took.
  struct Point {
    Work work;
    std::string name;  // that of the work, which refers to it
    double seconds = 0.0;
  };

  MeasuredCosts() = default;
  // Of a system's "measured" the tables that are nearest to this use; `file` is named in errors.
  MeasuredCosts(const nlohmann::ordered_json& measured, int threads, int ranks,
                const std::string& file);

  int ranks() const { return ranks_; }
  int cores() const { return cores_; }

  // Throws where nothing like it was measured.
  double seconds(const Work& work) const;

 private:
  struct Sample {
    double bytes = 0.0, flops = 0.0, m = 0.0, n = 0.0, k = 0.0;  // log2
    double rate = 0.0;  // log of flops, or else bytes, a second
  };
  static std::string key(const Work& work, std::string_view name);
  static Sample sample_of(const Work& work);
  static double amount(const Work& work);

  int ranks_ = 0, cores_ = 0;
  std::string file_;
  std::map<std::string, std::vector<Sample>> tables_;
};

// One entry of "measured", for a file.
SHERD_API nlohmann::ordered_json measured_table(int threads, int ranks,
                                                const std::vector<MeasuredCosts::Point>& points);

}  // namespace sherd
