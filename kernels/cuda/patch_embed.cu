// SPDX-License-Identifier: Apache-2.0
// Patch embedding on tensor cores; Note [Patches read from images].
//
// A block of 8 warps computes 128 x 128 of the result, 64 x 32 a warp, in steps of 32 along the
// sum; a step is copied while the one before is multiplied, with one barrier a step. What is copied
// at once is a word: V neighbours in a patch's row of pixels, which are neighbours in the images
// too. That is 16 bytes where patches are a multiple of 8 wide (16), 4 bytes where they are even
// (14), else an element. The word decides no sum, so it changes no bits.
#include <sherd/kernels/cuda/vector.h>
#include <sherd/kernels/cuda/fragments.cuh>
#include <sherd/kernels/cuda/patch_matrix.cuh>

#include <type_traits>

namespace sherd::cuda {
namespace {

constexpr int kThreads = 256;

constexpr int kTile = 128;  // rows and columns of a block's result
constexpr int kStep = 32;   // of the sum
constexpr int kWarpRows = 64, kWarpColumns = 32;
static_assert(kStep == kWarp);
static_assert(kTile == kPatchEmbedTile<bf16>);
static_assert(kThreads / kWarp == kTile / kWarpRows * (kTile / kWarpColumns));

using Sums = float[kWarpRows / 16][kWarpColumns / 8][4];

struct WarpPlace {
  int row = static_cast<int>(threadIdx.x) / kWarp / (kTile / kWarpColumns) * kWarpRows;
  int column = static_cast<int>(threadIdx.x) / kWarp % (kTile / kWarpColumns) * kWarpColumns;
};

template <int V, typename T>
__device__ __forceinline__ void copy_word(T* to, const T* from, bool inside) {
  if constexpr (V == 8) {
    ptx::cp_async16(to, from, inside ? 16 : 0);
  } else if constexpr (V == 2) {
    ptx::cp_async4(to, from, inside ? 4 : 0);
  } else {
    *to = inside ? *from : T{};
  }
}

// kRows x kColumns of a matrix with `columns` columns, from (row, column) on; zeros where it ends.
template <int V, int kRows, int kColumns, typename T>
__device__ __forceinline__ void copy_matrix(T* tile, const T* matrix, int row, int rows, int column,
                                            int columns) {
  constexpr int kWords = kColumns / V;  // of a row
  const int c = static_cast<int>(threadIdx.x) % kWords * V;
#pragma unroll 4
  for (int r = static_cast<int>(threadIdx.x) / kWords; r < kRows; r += kThreads / kWords) {
    const bool inside = row + r < rows && column + c < columns;
    const std::int64_t at = inside ? std::int64_t{row + r} * columns + column + c : 0;
    copy_word<V>(tile + r * kPitch<kColumns> + c, matrix + at, inside);
  }
}

// kTile patches from `row` on, kStep of their elements from `column` on. row_offsets: of these
// patches, 0 where there are none.
template <int V, typename T>
__device__ __forceinline__ void copy_patches(T* tile, const PatchMatrix<T>& patches,
                                             const std::int64_t* row_offsets, int row, int column) {
  constexpr int kWords = kStep / V;
  const int c = static_cast<int>(threadIdx.x) % kWords * V;
  const bool has_column = column + c < patches.columns;
  const T* const from = patches.images + (has_column ? patches.column_offset(column + c) : 0);
#pragma unroll 4
  for (int r = static_cast<int>(threadIdx.x) / kWords; r < kTile; r += kThreads / kWords) {
    copy_word<V>(tile + r * kPitch<kStep> + c, from + row_offsets[r],
                 has_column && row + r < patches.rows);
  }
}

// kStep patches from `row` on, those before `end`, and kTile of their elements.
template <int V, typename T>
__device__ __forceinline__ void copy_patches_across(T* tile, const PatchMatrix<T>& patches, int row,
                                                    int end, int column) {
  constexpr int kWords = kTile / V;
  const int c = static_cast<int>(threadIdx.x) % kWords * V;
  const bool has_column = column + c < patches.columns;
  const T* const from = patches.images + (has_column ? patches.column_offset(column + c) : 0);
  // Each lane finds one patch for its warp.
  const int found = row + static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t row_offset = found < end ? patches.row_offset(found) : 0;
#pragma unroll 4
  for (int r = static_cast<int>(threadIdx.x) / kWords; r < kStep; r += kThreads / kWords) {
    const std::int64_t offset = __shfl_sync(0xffffffffu, row_offset, r);
    copy_word<V>(tile + r * kPitch<kTile> + c, from + offset, has_column && row + r < end);
  }
}

// sums += left right, a step. Tiles are [kTile, kStep], or with kAcross [kStep, kTile].
template <bool kAcross, typename T>
__device__ __forceinline__ void multiply(Sums& sums, const T* left, const T* right,
                                         const WarpPlace& warp, int lane) {
#pragma unroll
  for (int k = 0; k < kStep; k += 16) {
    std::uint32_t b[kWarpColumns / 16][2][2];
#pragma unroll
    for (int j = 0; j < kWarpColumns / 16; ++j) {
      const int column = warp.column + j * 16;
      if constexpr (kAcross) {
        load_right<kTile>(b[j], right + k * kPitch<kTile> + column, lane);
      } else {
        load_right_transposed<kStep>(b[j], right + column * kPitch<kStep> + k, lane);
      }
    }
#pragma unroll
    for (int i = 0; i < kWarpRows / 16; ++i) {
      const int row = warp.row + i * 16;
      std::uint32_t a[4];
      if constexpr (kAcross) {
        load_left_transposed<kTile>(a, left + k * kPitch<kTile> + row, lane);
      } else {
        load_left<kStep>(a, left + row * kPitch<kStep> + k, lane);
      }
#pragma unroll
      for (int j = 0; j < kWarpColumns / 16; ++j) {
        ptx::mma_m16n8k16<T>(sums[i][2 * j], a, b[j][0]);
        ptx::mma_m16n8k16<T>(sums[i][2 * j + 1], a, b[j][1]);
      }
    }
  }
}

template <bool kAcross>
constexpr int kTileElements = kAcross ? kStep* kPitch<kTile> : kTile* kPitch<kStep>;
// Of two operands, and two steps.
template <bool kAcross, typename T>
constexpr std::size_t kTileBytes = sizeof(T) * 4 * kTileElements<kAcross>;

// All steps. copy(step, left, right) starts the copies of a step's tiles; `tiles` has room for
// those of two steps. works: whether this warp's part of the result exists.
template <bool kAcross, typename T, typename Copy>
__device__ __forceinline__ void multiply_steps(Sums& sums, T* tiles, int steps, bool works,
                                               const WarpPlace& warp, int lane, const Copy& copy) {
  constexpr int kElements = kTileElements<kAcross>;
  if (steps > 0) copy(0, tiles, tiles + kElements);
  ptx::cp_async_commit();
  for (int step = 0; step < steps; ++step) {
    T* const now = tiles + step % 2 * 2 * kElements;
    T* const next = tiles + (step + 1) % 2 * 2 * kElements;
    ptx::cp_async_wait<0>();
    // This step's tiles are there for all, and all are done with those of the step before.
    __syncthreads();
    if (step + 1 < steps) copy(step + 1, next, next + kElements);
    ptx::cp_async_commit();
    if (works) multiply<kAcross>(sums, now, now + kElements, warp, lane);
  }
}

// Calls store(row, column, sums of it and of the next column) for what this lane has.
template <typename Store>
__device__ __forceinline__ void for_each_pair(const Sums& sums, const WarpPlace& warp,
                                              const Lane& lane, const Store& store) {
#pragma unroll
  for (int i = 0; i < kWarpRows / 16; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kWarpColumns / 8; ++j) {
        store(warp.row + i * 16 + half * 8 + lane.group, warp.column + j * 8 + lane.column,
              sums[i][j][2 * half], sums[i][j][2 * half + 1]);
      }
    }
  }
}

template <typename T, int V>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(PatchMatrix<T> patches, int dim, int tiles_across, const T* weight,
                   const T* bias, T* out) {
  SHERD_DYNAMIC_SHARED(T, tiles);
  SHERD_SHARED(std::int64_t, row_offsets, kTile);
  const Lane lane;
  const WarpPlace warp;
  const int row = static_cast<int>(blockIdx.x) / tiles_across * kTile;
  const int column = static_cast<int>(blockIdx.x) % tiles_across * kTile;
  if (threadIdx.x < kTile) {
    const int patch = row + static_cast<int>(threadIdx.x);
    row_offsets[threadIdx.x] = patch < patches.rows ? patches.row_offset(patch) : 0;
  }
  __syncthreads();
  Sums sums = {};
  multiply_steps<false>(sums, tiles, (patches.columns + kStep - 1) / kStep,
                        row + warp.row < patches.rows && column + warp.column < dim, warp,
                        lane.lane, [&](int step, T* left, T* right) {
                          copy_patches<V>(left, patches, row_offsets, row, step * kStep);
                          copy_matrix<V, kTile, kStep>(right, weight, column, dim, step * kStep,
                                                       patches.columns);
                        });
  for_each_pair(sums, warp, lane, [&](int r, int c, float x, float y) {
    r += row, c += column;
    if (r >= patches.rows || c >= dim) return;
    T* const to = out + std::int64_t{r} * dim + c;
    if (bias != nullptr) x += to_float(bias[c]);
    if (bias != nullptr && c + 1 < dim) y += to_float(bias[c + 1]);
    if constexpr (V > 1) {
      *reinterpret_cast<std::uint32_t*>(to) = pack2<T>(x, y);
    } else {
      to[0] = from_float<T>(x);
      if (c + 1 < dim) to[1] = from_float<T>(y);
    }
  });
}

template <typename T, int V>
__global__ void __launch_bounds__(kThreads, 2)
    backward_weight_kernel(PatchMatrix<T> patches, int dim, int tiles_across, int rows_per_part,
                           const T* grad_output, float* partial) {
  SHERD_DYNAMIC_SHARED(T, tiles);
  const Lane lane;
  const WarpPlace warp;
  const int row = static_cast<int>(blockIdx.x) / tiles_across * kTile;
  const int column = static_cast<int>(blockIdx.x) % tiles_across * kTile;
  const int begin = static_cast<int>(blockIdx.y) * rows_per_part;
  const int end = begin + rows_per_part < patches.rows ? begin + rows_per_part : patches.rows;
  Sums sums = {};
  multiply_steps<true>(sums, tiles, (end - begin + kStep - 1) / kStep,
                       row + warp.row < dim && column + warp.column < patches.columns, warp,
                       lane.lane, [&](int step, T* left, T* right) {
                         const int at = begin + step * kStep;
                         copy_matrix<V, kStep, kTile>(left, grad_output, at, end, row, dim);
                         copy_patches_across<V>(right, patches, at, end, column);
                       });
  float* const out = partial + std::int64_t{blockIdx.y} * dim * patches.columns;
  for_each_pair(sums, warp, lane, [&](int r, int c, float x, float y) {
    r += row, c += column;
    if (r >= dim || c >= patches.columns) return;
    float* const to = out + std::int64_t{r} * patches.columns + c;
    to[0] = x;  // the gradient may begin anywhere in a larger buffer
    if (c + 1 < patches.columns) to[1] = y;
  });
}

template <typename A>
__global__ void __launch_bounds__(kThreads)
    add_parts(std::int64_t count, int parts, const A* partial, A* out) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  A sum = partial[i];
  for (int part = 1; part < parts; ++part) sum += partial[part * count + i];
  out[i] = sum;
}

// Calls body with the elements of a word as a constant.
template <typename T, typename Body>
void with_word(const PatchShape& shape, std::int64_t dim,
               std::initializer_list<const void*> addresses, const Body& body) {
  std::uintptr_t bits = 0;
  for (const void* address : addresses) bits |= reinterpret_cast<std::uintptr_t>(address);
  const auto fits = [&](std::uintptr_t elements) {
    const auto n = static_cast<std::int64_t>(elements);
    return shape.patch_width % n == 0 && dim % n == 0 && bits % (elements * sizeof(T)) == 0;
  };
  if (fits(8)) return body(std::integral_constant<int, 8>{});
  if (fits(2)) return body(std::integral_constant<int, 2>{});
  body(std::integral_constant<int, 1>{});
}

}  // namespace

template <typename T>
void patch_embed_forward(Stream& stream, const PatchEmbedForward<T>& p) {
  if constexpr (sizeof(T) != 2) {
    plain_patch_embed_forward<T>(stream, p);
  } else {
    const PatchMatrix<T> patches(p.shape, p.images);
    const std::int64_t across = ceil_div(p.dim, kTile);
    const dim3 grid(static_cast<unsigned>(ceil_div(patches.rows, kTile) * across));
    with_word<T>(p.shape, p.dim, {p.images, p.weight, p.out}, [&](auto word) {
      launch(forward_kernel<T, decltype(word)::value>, grid, dim3(kThreads), kTileBytes<false, T>,
             native(stream), patches, static_cast<int>(p.dim), static_cast<int>(across), p.weight,
             p.bias, p.out);
    });
  }
}

template <typename T>
void patch_embed_backward_weight(Stream& stream, const PatchEmbedBackwardWeight<T>& p) {
  const PatchEmbedCut cut = patch_embed_cut<T>(p.shape, p.dim);
  acc_t<T>* const sums = cut.parts == 1 ? p.grad_weight : p.workspace;
  const std::int64_t columns = p.shape.columns();
  if constexpr (sizeof(T) != 2) {
    plain_patch_embed_backward_weight<T>(stream, p, cut, sums);
  } else {
    const std::int64_t across = ceil_div(columns, kTile);
    const dim3 grid(static_cast<unsigned>(ceil_div(p.dim, kTile) * across),
                    static_cast<unsigned>(cut.parts));
    with_word<T>(p.shape, p.dim, {p.images, p.grad_output}, [&](auto word) {
      launch(backward_weight_kernel<T, decltype(word)::value>, grid, dim3(kThreads),
             kTileBytes<true, T>, native(stream), PatchMatrix<T>(p.shape, p.images),
             static_cast<int>(p.dim), static_cast<int>(across), static_cast<int>(cut.rows_per_part),
             p.grad_output, sums);
    });
  }
  if (cut.parts == 1) return;
  const std::int64_t count = p.dim * columns;
  launch(add_parts<acc_t<T>>, dim3(static_cast<unsigned>(ceil_div(count, kThreads))),
         dim3(kThreads), 0, native(stream), count, static_cast<int>(cut.parts), sums,
         p.grad_weight);
}

#define SHERD_INSTANTIATE(T)                                                  \
  template void patch_embed_forward<T>(Stream&, const PatchEmbedForward<T>&); \
  template void patch_embed_backward_weight<T>(Stream&, const PatchEmbedBackwardWeight<T>&);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cuda
