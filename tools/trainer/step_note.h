// SPDX-License-Identifier: Apache-2.0
// What a trace says of a step, as an instant event right behind it, so that a reader can tell steps
// that may be compared from those that cannot.
#pragma once

#include <sherd/runtime/api.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace sherd {

struct StepNote {
  static constexpr std::string_view kCategory = "step note";

  std::int64_t step = 0, samples = 0;  // its number from 0; of the global batch
  bool first = false;                  // of this program: memory is taken from the system
  bool graph = false;                  // captured or replayed
  bool skipped = false;                // gradients overflowed, there was no update
  bool operator==(const StepNote&) const = default;
};

// "step 12: 64 samples, graph"
SHERD_API std::string to_text(const StepNote& note);
SHERD_API std::optional<StepNote> step_note_from_text(std::string_view text);

}  // namespace sherd
