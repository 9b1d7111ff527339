// SPDX-License-Identifier: Apache-2.0
// The words of a RandomStream sixteen blocks at a time, bit for bit RandomStream::word.
#pragma once

#include <sherd/kernels/cpu/simd.h>
#include <sherd/runtime/philox.h>

namespace sherd::cpu {

// Words asked for at once, and the room they need: a chunk may begin inside a block, and whole
// groups of sixteen blocks are made.
inline constexpr int kRandomChunk = 512;
inline constexpr int kRandomRoom = kRandomChunk + 64;

namespace detail {
typedef std::uint64_t U64x8 __attribute__((vector_size(64)));

// Product of the low halves of each lane.
SHERD_INLINE U64x8 multiply_low_halves(U64x8 a, std::uint32_t b) {
#if defined(__AVX512F__)
  // (g++ 12 warns about the unmasked form.)
  return (U64x8)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
  for (int half = 0; half < 2; ++half) {
    __m256i part;
    std::memcpy(&part, reinterpret_cast<const char*>(&a) + 32 * half, sizeof part);
    part = _mm256_mul_epu32(part, _mm256_set1_epi64x(b));
    std::memcpy(reinterpret_cast<char*>(&a) + 32 * half, &part, sizeof part);
  }
  return a;
#else
  return (a & 0xffffffffu) * std::uint64_t{b};
#endif
}

// Eight blocks, a counter word in the low half of each 64-bit lane. The high halves hold leftovers:
// the products ignore them and the exclusive ors keep the halves apart.
SHERD_INLINE void philox_blocks8(const RandomStream& stream, std::uint64_t first_block,
                                 std::uint32_t* words) {
  const U64x8 block = U64x8{0, 1, 2, 3, 4, 5, 6, 7} + first_block;
  U64x8 c0 = block, c1 = block >> 32;
  U64x8 c2 = U64x8{} + stream.step(), c3 = U64x8{} + (stream.step() >> 32);
  auto k0 = static_cast<std::uint32_t>(stream.key());
  auto k1 = static_cast<std::uint32_t>(stream.key() >> 32);
  for (int round = 0; round < 10; ++round) {
    const U64x8 first = multiply_low_halves(c0, 0xD2511F53u);
    const U64x8 second = multiply_low_halves(c2, 0xCD9E8D57u);
    c0 = (second >> 32) ^ c1 ^ std::uint64_t{k0};
    c1 = second;
    c2 = (first >> 32) ^ c3 ^ std::uint64_t{k1};
    c3 = first;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const U64x8 low = (c0 & 0xffffffffu) | (c1 << 32);   // words 0 and 1 of each block
  const U64x8 high = (c2 & 0xffffffffu) | (c3 << 32);  // words 2 and 3
  const U64x8 out[2] = {__builtin_shufflevector(low, high, 0, 8, 1, 9, 2, 10, 3, 11),
                        __builtin_shufflevector(low, high, 4, 12, 5, 13, 6, 14, 7, 15)};
  std::memcpy(words, out, sizeof out);
}
}  // namespace detail

// Words first ... first + count - 1 of the stream, count <= kRandomChunk. They lie in `room`
// (kRandomRoom words) from the returned place on.
inline const std::uint32_t* random_words(const RandomStream& stream, std::uint64_t first, int count,
                                         std::uint32_t* room) {
  const auto skipped = static_cast<int>(first % 4);
  const std::uint64_t block = first / 4;
  for (int word = 0; word < skipped + count; word += 64) {
    detail::philox_blocks8(stream, block + static_cast<std::uint64_t>(word / 4), room + word);
    detail::philox_blocks8(stream, block + static_cast<std::uint64_t>(word / 4 + 8),
                           room + word + 32);
  }
  return room + skipped;
}

}  // namespace sherd::cpu
