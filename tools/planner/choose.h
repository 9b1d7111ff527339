// SPDX-License-Identifier: Apache-2.0
// choose: the settings with which a step runs fastest on a system, among those that fit.
//
// Searched are what changes where state lies and when it travels: the policy and its mesh, what is
// gathered as one, prefetching, recomputation, the micro-batch, offloading. The model, the batch
// and the precision stay.
#pragma once

#include <sherd/tools/planner/planned_step.h>

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace sherd {

struct Choice {
  Assignments changes;  // of the settings that were given
  TrainSettings settings;
  std::int64_t peak_bytes = 0;
  bool fits = false;
  double seconds = 0.0, exposed = 0.0, mfu = 0.0;  // where it fits
  std::string reason;                              // for people
};

struct Choices {
  std::int64_t limit_bytes = 0;  // --memory-limit, or what a device of the system has
  std::int64_t tried = 0;
  std::vector<Choice> ranked;     // that fit, the fastest first
  std::vector<Choice> too_large;  // one for each policy of which nothing fits, the smallest of it
};

// Keys in `fixed` were given by the user and are not changed. Throws where nothing fits, with what
// comes closest.
SHERD_API Choices choose(const TrainSettings& settings, const std::vector<std::string>& fixed,
                         const System& system, int ranks);

// "--shard zero2 --recompute selective"; "as given" where nothing is changed.
SHERD_API std::string changes_text(const Assignments& changes);
// The best `most`, and what did not fit, as a table.
SHERD_API std::string choices_text(const Choices& choices, std::size_t most);
// All of it.
SHERD_API nlohmann::ordered_json choices_json(const Choices& choices);

}  // namespace sherd
