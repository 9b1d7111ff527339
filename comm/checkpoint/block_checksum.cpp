// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/checkpoint/block_checksum.h>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // g++ 12 in its own AVX-512 headers, bug 105593
#endif
#define XXH_INLINE_ALL  // with this machine's vectors: the library on it is compiled for any
#include <xxhash.h>

namespace sherd {

struct BlockChecksum::State {
  XXH3_state_t xxh3;
};

BlockChecksum::BlockChecksum() : state_(std::make_unique<State>()) {
  XXH3_64bits_reset(&state_->xxh3);
}

BlockChecksum::~BlockChecksum() = default;

void BlockChecksum::add(std::span<const std::uint8_t> part) {
  XXH3_64bits_update(&state_->xxh3, part.data(), part.size());
  bytes_ += part.size();
}

std::uint64_t BlockChecksum::take() {
  const std::uint64_t sum = XXH3_64bits_digest(&state_->xxh3);
  XXH3_64bits_reset(&state_->xxh3);
  bytes_ = 0;
  return sum;
}

std::uint64_t BlockChecksum::of(std::span<const std::uint8_t> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace sherd
