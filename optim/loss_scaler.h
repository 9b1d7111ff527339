// SPDX-License-Identifier: Apache-2.0
// Dynamic loss scaling for fp16 (Micikevicius et al., Mixed precision training, 2018). Gradients
// below 6e-8 vanish in fp16, so backward starts from `scale` instead of 1 and the update divides by
// it. The scale is as large as it may be without overflow: it doubles after a window of good steps,
// and halves when a step overflows, which is then skipped. It stays a power of two, so that it
// changes the range of gradients and not their digits.
#pragma once

#include <sherd/runtime/api.h>

#include <cstdint>

namespace sherd {

struct LossScaleSettings {
  bool dynamic = true;                // false: stays at `initial`
  double initial = 65536.0;           // a power of two, as `minimum`
  double minimum = 1.0;               // an overflow there is an error
  std::int64_t growth_window = 1000;  // good steps in a row before the scale doubles
  std::int64_t hysteresis = 1;        // overflows before it halves; counted anew after a doubling
};

class SHERD_API LossScaler {
 public:
  explicit LossScaler(const LossScaleSettings& settings);  // throws on settings without sense

  double scale() const { return scale_; }
  // What a checkpoint keeps.
  struct State {
    double scale = 0.0;
    std::int64_t good_steps = 0, tolerated = 0;
  };
  State state() const { return {scale_, good_steps_, tolerated_}; }
  // Goes on from there, within what the settings allow: a fixed scale stays as it is.
  void restore(const State& state);
  // A step was good, or overflowed and was skipped.
  void good_step();
  void overflow();
  // Another overflow could not be answered by a lower scale.
  bool exhausted() const;

 private:
  static constexpr double kLargest = 16777216.0;  // 2^24
  LossScaleSettings settings_;
  double scale_;
  std::int64_t good_steps_ = 0, tolerated_;
};

}  // namespace sherd
