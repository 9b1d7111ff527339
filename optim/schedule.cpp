// SPDX-License-Identifier: Apache-2.0
#include <sherd/optim/schedule.h>

#include <sherd/runtime/error.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace sherd {

std::string_view name_of(Decay decay) {
  switch (decay) {
    case Decay::constant: return "constant";
    case Decay::linear: return "linear";
    case Decay::cosine: return "cosine";
  }
  fail("name_of: unknown decay {}", static_cast<int>(decay));
}

Decay decay_from_name(std::string_view name) {
  for (const Decay decay : {Decay::constant, Decay::linear, Decay::cosine}) {
    if (name_of(decay) == name) return decay;
  }
  fail("unknown schedule '{}': expected cosine, linear or constant", name);
}

void LrSchedule::validate() const {
  SHERD_CHECK(min_lr >= 0.0 && min_lr <= base_lr && std::isfinite(base_lr),
              "schedule: expected 0 <= min lr <= lr, got min lr {} and lr {}", min_lr, base_lr);
  SHERD_CHECK(total_steps > 0 && warmup_steps >= 0 && warmup_steps <= total_steps,
              "schedule: a warm-up of {} steps does not fit into {} steps", warmup_steps,
              total_steps);
}

double LrSchedule::at(std::int64_t step) const {
  if (step < warmup_steps) {
    return base_lr * static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
  }
  const double t =
      std::min(1.0, static_cast<double>(step - warmup_steps) /
                        static_cast<double>(std::max<std::int64_t>(1, total_steps - warmup_steps)));
  switch (decay) {
    case Decay::constant: return base_lr;
    case Decay::linear: return base_lr + (min_lr - base_lr) * t;
    case Decay::cosine:
      return min_lr + (base_lr - min_lr) * 0.5 * (1.0 + std::cos(std::numbers::pi * t));
  }
  fail("schedule: unknown decay {}", static_cast<int>(decay));
}

}  // namespace sherd
