// SPDX-License-Identifier: Apache-2.0
// Two kernels of the kind that the emulator is for, used by its tests and its speed measurement:
// LayerNorm (shuffles and barriers) and attention (cp.async, ldmatrix, mma.sync), which can be
// broken.
#pragma once

#include <cuda_runtime.h>
#include <emulator/device.h>

#include <cstdint>

namespace examples {

struct bf16 {
  std::uint16_t bits;
};
inline float to_float(bf16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
inline bf16 to_bf16(float x) {  // of numbers; NaN is not rounded
  const unsigned u = __float_as_uint(x);
  if (x != x) return {0x7FFF};
  return {static_cast<std::uint16_t>((u + 0x7FFF + (u >> 16 & 1)) >> 16)};
}
inline std::uint32_t pack(float low, float high) {
  return to_bf16(low).bits | static_cast<std::uint32_t>(to_bf16(high).bits) << 16;
}

__device__ __forceinline__ float block_sum(float v, float* sums) {
  for (int o = 16; o != 0; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  const unsigned warp = threadIdx.x >> 5, l = threadIdx.x & 31;
  __syncthreads();
  if (l == 0) sums[warp] = v;
  __syncthreads();
  v = l < blockDim.x >> 5 ? sums[l] : 0.f;
  for (int o = 16; o != 0; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}

// y = (x - mean) / sqrt(variance + 1e-6) of rows of `width` numbers; a block takes one row.
template <int Threads>
__global__ void __launch_bounds__(Threads) layer_norm(const float* x, bf16* y, int width) {
  EMULATOR_SHARED(float, sums, 32);
  const float* row = x + static_cast<std::size_t>(blockIdx.x) * width;
  const int first = static_cast<int>(threadIdx.x);
  float s = 0.f;
  for (int i = first; i < width; i += Threads) s += row[i];
  const float mean = block_sum(s, sums) / static_cast<float>(width);
  float q = 0.f;
  for (int i = first; i < width; i += Threads) q += (row[i] - mean) * (row[i] - mean);
  const float rstd = rsqrtf(block_sum(q, sums) / static_cast<float>(width) + 1e-6f);
  for (int i = first; i < width; i += Threads) {
    y[static_cast<std::size_t>(blockIdx.x) * width + i] = to_bf16((row[i] - mean) * rstd);
  }
}

enum class Bug {
  none,
  no_barrier_after_wait,
  no_barrier_at_loop_end,
  waits_for_one_group_less,
  wrong_column_of_k,
  mask_one_too_far,
  sum_not_rescaled,
  maximum_of_half_the_quad,
  no_row_guard
};

constexpr int kTile = 64;  // queries of a block and keys of a step
template <int D>
constexpr std::size_t attention_shared_bytes() {
  return static_cast<std::size_t>(5) * kTile * (D + 8) * sizeof(bf16);
}

// o = softmax(scale q kᵀ) v for each of gridDim.y heads of n rows of D numbers, as
// FlashAttention-2: 4 warps of 16 queries, tiles of 64 keys copied one step ahead. scale_log2 =
// scale log2(e).
template <int D, Bug kBug>
__global__ void __launch_bounds__(128)
    attention(const bf16* q, const bf16* k, const bf16* v, bf16* o, int n, float scale_log2) {
  constexpr int kRow = D + 8;
  EMULATOR_DYNAMIC_SHARED(bf16, shared);
  bf16 *tile_q = shared, *tile_k = tile_q + kTile * kRow, *tile_v = tile_k + 2 * kTile * kRow;
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, l = thread & 31;
  const int first_query = static_cast<int>(blockIdx.x) * kTile;
  const std::size_t base = static_cast<std::size_t>(blockIdx.y) * n * D;
  const auto fetch = [&](bf16* tile, const bf16* from, int first_row) {
    for (int i = thread; i < kTile * (D / 8); i += 128) {
      const int row = i / (D / 8), column = i % (D / 8) * 8;
      const bool inside = first_row + row < n;
      emulator::cp_async16(
          tile + row * kRow + column,
          from + base + static_cast<std::size_t>(inside ? first_row + row : 0) * D + column,
          inside ? 16 : 0);
    }
  };
  fetch(tile_q, q, first_query);
  fetch(tile_k, k, 0);
  fetch(tile_v, v, 0);
  emulator::cp_async_commit();
  float out[D / 8][4] = {}, maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
  std::uint32_t query[D / 16][4];
  const int steps = (n + kTile - 1) / kTile;
  for (int step = 0; step < steps; ++step) {
    const int now = step & 1;
    if (step + 1 < steps) {
      fetch(tile_k + (now ^ 1) * kTile * kRow, k, (step + 1) * kTile);
      fetch(tile_v + (now ^ 1) * kTile * kRow, v, (step + 1) * kTile);
    }
    emulator::cp_async_commit();
    emulator::cp_async_wait<kBug == Bug::waits_for_one_group_less ? 2 : 1>();
    if (kBug != Bug::no_barrier_after_wait) __syncthreads();
    if (step == 0) {
      for (int i = 0; i < D / 16; ++i) {
        emulator::ldmatrix_x4(query[i],
                              tile_q + (warp * 16 + l % 16) * kRow + i * 16 + (l / 16) * 8);
      }
    }
    const bf16 *keys = tile_k + now * kTile * kRow, *values = tile_v + now * kTile * kRow;
    float score[kTile / 8][4] = {};
    for (int i = 0; i < D / 16; ++i) {
      for (int j = 0; j < kTile / 16; ++j) {
        std::uint32_t r[4];
        const int column = kBug == Bug::wrong_column_of_k ? ((l >> 2) & 1) * 8 : ((l >> 3) & 1) * 8;
        emulator::ldmatrix_x4(r, keys + (j * 16 + (l & 7) + (l >> 4) * 8) * kRow + i * 16 + column);
        const std::uint32_t b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
        emulator::mma_m16n8k16(score[2 * j], query[i], b0, emulator::Bf16{});
        emulator::mma_m16n8k16(score[2 * j + 1], query[i], b1, emulator::Bf16{});
      }
    }
    const int keys_end = kBug == Bug::mask_one_too_far ? n + 1 : n;
    for (int j = 0; j < kTile / 8; ++j) {
      for (int e = 0; e < 4; ++e) {
        if (step * kTile + j * 8 + (l & 3) * 2 + (e & 1) >= keys_end) score[j][e] = -INFINITY;
      }
    }
    for (int half = 0; half < 2; ++half) {
      float m = maximum[half];
      for (int j = 0; j < kTile / 8; ++j)
        m = fmaxf(m, fmaxf(score[j][2 * half], score[j][2 * half + 1]));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
      if (kBug != Bug::maximum_of_half_the_quad) m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
      const float correction = emulator::ex2((maximum[half] - m) * scale_log2);
      maximum[half] = m;
      if (kBug != Bug::sum_not_rescaled) sum[half] *= correction;
      for (int i = 0; i < D / 8; ++i) {
        out[i][2 * half] *= correction;
        out[i][2 * half + 1] *= correction;
      }
      for (int j = 0; j < kTile / 8; ++j) {
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          score[j][e] = emulator::ex2((score[j][e] - m) * scale_log2);
          sum[half] += score[j][e];
        }
      }
    }
    for (int j = 0; j < kTile / 16; ++j) {
      std::uint32_t p[4];
      for (int e = 0; e < 4; ++e) {
        const float* s = score[2 * j + e / 2];
        p[e] = pack(s[(e & 1) * 2], s[(e & 1) * 2 + 1]);
      }
      for (int i = 0; i < D / 16; ++i) {
        std::uint32_t r[4];
        emulator::ldmatrix_x4_trans(r, values + (j * 16 + l % 16) * kRow + i * 16 + (l / 16) * 8);
        const std::uint32_t b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
        emulator::mma_m16n8k16(out[2 * i], p, b0, emulator::Bf16{});
        emulator::mma_m16n8k16(out[2 * i + 1], p, b1, emulator::Bf16{});
      }
    }
    if (kBug != Bug::no_barrier_at_loop_end) __syncthreads();
  }
  emulator::cp_async_wait<0>();
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
    sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
    const int row = first_query + warp * 16 + l / 4 + 8 * half;
    if (row >= (kBug == Bug::no_row_guard ? n + 1 : n)) continue;
    for (int i = 0; i < D / 8; ++i) {
      bf16* to = o + base + static_cast<std::size_t>(row) * D + i * 8 + (l & 3) * 2;
      to[0] = to_bf16(out[i][2 * half] / sum[half]);
      to[1] = to_bf16(out[i][2 * half + 1] / sum[half]);
    }
  }
}

template <int D, Bug kBug = Bug::none>
cudaError_t launch_attention(const bf16* q, const bf16* k, const bf16* v, bf16* o, int heads,
                             int n) {
  constexpr std::size_t kBytes = attention_shared_bytes<D>();
  const cudaError_t error = cudaFuncSetAttribute(
      attention<D, kBug>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  if (error != cudaSuccess) return error;
  return emulator::launch(
      attention<D, kBug>,
      dim3(static_cast<unsigned>((n + kTile - 1) / kTile), static_cast<unsigned>(heads)), 128,
      kBytes, nullptr, q, k, v, o, n, 1.44269504f / std::sqrt(static_cast<float>(D)));
}

}  // namespace examples
