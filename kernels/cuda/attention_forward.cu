// SPDX-License-Identifier: Apache-2.0
// Note [Attention on tensor cores, forward]
// FlashAttention-2 (Dao, 2023). A block takes 128 queries of a head: each of 4 warps two slices of
// 16, so that a fragment of K or V read from shared memory serves two products; with one slice a
// warp, reading shared memory would take as long as the products do. Keys come in tiles of 64,
// copied while the tile before is worked on, with one barrier a tile. Softmax is online and in base
// 2: the factor scale * log2(e) goes into the exponent's multiply-add.
//
// Lengths of Vision Transformers (197, 257) are little more than a multiple of a tile. So nothing
// is rounded up to more than 16: a warp whose second slice (or both) lies beyond the last query
// does not compute it, and the last tile has only as many slices of keys as there are. Slices go to
// warps in turn, so a block's rest is spread over its warps.
#include <sherd/kernels/cuda/attention_general.h>
#include <sherd/kernels/cuda/attention_tiles.cuh>

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace sherd::cuda {
namespace attention {
namespace {

constexpr int kWarpSlices = 2;
constexpr int kBlockRows = kSlice * kWarps * kWarpSlices;

// Keys of a tile: fewer where outputs need more registers.
template <int D>
constexpr int kTileRows = D <= 80 ? 64 : 32;
template <int D>
constexpr int kTileElements = kTileRows<D>* kPitch<D>;
// Q's fragments stay in registers where there is room beside the sums.
template <int D>
constexpr bool kKeepQueries = D <= 64;

template <typename T>
struct Forward {
  AttentionView<const T> q, k, v;
  AttentionView<T> output;
  float* lse;
  int heads, queries, keys;
  int blocks;           // of queries, for each head
  float factor;         // |scale| * log2(e)
  std::uint32_t signs;  // flips both elements of a pair where scale is negative
};

// What a warp keeps for its slices from tile to tile. `largest` is of scores without the factor.
template <int D>
struct WarpState {
  std::uint32_t q[kWarpSlices][kKeepQueries<D> ? D / 16 : 1][4];
  float output[kWarpSlices][D / 8][4];
  float largest[kWarpSlices][2];
  float sum[kWarpSlices][2];
};

template <int D, typename T>
__device__ __forceinline__ void load_queries(std::uint32_t (&q)[4], const T* q_tile, int slice,
                                             int k, std::uint32_t signs, const Lane& lane) {
  load_left<D>(q, q_tile + (slice * kWarps * kSlice) * kPitch<D> + k * 16, lane.lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) q[i] ^= signs;
}

// Scores become probabilities times 2^(largest * factor); sums and outputs so far are scaled to the
// new largest score.
template <int D, int kSlices>
__device__ __forceinline__ void softmax_tile(WarpState<D>& state,
                                             float (&scores)[kSlices][kTileRows<D> / 8][4],
                                             int key_blocks, float factor) {
#pragma unroll
  for (int r = 0; r < kSlices; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = state.largest[r][half];
#pragma unroll
      for (int n = 0; n < kTileRows<D> / 8; ++n) {
        if (n < key_blocks) {
          largest = fmaxf(largest, fmaxf(scores[r][n][2 * half], scores[r][n][2 * half + 1]));
        }
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const float correction = ptx::ex2((state.largest[r][half] - largest) * factor);
      state.largest[r][half] = largest;
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
        state.output[r][i][2 * half] *= correction;
        state.output[r][i][2 * half + 1] *= correction;
      }
      const float offset = -largest * factor;
      float sum = state.sum[r][half] * correction;
#pragma unroll
      for (int n = 0; n < kTileRows<D> / 8; ++n) {
        if (n < key_blocks) {
#pragma unroll
          for (int j = 2 * half; j < 2 * half + 2; ++j) {
            scores[r][n][j] = ptx::ex2(fmaf(scores[r][n][j], factor, offset));
            sum += scores[r][n][j];
          }
        }
      }
      state.sum[r][half] = sum;
    }
  }
}

// One tile of keys for a warp's kSlices slices; keys_left of it exist (all, unless kLast).
template <typename T, int D, int kSlices, bool kLast>
__device__ __forceinline__ void forward_tile(WarpState<D>& state, const T* q_tile, const T* k_tile,
                                             const T* v_tile, int keys_left, float factor,
                                             std::uint32_t signs, const Lane& lane) {
  const int key_slices = kLast ? (keys_left + kSlice - 1) / kSlice : kTileRows<D> / kSlice;
  float scores[kSlices][kTileRows<D> / 8][4] = {};
#pragma unroll(kKeepQueries <D> ? D / 16 : 2)
  for (int k = 0; k < D / 16; ++k) {
    if constexpr (!kKeepQueries<D>) {
#pragma unroll
      for (int r = 0; r < kSlices; ++r) load_queries<D>(state.q[r][0], q_tile, r, k, signs, lane);
    }
#pragma unroll
    for (int n = 0; n < kTileRows<D> / kSlice; ++n) {
      if (n < key_slices) {
        std::uint32_t keys[2][2];
        load_right_transposed<D>(keys, k_tile + n * kSlice * kPitch<D> + k * 16, lane.lane);
#pragma unroll
        for (int r = 0; r < kSlices; ++r) {
          const auto& q = state.q[r][kKeepQueries<D> ? k : 0];
          ptx::mma_m16n8k16<T>(scores[r][2 * n], q, keys[0]);
          ptx::mma_m16n8k16<T>(scores[r][2 * n + 1], q, keys[1]);
        }
      }
    }
  }
  if constexpr (kLast) {
#pragma unroll
    for (int n = 0; n < kTileRows<D> / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (n * 8 + lane.column + j % 2 >= keys_left) {
#pragma unroll
          for (int r = 0; r < kSlices; ++r) scores[r][n][j] = -INFINITY;
        }
      }
    }
  }
  softmax_tile<D, kSlices>(state, scores, 2 * key_slices, factor);
#pragma unroll
  for (int n = 0; n < kTileRows<D> / kSlice; ++n) {
    if (n < key_slices) {
      std::uint32_t p[kSlices][4];
#pragma unroll
      for (int r = 0; r < kSlices; ++r) pack_left<T>(p[r], scores[r][2 * n], scores[r][2 * n + 1]);
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        std::uint32_t values[2][2];
        load_right<D>(values, v_tile + n * kSlice * kPitch<D> + i * 16, lane.lane);
#pragma unroll
        for (int r = 0; r < kSlices; ++r) {
          ptx::mma_m16n8k16<T>(state.output[r][2 * i], p[r], values[0]);
          ptx::mma_m16n8k16<T>(state.output[r][2 * i + 1], p[r], values[1]);
        }
      }
    }
  }
}

template <typename T, int D>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(Forward<T> p) {
  SHERD_DYNAMIC_SHARED(T, shared);
  T* const k_tiles = shared;
  T* const v_tiles = shared + 2 * kTileElements<D>;
  const Lane lane;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int head = static_cast<int>(blockIdx.x) / p.blocks;  // of all samples
  const int first = static_cast<int>(blockIdx.x) % p.blocks * kBlockRows;
  const Rows<const T> k(p.k, head / p.heads, head % p.heads);
  const Rows<const T> v(p.v, head / p.heads, head % p.heads);
  // Slices `warp` and `warp + kWarps` of the block's queries.
  const int first_row = first + warp * kSlice;
  const int slices = first_row + kWarps * kSlice < p.queries ? 2 : first_row < p.queries ? 1 : 0;
  T* const q_tile = shared + 4 * kTileElements<D> + warp * kSlice * kPitch<D>;

  copy_rows<kBlockRows, D>(shared + 4 * kTileElements<D>,
                           Rows<const T>(p.q, head / p.heads, head % p.heads), first, p.queries);
  copy_rows<kTileRows<D>, D>(k_tiles, k, 0, p.keys);
  copy_rows<kTileRows<D>, D>(v_tiles, v, 0, p.keys);
  ptx::cp_async_commit();

  WarpState<D> state;
#pragma unroll
  for (int r = 0; r < kWarpSlices; ++r) {
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) state.output[r][i][j] = 0.f;
    }
    state.largest[r][0] = state.largest[r][1] = -INFINITY;
    state.sum[r][0] = state.sum[r][1] = 0.f;
  }
  for (int start = 0, tile = 0; start < p.keys; start += kTileRows<D>, tile ^= 1) {
    ptx::cp_async_wait<0>();
    // This tile is there for all, and all are done with the one before, whose place is free.
    __syncthreads();
    if (start + kTileRows<D> < p.keys) {
      copy_rows<kTileRows<D>, D>(k_tiles + (tile ^ 1) * kTileElements<D>, k, start + kTileRows<D>,
                                 p.keys);
      copy_rows<kTileRows<D>, D>(v_tiles + (tile ^ 1) * kTileElements<D>, v, start + kTileRows<D>,
                                 p.keys);
    }
    ptx::cp_async_commit();
    if (kKeepQueries<D> && start == 0) {
#pragma unroll
      for (int r = 0; r < kWarpSlices; ++r) {
#pragma unroll
        for (int i = 0; i < (kKeepQueries<D> ? D / 16 : 0); ++i)
          load_queries<D>(state.q[r][i], q_tile, r, i, p.signs, lane);
      }
    }
    const int keys_left = p.keys - start;
    const auto work = [&](auto slices_constant, auto last) {
      forward_tile<T, D, decltype(slices_constant)::value, decltype(last)::value>(
          state, q_tile, k_tiles + tile * kTileElements<D>, v_tiles + tile * kTileElements<D>,
          keys_left, p.factor, p.signs, lane);
    };
    using One = std::integral_constant<int, 1>;
    using Two = std::integral_constant<int, 2>;
    if (keys_left >= kTileRows<D>) {
      if (slices == 2) work(Two{}, std::false_type{});
      if (slices == 1) work(One{}, std::false_type{});
    } else {
      if (slices == 2) work(Two{}, std::true_type{});
      if (slices == 1) work(One{}, std::true_type{});
    }
  }
#pragma unroll
  for (int r = 0; r < kWarpSlices; ++r) {
    if (r >= slices) continue;
    const int row = first_row + r * kWarps * kSlice;
    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.sum[r][half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      factors[half] = 1.f / sum;
      const int query = row + lane.group + 8 * half;
      if (lane.column == 0 && query < p.queries) {
        p.lse[static_cast<std::int64_t>(head) * p.queries + query] =
            state.largest[r][half] * p.factor * kLn2 + logf(sum);
      }
    }
    store_slice<D>(state.output[r], factors[0], factors[1],
                   q_tile + r * kWarps * kSlice * kPitch<D>,
                   Rows<T>(p.output, head / p.heads, head % p.heads), row, p.queries, lane);
  }
}

template <typename T, int D>
void launch_forward(Stream& stream, const AttentionShape& shape, Forward<T> p) {
  constexpr std::size_t kShared = (4 * kTileElements<D> + kBlockRows * kPitch<D>)*sizeof(T);
  const dim3 grid(grid_blocks(shape, p.blocks));
  launch(forward_kernel<T, D>, grid, dim3(kThreads), kShared, native(stream), p);
}

// False where tensor cores do not take it.
template <typename T>
bool forward_on_tensor_cores(Stream& stream, const AttentionShape& shape, AttentionView<const T> q,
                             AttentionView<const T> k, AttentionView<const T> v,
                             AttentionView<T> output, float* lse) {
  if (!tensor_cores_take(shape.queries, q, output) || !tensor_cores_take(shape.keys, k, v))
    return false;
  Forward<T> p;
  p.q = q, p.k = k, p.v = v, p.output = output, p.lse = lse;
  p.heads = static_cast<int>(shape.heads);
  p.queries = static_cast<int>(shape.queries);
  p.keys = static_cast<int>(shape.keys);
  p.blocks = static_cast<int>(ceil_div(shape.queries, kBlockRows));
  // Never 0: the scores of keys that do not exist, -infinity, must stay that.
  p.factor = std::max(static_cast<float>(std::abs(shape.scale)) * kLog2E, FLT_MIN);
  p.signs = shape.scale < 0 ? 0x80008000u : 0u;
  return with_head_dim(shape.head_dim,
                       [&](auto d) { launch_forward<T, decltype(d)::value>(stream, shape, p); });
}

}  // namespace
}  // namespace attention

template <typename T>
void attention_forward(Stream& stream, const AttentionShape& shape, AttentionView<const T> q,
                       AttentionView<const T> k, AttentionView<const T> v, AttentionView<T> output,
                       acc_t<T>* lse, void*) {
  if constexpr (sizeof(T) == 2) {
    if (attention::forward_on_tensor_cores<T>(stream, shape, q, k, v, output, lse)) return;
  }
  attention::general_forward<T>(stream, shape, q, k, v, output, lse);
}

#define SHERD_INSTANTIATE(T)                                                                 \
  template void attention_forward<T>(Stream&, const AttentionShape&, AttentionView<const T>, \
                                     AttentionView<const T>, AttentionView<const T>,         \
                                     AttentionView<T>, acc_t<T>*, void*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cuda
