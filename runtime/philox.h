// SPDX-License-Identifier: Apache-2.0
// Counter-based random numbers (Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011).
//
// A random number is a pure function of (seed, purpose, name, index), never of a rank, a worker or
// the order of calls. So initial weights, dropout and data order do not depend on how many ranks or
// threads there are, and a rank can draw just the elements that it owns.
#pragma once

#include <sherd/runtime/api.h>

#include <array>
#include <cstdint>
#include <string_view>

namespace sherd {

// Four 32-bit words from a 128-bit counter and a 64-bit key.
constexpr std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                                  std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t first = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t second = std::uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<std::uint32_t>(second >> 32) ^ counter[1] ^ key[0],
               static_cast<std::uint32_t>(second),
               static_cast<std::uint32_t>(first >> 32) ^ counter[3] ^ key[1],
               static_cast<std::uint32_t>(first)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

// Block `index` of the stream with this key and step (see RandomStream). Kernels call it too, hence
// constexpr.
constexpr std::array<std::uint32_t, 4> random_block(std::uint64_t key, std::uint64_t step,
                                                    std::uint64_t index) {
  return philox4x32({static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
                     static_cast<std::uint32_t>(step), static_cast<std::uint32_t>(step >> 32)},
                    {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)});
}

// An endless sequence of numbers addressed by index.
class SHERD_API RandomStream {
 public:
  // purpose: what the numbers are for ("init", "dropout", "order"); name: whose they are (a
  // parameter's name, a layer's). `step` separates repeated uses, such as one per training step.
  RandomStream(std::uint64_t seed, std::string_view purpose, std::string_view name,
               std::uint64_t step = 0);

  std::uint64_t key() const { return key_; }
  std::uint64_t step() const { return step_; }

  // Word i is lane i % 4 of the block at counter {i / 4, step}.
  std::array<std::uint32_t, 4> block(std::uint64_t block_index) const {
    return random_block(key_, step_, block_index);
  }
  std::uint32_t word(std::uint64_t index) const { return block(index / 4)[index % 4]; }
  double uniform(std::uint64_t index) const;  // in (0, 1), 52 bits; uses words 2i and 2i + 1
  double normal(std::uint64_t index) const;   // standard normal, by inverse distribution function
  std::uint64_t below(std::uint64_t index, std::uint64_t bound) const;  // in [0, bound)

 private:
  std::uint64_t key_ = 0;
  std::uint64_t step_ = 0;
};

// The standard normal distribution function and its inverse (Wichura, algorithm AS 241, 1988).
SHERD_API double normal_cdf(double x);
SHERD_API double normal_quantile(double probability);

}  // namespace sherd
