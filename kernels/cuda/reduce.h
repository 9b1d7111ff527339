// SPDX-License-Identifier: Apache-2.0
// Reductions of a contiguous array of n elements of T = double, float, bf16 or f16 to one number,
// which stays on the device.
#pragma once

#include <sherd/kernels/arguments/types.h>

namespace sherd {

class Stream;

namespace cuda {

using arguments::acc_t;

inline constexpr std::int64_t kReduceBlock = 8192;

// Bytes of workspace for sum: one number a block of kReduceBlock elements.
template <typename T>
constexpr std::size_t reduce_workspace_bytes(std::int64_t n) {
  return static_cast<std::size_t>((n + kReduceBlock - 1) / kReduceBlock) * sizeof(acc_t<T>);
}

// out '=' [1], factor * sum of all elements, in a tree that depends on n and the type alone.
template <typename T>
void sum(Stream& stream, std::int64_t n, const T* in, acc_t<T> factor, acc_t<T>* out,
         acc_t<T>* workspace);

// index '=' [1]: of the first element that is infinite or NaN, or -1.
template <typename T>
void first_non_finite(Stream& stream, std::int64_t n, const T* in, std::int64_t* index);

// Adds the squares of all elements to an ExactSum's words (runtime/exact_sum.h) on the device, in
// any order to the same words but for carries: exact, and as ExactSum::add_squares rounds fp64.
// Words that began as zeros, or normal, take 2^18 calls before ExactSum::from_words must read them.
template <typename T>
void add_square_words(Stream& stream, std::int64_t n, const T* in, std::int64_t* words);

}  // namespace cuda
}  // namespace sherd
