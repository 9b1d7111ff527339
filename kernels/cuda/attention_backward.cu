// SPDX-License-Identifier: Apache-2.0
// Note [Attention on tensor cores, backward]
// Two kernels of one shape. Each keeps two matrices of its own 64 rows as fragments in registers
// and goes over tiles of the other side's two matrices:
//
//                 own      other    sums
//   of queries    q, dO    k, v     dQ += dS k                delta = the row sums of dO * O first
//   of keys       k, v     q, dO    dK += dS q, dV += P dO    scores transposed: keys by queries
//
//   P = 2^(own0 other0^T * factor - lse), dS = P * (own1 other1^T - delta), 16 columns at a time.
//
// That is seven products where one kernel over keys needs five. But the one kernel adds dQ over
// blocks: with atomics, in an order that changes from run to run, or with partial sums in fp32,
// which for ViTs take longer to write and read (12 bytes * D a query and block of keys) than two
// products do. So nothing but delta goes through memory.
//
// Rows beyond the last are zeros, with lse and delta 0, so what they add is 0. Only P of a key that
// does not exist may be infinite; its dS is set to 0.
#include <sherd/kernels/cuda/attention_general.h>
#include <sherd/kernels/cuda/attention_tiles.cuh>

#include <cmath>

namespace sherd::cuda {
namespace attention {
namespace {

constexpr int kBlockRows = kSlice * kWarps;  // own; a tile of the other side has as many
template <int D>
constexpr int kTileElements = kBlockRows* kPitch<D>;

// Blocks that a multiprocessor is to hold: as many as registers allow without spilling.
constexpr int resident_blocks(int head_dim, bool of_keys) {
  if (head_dim <= (of_keys ? 32 : 64)) return 4;
  return head_dim <= (of_keys ? 64 : 96) ? 3 : 2;
}

// Whether the fragments of the own second matrix stay in registers; else its tile stays.
template <int D, bool kOfKeys>
constexpr bool kKeepSecond = !kOfKeys || D < 128;

template <typename T>
struct Backward {
  AttentionView<const T> grad_output, q, k, v, output;
  AttentionView<T> grad_q, grad_k, grad_v;
  const float* lse;
  float* delta;
  int heads = 0, queries = 0, keys = 0;
  int blocks = 0;    // of own rows, for each head
  float factor = 0;  // scale * log2(e)
  float scale = 0;
};

// delta of the 16 rows from `first` on, to memory and to the lanes that have these rows of an
// accumulator. `grad_tile` has their dO.
template <int D, typename T>
__device__ __forceinline__ void row_deltas(float (&deltas)[2], const T* grad_tile,
                                           const Rows<const T>& output, int first, int count,
                                           float* to, const Lane& lane) {
  const int row = lane.lane / 2, start = lane.lane % 2 * (D / 2);  // two lanes work on a row
  float sum = 0.f;
  if (first + row < count) {
#pragma unroll
    for (int column = start; column < start + D / 2; column += 8) {
      const uint4 o =
          *reinterpret_cast<const uint4*>(output.data + (first + row) * output.stride + column);
      const uint4 g = *reinterpret_cast<const uint4*>(grad_tile + row * kPitch<D> + column);
      const std::uint32_t o_pairs[4] = {o.x, o.y, o.z, o.w}, g_pairs[4] = {g.x, g.y, g.z, g.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 a = unpack2<T>(o_pairs[i]), b = unpack2<T>(g_pairs[i]);
        sum = fmaf(a.x, b.x, sum);
        sum = fmaf(a.y, b.y, sum);
      }
    }
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  if (lane.lane % 2 == 0 && first + row < count) to[first + row] = sum;
  deltas[0] = __shfl_sync(0xffffffffu, sum, 2 * lane.group);
  deltas[1] = __shfl_sync(0xffffffffu, sum, 2 * lane.group + 16);
}

// Of a query of a tile: in the first half of the block's threads lse in base 2, else delta.
__device__ __forceinline__ float load_statistic(const float* of_head, int start, int count) {
  const int row = start + static_cast<int>(threadIdx.x) % kBlockRows;
  if (row >= count) return 0.f;
  return threadIdx.x < kBlockRows ? of_head[row] * kLog2E : of_head[row];
}

template <typename T, int D, bool kOfKeys>
struct WarpState {
  std::uint32_t own0[D / 16][4];
  std::uint32_t own1[kKeepSecond<D, kOfKeys> ? D / 16 : 1][4];
  float sums[kOfKeys ? 2 : 1][D / 8][4];
  float lse[2], delta[2];  // of own queries
};

// 16 rows of the other side; `left` of them exist. Statistics: of these rows, where they are
// queries.
template <typename T, int D, bool kOfKeys>
__device__ __forceinline__ void backward_slice(WarpState<T, D, kOfKeys>& state, const T* own1,
                                               const T* other0, const T* other1, const float* lse,
                                               const float* delta, int left, float factor,
                                               const Lane& lane) {
  float p[2][4] = {}, ds[2][4] = {};
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    std::uint32_t b[2][2];
    load_right_transposed<D>(b, other0 + k * 16, lane.lane);
    ptx::mma_m16n8k16<T>(p[0], state.own0[k], b[0]);
    ptx::mma_m16n8k16<T>(p[1], state.own0[k], b[1]);
    if constexpr (!kKeepSecond<D, kOfKeys>) load_left<D>(state.own1[0], own1 + k * 16, lane.lane);
    const auto& second = state.own1[kKeepSecond<D, kOfKeys> ? k : 0];
    load_right_transposed<D>(b, other1 + k * 16, lane.lane);
    ptx::mma_m16n8k16<T>(ds[0], second, b[0]);
    ptx::mma_m16n8k16<T>(ds[1], second, b[1]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int column = n * 8 + lane.column;
    float2 pair_lse{}, pair_delta{};  // of this column and the next
    if constexpr (kOfKeys) {
      pair_lse = *reinterpret_cast<const float2*>(lse + column);
      pair_delta = *reinterpret_cast<const float2*>(delta + column);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float score_lse = kOfKeys ? (j % 2 == 0 ? pair_lse.x : pair_lse.y) : state.lse[j / 2];
      const float score_delta =
          kOfKeys ? (j % 2 == 0 ? pair_delta.x : pair_delta.y) : state.delta[j / 2];
      p[n][j] = ptx::ex2(fmaf(p[n][j], factor, -score_lse));
      ds[n][j] = p[n][j] * (ds[n][j] - score_delta);
      if (!kOfKeys && column + j % 2 >= left) ds[n][j] = 0.f;
    }
  }
  std::uint32_t a[2][4];
  pack_left<T>(a[0], ds[0], ds[1]);
  if constexpr (kOfKeys) pack_left<T>(a[1], p[0], p[1]);
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    std::uint32_t b[2][2];
    load_right<D>(b, other0 + i * 16, lane.lane);
    ptx::mma_m16n8k16<T>(state.sums[0][2 * i], a[0], b[0]);
    ptx::mma_m16n8k16<T>(state.sums[0][2 * i + 1], a[0], b[1]);
    if constexpr (kOfKeys) {
      load_right<D>(b, other1 + i * 16, lane.lane);
      ptx::mma_m16n8k16<T>(state.sums[1][2 * i], a[1], b[0]);
      ptx::mma_m16n8k16<T>(state.sums[1][2 * i + 1], a[1], b[1]);
    }
  }
}

template <typename T, int D, bool kOfKeys>
__global__ void __launch_bounds__(kThreads, resident_blocks(D, kOfKeys))
    backward_kernel(Backward<T> p) {
  SHERD_DYNAMIC_SHARED(T, shared);
  SHERD_SHARED(float, statistics, kOfKeys ? 4 * kBlockRows : 1);  // of two tiles: lse, delta
  const Lane lane;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int head = static_cast<int>(blockIdx.x) / p.blocks;  // of all samples
  const int b = head / p.heads, h = head % p.heads;
  const int first = static_cast<int>(blockIdx.x) % p.blocks * kBlockRows;
  const int first_row = first + warp * kSlice;
  const int own_count = kOfKeys ? p.keys : p.queries;
  const int other_count = kOfKeys ? p.queries : p.keys;
  const bool active = first_row < own_count;
  const Rows<const T> other[2] = {{kOfKeys ? p.q : p.k, b, h},
                                  {kOfKeys ? p.grad_output : p.v, b, h}};
  const std::int64_t statistics_start = static_cast<std::int64_t>(head) * p.queries;
  const float* const statistics_of_head =
      (threadIdx.x < kBlockRows ? p.lse : p.delta) + statistics_start;

  // Two pairs of tiles of the other side's matrices. The second pair has the own rows first, but
  // what is kept there: that has a fifth place.
  T* const own0 = shared + 2 * kTileElements<D>;
  T* const own1 = shared + (kKeepSecond<D, kOfKeys> ? 3 : 4) * kTileElements<D>;
  const auto copy_tiles = [&](int tile, int start) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      copy_rows<kBlockRows, D>(shared + (2 * tile + i) * kTileElements<D>, other[i], start,
                               other_count);
    }
  };
  copy_rows<kBlockRows, D>(own0, Rows<const T>(kOfKeys ? p.k : p.q, b, h), first, own_count);
  copy_rows<kBlockRows, D>(own1, Rows<const T>(kOfKeys ? p.v : p.grad_output, b, h), first,
                           own_count);
  copy_tiles(0, 0);
  ptx::cp_async_commit();
  if constexpr (kOfKeys)
    statistics[threadIdx.x] = load_statistic(statistics_of_head, 0, other_count);
  ptx::cp_async_wait<0>();
  __syncthreads();

  WarpState<T, D, kOfKeys> state;
  const T* const warp_own0 = own0 + warp * kSlice * kPitch<D>;
  const T* const warp_own1 = own1 + warp * kSlice * kPitch<D>;
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    load_left<D>(state.own0[k], warp_own0 + k * 16, lane.lane);
    if constexpr (kKeepSecond<D, kOfKeys>)
      load_left<D>(state.own1[k], warp_own1 + k * 16, lane.lane);
  }
#pragma unroll
  for (int i = 0; i < (kOfKeys ? 2 : 1); ++i) {
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) state.sums[i][n][j] = 0.f;
    }
  }
  if (!kOfKeys && active) {
    row_deltas<D>(state.delta, warp_own1, Rows<const T>(p.output, b, h), first_row, own_count,
                  p.delta + statistics_start, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + lane.group + 8 * half;
      state.lse[half] = row < own_count ? p.lse[statistics_start + row] * kLog2E : 0.f;
    }
  }

  for (int start = 0, tile = 0; start < other_count; start += kBlockRows, tile ^= 1) {
    ptx::cp_async_wait<0>();
    // This tile is there for all, and all are done with what the other place held.
    __syncthreads();
    const bool more = start + kBlockRows < other_count;
    float next = 0.f;
    if (more) {
      copy_tiles(tile ^ 1, start + kBlockRows);
      if constexpr (kOfKeys)
        next = load_statistic(statistics_of_head, start + kBlockRows, other_count);
    }
    ptx::cp_async_commit();
    if (active) {
      const T* const tiles = shared + 2 * tile * kTileElements<D>;
      const float* const lse = statistics + (kOfKeys ? tile * 2 * kBlockRows : 0);
      const int left = other_count - start < kBlockRows ? other_count - start : kBlockRows;
#pragma unroll 1
      for (int n = 0; n < left; n += kSlice) {
        backward_slice<T, D, kOfKeys>(
            state, warp_own1, tiles + n * kPitch<D>, tiles + kTileElements<D> + n * kPitch<D>,
            lse + n, lse + (kOfKeys ? kBlockRows : 0) + n, left - n, p.factor, lane);
      }
    }
    // Its place was last read before the barrier above.
    if constexpr (kOfKeys) {
      if (more) statistics[(tile ^ 1) * 2 * kBlockRows + threadIdx.x] = next;
    }
  }
  __syncthreads();  // the tiles become places to stage results
  if (!active) return;
  T* const staging = shared + warp * kSlice * kPitch<D>;
  store_slice<D>(state.sums[0], p.scale, p.scale, staging,
                 Rows<T>(kOfKeys ? p.grad_k : p.grad_q, b, h), first_row, own_count, lane);
  if constexpr (kOfKeys) {
    store_slice<D>(state.sums[1], 1.f, 1.f, staging + kTileElements<D>, Rows<T>(p.grad_v, b, h),
                   first_row, own_count, lane);
  }
}

template <typename T, int D, bool kOfKeys>
void launch_backward(Stream& stream, const AttentionShape& shape, Backward<T> p) {
  constexpr std::size_t kShared = (kKeepSecond<D, kOfKeys> ? 4 : 5) * kTileElements<D> * sizeof(T);
  static_assert(kThreads == 2 * kBlockRows, "a thread copies one statistic of a tile");
  const std::int64_t blocks = ceil_div(kOfKeys ? shape.keys : shape.queries, kBlockRows);
  const dim3 grid(grid_blocks(shape, blocks));
  p.blocks = static_cast<int>(blocks);
  launch(backward_kernel<T, D, kOfKeys>, grid, dim3(kThreads), kShared, native(stream), p);
}

// False where tensor cores do not take it.
template <typename T>
bool backward_on_tensor_cores(Stream& stream, const AttentionShape& shape, Backward<T> p) {
  if (!tensor_cores_take(shape.queries, p.grad_output, p.q, p.output, p.grad_q) ||
      !tensor_cores_take(shape.keys, p.k, p.v, p.grad_k, p.grad_v))
    return false;
  p.heads = static_cast<int>(shape.heads);
  p.queries = static_cast<int>(shape.queries);
  p.keys = static_cast<int>(shape.keys);
  p.scale = static_cast<float>(shape.scale);
  p.factor = p.scale * kLog2E;
  return with_head_dim(shape.head_dim, [&](auto d) {
    // In this order: the first writes delta.
    launch_backward<T, decltype(d)::value, false>(stream, shape, p);
    launch_backward<T, decltype(d)::value, true>(stream, shape, p);
  });
}

}  // namespace
}  // namespace attention

template <typename T>
void attention_backward(Stream& stream, const AttentionShape& shape,
                        AttentionView<const T> grad_output, AttentionView<const T> q,
                        AttentionView<const T> k, AttentionView<const T> v,
                        AttentionView<const T> output, const acc_t<T>* lse, AttentionView<T> grad_q,
                        AttentionView<T> grad_k, AttentionView<T> grad_v, void* workspace) {
  const auto delta = static_cast<acc_t<T>*>(workspace);
  if constexpr (sizeof(T) == 2) {
    if (attention::backward_on_tensor_cores<T>(
            stream, shape, {grad_output, q, k, v, output, grad_q, grad_k, grad_v, lse, delta}))
      return;
  }
  attention::general_backward<T>(stream, shape, grad_output, q, k, v, output, lse, grad_q, grad_k,
                                 grad_v, delta);
}

#define SHERD_INSTANTIATE(T)                                                                   \
  template void attention_backward<T>(                                                         \
      Stream&, const AttentionShape&, AttentionView<const T>, AttentionView<const T>,          \
      AttentionView<const T>, AttentionView<const T>, AttentionView<const T>, const acc_t<T>*, \
      AttentionView<T>, AttentionView<T>, AttentionView<T>, void*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cuda
