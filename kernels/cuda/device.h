// SPDX-License-Identifier: Apache-2.0
// What kernel sources are written against: device code (runtime/cuda/device_code.h), and the
// arithmetic types of the kernels' arguments.
#pragma once

#include <sherd/kernels/arguments/types.h>
#include <sherd/runtime/cuda/device_code.h>

namespace sherd::cuda {

using arguments::acc_t;

template <typename T>
__device__ __forceinline__ acc_t<T> to_acc(T value) {
  if constexpr (sizeof(T) == 2) {
    return to_float(value);
  } else {
    return value;
  }
}
template <typename T>
__device__ __forceinline__ T from_acc(acc_t<T> value) {
  if constexpr (sizeof(T) == 2) {
    return from_float<T>(value);
  } else {
    return value;
  }
}

}  // namespace sherd::cuda
