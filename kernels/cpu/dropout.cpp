// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/dropout.h>
#include <sherd/kernels/cpu/elementwise.h>
#include <sherd/kernels/cpu/philox_vector.h>
#include <sherd/kernels/cpu/vector_loop.h>

namespace sherd::cpu {
namespace {

// Lanes whose word is at most `limit`. The comparison is of signed numbers (all that AVX2 has), so
// both sides are moved down by 2^31.
template <typename T>
SHERD_INLINE Mask<T> words_up_to(const std::uint32_t* words, std::uint32_t limit) {
  typedef std::int32_t Words __attribute__((vector_size(kLanes<T> * 4)));
  Words word;
  std::memcpy(&word, words, sizeof word);
  const auto moved = static_cast<std::int32_t>(limit ^ 0x80000000u);
  return __builtin_convertvector((word ^ INT32_MIN) <= moved, Mask<T>);
}

}  // namespace

template <typename T>
void dropout(int threads, std::int64_t n, const T* in, T* out, double keep_probability,
             const RandomStream& stream, std::uint64_t first_index) {
  const arguments::DropoutRule rule = arguments::dropout_rule(keep_probability);
  if (!rule.any) return fill<T>(threads, n, 0, out);
  const std::uint32_t limit = rule.limit;
  const auto factor = static_cast<acc_t<T>>(1 / keep_probability);
  parallel_blocks(threads, n, kElementwiseBlock / 4, [&](std::int64_t begin, std::int64_t end) {
    // The last vector of a chunk compares whole vectors of words: room for the ones past its end.
    std::uint32_t room[kRandomRoom + kLanes<T>] = {};
    for (std::int64_t at = begin; at < end; at += kRandomChunk) {
      const auto size = static_cast<int>(std::min<std::int64_t>(kRandomChunk, end - at));
      // Making the words takes as long as fetching the numbers: do both at once.
      constexpr int kLine = 64 / static_cast<int>(sizeof(T));
      for (int i = 0; i < size; i += kLine) {
        __builtin_prefetch(in + at + i);
        __builtin_prefetch(out + at + i, 1);
      }
      const std::uint32_t* const words =
          random_words(stream, first_index + static_cast<std::uint64_t>(at), size, room);
      for_each_vector<T>(
          size, [=](std::int64_t i, int count) __attribute__((always_inline)) {
            const Vec<T> scaled = load<T>(in + at + i, count) * factor;
            store<T>(out + at + i, keep<T>(words_up_to<T>(words + i, limit), scaled), count);
          });
    }
  });
}

#define SHERD_INSTANTIATE(T)                                                             \
  template void dropout<T>(int, std::int64_t, const T*, T*, double, const RandomStream&, \
                           std::uint64_t);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cpu
