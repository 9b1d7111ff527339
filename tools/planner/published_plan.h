// SPDX-License-Identifier: Apache-2.0
// What the simulator says of published measurements (published.h), beside them.
#pragma once

#include <sherd/tools/planner/published.h>

#include <string>
#include <vector>

namespace sherd {

struct PublishedResult {
  const PublishedCase* published = nullptr;
  double step_seconds = 0.0;
  double exposed_seconds = 0.0;  // of communication
  double figure = 0.0;           // in the unit of the case, or the ratio
  double error = 0.0;            // of it, as a part of the published one; 0 where none is
  // What is left of it where the figure is scaled by what all other cases on the same system are
  // off by: how well cases are told apart. Of ratios the error itself.
  double relative_error = 0.0;
  double peak_gib = 0.0;  // of a rank, by Sherd's step
};

// Runs the case's step on paper and places it in time on the case's system. Throws for a case that
// waits for something.
SHERD_API PublishedResult plan_published(const PublishedCase& published);

struct PublishedSummary {
  std::vector<PublishedResult> results;
  std::vector<const PublishedCase*> waiting;
  double mean_error = 0.0, mean_relative_error = 0.0;  // of the absolute values
};
SHERD_API PublishedSummary plan_published_cases();

SHERD_API std::string to_text(const PublishedSummary& summary);

}  // namespace sherd
