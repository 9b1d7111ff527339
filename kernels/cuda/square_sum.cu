// SPDX-License-Identifier: Apache-2.0
// Sums of squares without rounding, so without an order.
//
// Note [Exact sums on a GPU]
// A warp cuts the squares of a chunk of elements into two slices, each an exact sum of multiples of
// a power of two: Note [Exact block sums] in runtime/exact_sum.cpp, where the same is done on the
// processor. The slices lie below the chunk's largest square and take kWindow bits; an element so
// much smaller that its square does not end inside them, which is rare, is left out of the slices
// and added digit by digit. What the slices' sums and such elements add up to are digits of 32 bits
// in words of 64, in shared memory for a block and then in the caller's: integers, whose sum no
// order of atomic additions changes.
#include <sherd/kernels/cuda/reduce.h>
#include <sherd/kernels/cuda/vector.h>
#include <sherd/runtime/exact_sum.h>

#include <algorithm>

namespace sherd::cuda {
namespace {

using Word = unsigned long long;
static_assert(sizeof(Word) == sizeof(std::int64_t));

constexpr int kDigits = ExactSum::kDigits;  // then the count of elements that are not finite
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr std::int64_t kMostBlocks = 1056;  // for the largest GPUs
constexpr int kMinExponent = -1074;         // of the smallest subnormal

// Elements of a chunk that a thread takes.
template <typename T>
constexpr int kPerThread = sizeof(T) == 8 ? 16 : 32;
constexpr int kSliceBits = 50 - 5;              // s in the note, for up to 2^5 elements
constexpr int kMaxExponent = 971 + kSliceBits;  // above, 1.5 * 2^(52 + g) would overflow

// Adds +-magnitude * 2^exponent.
__device__ void add_scaled(Word* words, Word magnitude, bool negative, int exponent) {
  const int position = exponent - kMinExponent;
  const int digit = position / 32, shift = position % 32;
  const auto put = [&](int at, Word bits) {
    if (bits != 0) atomicAdd(words + at, negative ? ~bits + 1 : bits);
  };
  put(digit, magnitude << shift & 0xffffffffu);
  put(digit + 1, magnitude >> (32 - shift) & 0xffffffffu);
  put(digit + 2, magnitude >> 32 >> (32 - shift));
}

// Adds a double that is not negative.
__device__ void add_number(Word* words, double value) {
  const Word bits = static_cast<Word>(__double_as_longlong(value));
  const int exponent = static_cast<int>(bits >> 52 & 0x7ff);
  if (exponent == 0x7ff) {
    atomicAdd(words + kDigits, Word{1});
    return;
  }
  const Word mantissa = bits & 0xfffffffffffffu;
  add_scaled(words, exponent != 0 ? mantissa | Word{1} << 52 : mantissa, false,
             (exponent != 0 ? exponent : 1) + kMinExponent - 1);
}

// 1.5 * 2^(52 + exponent), whose unit in the last place is 2^exponent.
__device__ __forceinline__ double slice_start(int exponent) {
  return __longlong_as_double(static_cast<long long>(exponent + 52 + 1023) << 52 | 1LL << 51);
}

// What squares are ordered by, as bits: an fp32 (or what is widened to it) by its own magnitude, an
// fp64 by its square.
__device__ __forceinline__ unsigned rank_of(float x) {
  return __float_as_uint(x) & 0x7fffffffu;
}
__device__ __forceinline__ Word rank_of(double x) {
  return static_cast<Word>(__double_as_longlong(x * x)) & ~(Word{1} << 63);  // a NaN's sign too
}
__device__ __forceinline__ double square_of_rank(unsigned rank) {
  const double x = __uint_as_float(rank);
  return x * x;
}
__device__ __forceinline__ double square_of_rank(Word rank) {
  return __longlong_as_double(static_cast<long long>(rank));
}

// From this rank on squares are multiples of 2^unit. (So are some below it: subnormals, which are
// rare, or those that end in zeros.)
__device__ __forceinline__ unsigned least_rank(int unit, unsigned) {
  // x in [2^e, 2^(e+1)) is a multiple of 2^(e-23), and its square of 2^(2e-46).
  const int exponent = (unit + 46 + 1) >> 1;  // rounded up
  return static_cast<unsigned>(exponent > -126 ? exponent + 127 : 1) << 23;
}
__device__ __forceinline__ Word least_rank(int unit, Word) {
  return unit == kMinExponent ? 1 : static_cast<Word>(unit - kMinExponent + 1) << 52;
}

__device__ __forceinline__ long long bits_between(double from, double to) {
  return __double_as_longlong(to) - __double_as_longlong(from);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_squares(std::int64_t n, const T* in, bool whole, Word* words) {
  constexpr int kPiece = kVector<T>, kPieces = kPerThread<T> / kPiece;
  constexpr std::int64_t kChunk = kWarp * kPerThread<T>;
  SHERD_SHARED(Word, sums, kDigits + 1);
  for (int i = threadIdx.x; i <= kDigits; i += kThreads) sums[i] = 0;
  __syncthreads();

  const int lane = threadIdx.x % kWarp;
  const std::int64_t step = std::int64_t{gridDim.x} * kWarps * kChunk;
  std::int64_t begin = (std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kChunk;
  for (; begin < n; begin += step) {
    uint4 pieces[kPieces];
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const std::int64_t at = begin + (k * kWarp + lane) * kPiece;
      pieces[k] = load_piece(in, at, n, whole && at + kPiece <= n);
    }
    using Rank = decltype(rank_of(acc_t<T>()));
    Rank largest = 0;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      acc_t<T> x[kPiece];
      unpack<T>(pieces[k], x);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        const Rank rank = rank_of(x[i]);
        largest = rank > largest ? rank : largest;
      }
    }
    largest = warp_max(largest);
    if (largest == 0) continue;
    // The least E, but at least -1022, so that all squares are below 2^E.
    const int above =
        static_cast<int>(__double_as_longlong(square_of_rank(largest)) >> 52 & 0x7ff) - 1022;
    Rank least = ~Rank{0};  // that the slices take: none where a number is huge, infinite or NaN
    bool some = true;       // of this thread's elements may be below it
    if (above <= kMaxExponent) {
      const int high_unit = above - kSliceBits;
      const int low_unit =
          high_unit - 1 - kSliceBits > kMinExponent ? high_unit - 1 - kSliceBits : kMinExponent;
      least = least_rank(low_unit, Rank{});
      some = false;
      const double high_start = slice_start(high_unit), low_start = slice_start(low_unit);
      double high = high_start, low = low_start;
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        acc_t<T> x[kPiece];
        unpack<T>(pieces[k], x);
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
          const Rank rank = rank_of(x[i]);
          some |= rank - 1 < least - 1;  // and not 0
          const double square = rank >= least ? square_of_rank(rank) : 0.0;
          const double high_next = high + square;
          low += square - (high_next - high);
          high = high_next;
        }
      }
      const long long high_count = warp_sum(bits_between(high_start, high));
      const long long low_count = warp_sum(bits_between(low_start, low));
      if (lane < 2) {
        const long long count = lane == 0 ? high_count : low_count;
        add_scaled(sums, static_cast<Word>(count < 0 ? -count : count), count < 0,
                   lane == 0 ? high_unit : low_unit);
      }
    }
    // Elements below the slices, which few threads see. They are read again, for a loop that is not
    // unrolled cannot index registers.
    if (!some) continue;
#pragma unroll 1
    for (int k = 0; k < kPerThread<T>; ++k) {
      const std::int64_t at = begin + (k / kPiece * kWarp + lane) * kPiece + k % kPiece;
      if (at >= n) continue;
      const Rank rank = rank_of(to_acc(in[at]));
      if (rank - 1 < least - 1) add_number(sums, square_of_rank(rank));
    }
  }

  __syncthreads();
  // Carries first, so that blocks and calls add less than 2^32 to a word.
  if (threadIdx.x == 0) {
    long long carry = 0;  // none beyond the last digit, as in ExactSum
    for (int i = 0; i < kDigits; ++i) {
      const long long digit = static_cast<long long>(sums[i]) + carry;
      sums[i] = static_cast<Word>(digit & 0xffffffff);
      carry = digit >> 32;  // rounds down, so that what stays is not negative
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i <= kDigits; i += kThreads) {
    if (sums[i] != 0) atomicAdd(words + i, sums[i]);
  }
}

}  // namespace

template <typename T>
void add_square_words(Stream& stream, std::int64_t n, const T* in, std::int64_t* words) {
  if (n == 0) return;
  const std::int64_t blocks = std::min(kMostBlocks, ceil_div(n, kThreads * kPerThread<T>));
  launch(add_squares<T>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, native(stream), n,
         in, is_aligned({in}), reinterpret_cast<Word*>(words));
}

template void add_square_words<double>(Stream&, std::int64_t, const double*, std::int64_t*);
template void add_square_words<float>(Stream&, std::int64_t, const float*, std::int64_t*);
template void add_square_words<bf16>(Stream&, std::int64_t, const bf16*, std::int64_t*);
template void add_square_words<f16>(Stream&, std::int64_t, const f16*, std::int64_t*);

}  // namespace sherd::cuda
