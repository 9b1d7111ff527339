// SPDX-License-Identifier: Apache-2.0
// An element in another type, rounded once to nearest-even.
#pragma once

#include <sherd/kernels/arguments/rounding.h>
#include <sherd/kernels/cuda/device.h>

namespace sherd::cuda {

template <typename To>
struct Convert {
  template <typename From>
  __device__ To operator()(From value) const {
    if constexpr (std::is_same_v<From, To>) {
      return value;
    } else if constexpr (sizeof(From) == 2) {
      return from_acc<To>(static_cast<acc_t<To>>(to_float(value)));
    } else if constexpr (sizeof(To) == 2 && std::is_same_v<From, double>) {
      return from_float<To>(arguments::round_to_odd(value));
    } else {
      return from_acc<To>(static_cast<acc_t<To>>(value));
    }
  }
};

}  // namespace sherd::cuda
