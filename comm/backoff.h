// SPDX-License-Identifier: Apache-2.0
// How a rank waits for other processes: at first it looks again at once, then it lets other threads
// of this core run, then it sleeps. So ranks that have a core each meet within a microsecond, and
// eight ranks on two cores do not take the time of the rank they wait for. comm/README.md has the
// measurements behind the numbers.
#pragma once

#include <sched.h>

#include <chrono>
#include <thread>

namespace sherd {

class Backoff {
 public:
  void pause() {
    ++looks_;
    if (looks_ <= kSpins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else if (looks_ <= kSpins + kYields) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(kSleepMicroseconds));
    }
  }
  // Now and then: time for what costs more than a look.
  bool time_for_a_check() const {
    return looks_ % 16 == 0;
  }

 private:
  static constexpr int kSpins = 200, kYields = 200, kSleepMicroseconds = 50;
  int looks_ = 0;
};

}  // namespace sherd
