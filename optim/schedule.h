// SPDX-License-Identifier: Apache-2.0
// Learning-rate schedules, per iteration: a linear warm-up, then a decay to min_lr.
#pragma once

#include <sherd/runtime/api.h>

#include <cstdint>
#include <string_view>

namespace sherd {

enum class Decay : std::uint8_t { constant, linear, cosine };

SHERD_API std::string_view name_of(Decay decay);
SHERD_API Decay decay_from_name(std::string_view name);  // throws on an unknown name

// At step s (from 0): base_lr (s + 1) / warmup_steps during the warm-up; after it, with
// t = (s - warmup_steps) / (total_steps - warmup_steps),
//   cosine  min_lr + (base_lr - min_lr) (1 + cos πt) / 2   (Loshchilov and Hutter, SGDR, 2017)
//   linear  base_lr + (min_lr - base_lr) t
struct LrSchedule {
  double base_lr = 1e-3, min_lr = 0.0;
  std::int64_t warmup_steps = 0, total_steps = 1;
  Decay decay = Decay::cosine;

  SHERD_API void validate() const;  // throws on settings that contradict each other
  SHERD_API double at(std::int64_t step) const;
};

}  // namespace sherd
