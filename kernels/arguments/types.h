// SPDX-License-Identifier: Apache-2.0
// The parameters of raw kernels, which every backend takes: addresses, sizes and factors, no
// tensors. Headers here are read by all compilers of the tree, nvcc among them.
#pragma once

#include <sherd/runtime/dtype.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace sherd::arguments {

// Arithmetic type of an element type: fp64 for fp64, else fp32.
template <typename T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

}  // namespace sherd::arguments
