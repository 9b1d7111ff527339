// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/nccl_reduce.h>
#include <sherd/runtime/cuda/device_code.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <type_traits>

namespace sherd {
namespace {

using cuda::ceil_div;
using cuda::from_float;
using cuda::to_float;

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 2048;
constexpr int kDepth = 24;  // of the tree of 2^23 ranks

template <typename T>
constexpr bool kNarrow = std::is_same_v<T, f16> || std::is_same_v<T, bf16>;
// What the values of a type are combined in.
template <typename T>
using Wide = std::conditional_t<kNarrow<T>, float, T>;

template <typename T>
__device__ __forceinline__ Wide<T> widen(T value) {
  if constexpr (kNarrow<T>) {
    return to_float(value);
  } else {
    return value;
  }
}
template <typename Result, typename W>
__device__ __forceinline__ Result narrow(W value) {
  if constexpr (kNarrow<Result>) {
    return from_float<Result>(value);
  } else {
    return value;
  }
}

template <typename W>
__device__ __forceinline__ W combine(W left, W right, bool max) {
  if (!max) return static_cast<W>(left + right);
  const bool take = right > left || right != right;  // a NaN stays
  return take ? right : left;
}

template <typename T, typename Result>
struct Reduction {
  const T* own;
  const T* received;
  std::int64_t stride;
  int rank, ranks;
  bool max;
  Wide<T> factor;
  Result* output;
  std::int64_t count;
};

// N neighbouring elements, loaded and stored at once.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T values[N];
};

// Values come in the order of the ranks and are combined as a binary counter carries: after rank r
// as many times as r + 1 has trailing zeros. At the end what is left is combined from the right.
// That is the tree whose left part has the largest power of two below the number of ranks.
template <int N, typename T, typename Result>
__global__ void reduce_kernel(Reduction<T, Result> r) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads * N;
  for (std::int64_t at = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
       at < r.count; at += step) {
    Wide<T> parts[kDepth][N];
    int depth = 0;
    for (int rank = 0; rank < r.ranks; ++rank) {
      const T* source =
          rank == r.rank ? r.own : r.received + r.stride * (rank < r.rank ? rank : rank - 1);
      const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(source + at);
      for (int i = 0; i < N; ++i) parts[depth][i] = widen(pack.values[i]);
      ++depth;
      for (int left = rank + 1; left % 2 == 0; left /= 2) {
        --depth;
        for (int i = 0; i < N; ++i)
          parts[depth - 1][i] = combine(parts[depth - 1][i], parts[depth][i], r.max);
      }
    }
    for (; depth > 1; --depth) {
      for (int i = 0; i < N; ++i)
        parts[depth - 2][i] = combine(parts[depth - 2][i], parts[depth - 1][i], r.max);
    }
    Pack<Result, N> result;
    for (int i = 0; i < N; ++i) {
      Wide<T> value = parts[0][i];
      if constexpr (std::is_floating_point_v<Wide<T>>) value *= r.factor;
      result.values[i] = narrow<Result>(value);
    }
    *reinterpret_cast<Pack<Result, N>*>(r.output + at) = result;
  }
}

template <typename T, typename Result>
void run(Stream& stream, const DeviceSources& sources, void* output, std::int64_t count,
         ReduceOp op) {
  Reduction<T, Result> r{static_cast<const T*>(sources.own),
                         static_cast<const T*>(sources.received),
                         sources.stride,
                         sources.rank,
                         sources.ranks,
                         op == ReduceOp::max,
                         Wide<T>(1),
                         static_cast<Result*>(output),
                         count};
  // A product with one changes nothing, not even a NaN's or a zero's bits.
  if (op == ReduceOp::average) r.factor = Wide<T>(1) / static_cast<Wide<T>>(sources.ranks);
  constexpr int kPack = static_cast<int>(16 / std::max(sizeof(T), sizeof(Result)));
  const auto aligned = [](const void* address, std::size_t width) {
    return reinterpret_cast<std::uintptr_t>(address) % (width * kPack) == 0;
  };
  const bool packs = count % kPack == 0 && sources.stride % kPack == 0 &&
                     aligned(r.own, sizeof(T)) && aligned(r.received, sizeof(T)) &&
                     aligned(output, sizeof(Result));
  const std::int64_t threads = packs ? count / kPack : count;
  const auto blocks =
      static_cast<unsigned>(std::min(kMostBlocks, ceil_div(threads, std::int64_t{kThreads})));
  const auto kernel = packs ? reduce_kernel<kPack, T, Result> : reduce_kernel<1, T, Result>;
  cuda::launch(kernel, dim3(blocks), dim3(kThreads), 0, cuda::native(stream), r);
}

}  // namespace

void reduce_in_tree(Stream& stream, const DeviceSources& sources, void* output, std::int64_t count,
                    DType dtype, DType result, ReduceOp op) {
  SHERD_CHECK(op != ReduceOp::average || is_floating(dtype), "an average of {} is not defined",
              name_of(dtype));
  if (count == 0) return;
  const bool wide = result != dtype;
  SHERD_INTERNAL_CHECK(!wide || (result == DType::f32 && size_of(dtype) == 2),
                       "a reduction of {} to {}", name_of(dtype), name_of(result));
  switch (dtype) {
    case DType::f64: return run<double, double>(stream, sources, output, count, op);
    case DType::f32: return run<float, float>(stream, sources, output, count, op);
    case DType::f16:
      return wide ? run<f16, float>(stream, sources, output, count, op)
                  : run<f16, f16>(stream, sources, output, count, op);
    case DType::bf16:
      return wide ? run<bf16, float>(stream, sources, output, count, op)
                  : run<bf16, bf16>(stream, sources, output, count, op);
    case DType::i64: return run<std::int64_t, std::int64_t>(stream, sources, output, count, op);
    case DType::i32: return run<std::int32_t, std::int32_t>(stream, sources, output, count, op);
    case DType::u8: return run<std::uint8_t, std::uint8_t>(stream, sources, output, count, op);
  }
}

}  // namespace sherd
