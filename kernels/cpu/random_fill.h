// SPDX-License-Identifier: Apache-2.0
// Random numbers for initialisation, of T = double, float, bf16 or f16. Element i of `out` ('=') is
// a function of the stream and first_index + i alone, so a rank fills just the shard that it owns.
// Numbers are computed in fp64 from RandomStream::uniform's number and rounded to T: every element
// type is given the same weights.
#pragma once

#include <sherd/kernels/cpu/simd.h>
#include <sherd/runtime/philox.h>

namespace sherd::cpu {

// Uniform in (low, high).
template <typename T>
void fill_uniform(int threads, std::int64_t n, T* out, const RandomStream& stream,
                  std::uint64_t first_index, double low, double high);

// Normal, by the inverse distribution function (1e-15 of RandomStream::normal).
template <typename T>
void fill_normal(int threads, std::int64_t n, T* out, const RandomStream& stream,
                 std::uint64_t first_index, double mean, double std);

// Normal limited to [low, high] (absolute bounds, not in units of std), as timm's trunc_normal_:
// the inverse distribution function of a uniform number between the bounds' probabilities.
struct TruncatedNormal {
  double mean = 0;
  double std = 1;
  double low = -2;
  double high = 2;
};
template <typename T>
void fill_truncated_normal(int threads, std::int64_t n, T* out, const RandomStream& stream,
                           std::uint64_t first_index, const TruncatedNormal& distribution);

}  // namespace sherd::cpu
