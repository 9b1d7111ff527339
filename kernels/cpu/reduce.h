// SPDX-License-Identifier: Apache-2.0
// Reductions of a contiguous array of n elements of T = double, float, bf16 or f16 to one number.
// Sums are taken over blocks of kReduceBlock elements, and the blocks added in a fixed pairwise
// tree: the bits depend on n alone, not on the thread count.
#pragma once

#include <sherd/kernels/cpu/simd.h>

#include <cstddef>

namespace sherd::cpu {

inline constexpr std::int64_t kReduceBlock = 4096;

// Bytes of workspace for sum: one number a block.
template <typename T>
std::size_t reduce_workspace_bytes(std::int64_t n);

template <typename T>
acc_t<T> sum(int threads, std::int64_t n, const T* in, acc_t<T>* workspace);

// The index of the first element that is infinite or NaN, or -1.
template <typename T>
std::int64_t first_non_finite(int threads, std::int64_t n, const T* in);

}  // namespace sherd::cpu
