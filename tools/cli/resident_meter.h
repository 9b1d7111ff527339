// SPDX-License-Identifier: Apache-2.0
// The largest resident memory of this process while steps run, as the system counts it.
#pragma once

#include <cstdint>

namespace sherd::cli {

// Where the system cannot begin its count anew (not Linux, or not allowed), what was held before
// counts too. Ranks that are threads share a process: each may have a meter, and they must be
// paused and resumed with a barrier between.
class ResidentMeter {
 public:
  void resume();  // what is held from now on counts
  void pause();   // what comes now does not
  std::int64_t peak_bytes() const { return peak_; }

 private:
  std::int64_t peak_ = 0;
};

}  // namespace sherd::cli
