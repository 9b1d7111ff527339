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
  // crowded: the machine has more ranks than cores, so who waits is in the way.
  explicit Backoff(bool crowded) : spins_(crowded ? 20 : 200), yields_(crowded ? 5 : 200) {}

  void pause() {
    ++looks_;
    if (looks_ <= spins_) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else if (looks_ <= spins_ + yields_) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(kSleepMicroseconds));
    }
  }
  // Not sleeping yet.
  bool awake() const {
    return looks_ < spins_ + yields_;
  }
  // Now and then: time for what costs more than a look.
  bool time_for_a_check() const {
    return looks_ % 16 == 0;
  }

 private:
  static constexpr int kSleepMicroseconds = 20;
  int spins_, yields_, looks_ = 0;
};

inline bool is_crowded(int ranks_here) {
  return ranks_here > static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace sherd
