// SPDX-License-Identifier: Apache-2.0
#include <sherd/optim/loss_scaler.h>

#include <sherd/runtime/error.h>

#include <algorithm>
#include <cmath>

namespace sherd {

LossScaler::LossScaler(const LossScaleSettings& settings)
    : settings_(settings), scale_(settings.initial), tolerated_(settings.hysteresis) {
  const auto is_power_of_two = [](double value) {
    int exponent = 0;
    return value > 0.0 && std::isfinite(value) && std::frexp(value, &exponent) == 0.5;
  };
  SHERD_CHECK(is_power_of_two(settings.initial) && settings.initial <= kLargest,
              "--loss-scale: expected auto, or a power of two up to {}, got {}", kLargest,
              settings.initial);
  SHERD_CHECK(is_power_of_two(settings.minimum) && settings.minimum <= settings.initial,
              "--min-loss-scale: expected a power of two up to the scale at the start, {}; got {}",
              settings.initial, settings.minimum);
  SHERD_CHECK(settings.growth_window > 0, "--loss-scale-window: expected 1 or more, got {}",
              settings.growth_window);
  SHERD_CHECK(settings.hysteresis > 0, "--loss-scale-hysteresis: expected 1 or more, got {}",
              settings.hysteresis);
}

void LossScaler::restore(const State& state) {
  if (!settings_.dynamic) return;
  scale_ = std::clamp(state.scale, settings_.minimum, kLargest);
  good_steps_ = std::max<std::int64_t>(state.good_steps, 0);
  tolerated_ = std::clamp<std::int64_t>(state.tolerated, 1, settings_.hysteresis);
}

void LossScaler::good_step() {
  if (!settings_.dynamic || ++good_steps_ < settings_.growth_window) return;
  good_steps_ = 0;
  tolerated_ = settings_.hysteresis;
  scale_ = std::min(2.0 * scale_, kLargest);
}

void LossScaler::overflow() {
  good_steps_ = 0;
  if (tolerated_ > 1) {
    --tolerated_;
    return;
  }
  if (settings_.dynamic) scale_ = std::max(0.5 * scale_, settings_.minimum);
}

bool LossScaler::exhausted() const {
  return tolerated_ <= 1 && (!settings_.dynamic || scale_ <= settings_.minimum);
}

}  // namespace sherd
