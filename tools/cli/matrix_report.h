// SPDX-License-Identifier: Apache-2.0
// The page that shows a matrix: one HTML file with its tables and plots inside.
#pragma once

#include "bench_matrix.h"

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace sherd::cli {

struct MatrixReport {
  MatrixOptions options;
  nlohmann::ordered_json
      settings;  // by name, for the page's header: machine, builds, rules' numbers
  std::vector<CellSummary> summaries;
  std::vector<LeftOut> left_out;  // points of the matrix, and peers that are not here
};

std::string matrix_html(const MatrixReport& report);
nlohmann::ordered_json matrix_json(const MatrixReport& report);

}  // namespace sherd::cli
