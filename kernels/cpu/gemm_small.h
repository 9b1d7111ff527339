// SPDX-License-Identifier: Apache-2.0
// Products of matrices small enough to stay in a core's own cache: C = A B or C += A B. Attention
// multiplies blocks of queries, keys and values with it; big products go to oneDNN or Eigen.
//
// Note [Register tile]
// A processor can start two fused multiply-adds a cycle but each takes four cycles, and it can load
// only two vectors a cycle. So a fast product (1) keeps at least eight sums going at once and (2)
// uses each loaded vector several times. Both come from computing a *tile* of C, kRows x kVectors
// vectors, wholly in registers: every step along k loads kVectors vectors of B, broadcasts kRows
// single elements of A, and does kRows * kVectors multiply-adds. 6 x 4 and 8 x 3 use 24 of
// AVX-512's 32 registers for sums and leave room for the operands.
//
//                      b0  b1  b2  b3      <- one row of B, kVectors vectors
//          a(0,k)      c00 c01 c02 c03
//          a(1,k)      c10 c11 c12 c13     <- registers, written to C once at the end
//            ...
//
// A is read element by element, so it may lie transposed; B and C are read and written in whole
// vectors, so their rows are padded to a multiple of the vector (B with zeros, since what is
// computed there is stored in C's padding). An element of C is one chain of multiply-adds in the
// order of k: its bits depend neither on the tile it falls in nor on the other elements.
#pragma once

#include <sherd/kernels/cpu/simd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

namespace sherd::cpu {

// Element (i, k) at data[i * row_stride + k * column_stride].
template <typename A>
struct LeftOperand {
  const A* data;
  std::int64_t row_stride;
  std::int64_t column_stride;
};

// The vector of columns [v * kLanes, (v + 1) * kLanes) of row k is at
// data[k * row_stride + v * vector_stride]: row-major with vector_stride = kLanes, or in panels one
// vector wide with row_stride = kLanes.
template <typename A>
struct RightOperand {
  const A* data;
  std::int64_t row_stride;
  std::int64_t vector_stride;
};

namespace detail {

// Tile sizes: most vectors in a row of the tile, and rows for each number of vectors.
#if defined(__AVX512F__) || defined(__aarch64__)  // 32 registers
inline constexpr int kMaxTileVectors = 4;
constexpr int tile_rows(int vectors) {
  return vectors <= 2 ? 12 : 24 / vectors;
}
#else  // 16 registers
inline constexpr int kMaxTileVectors = 2;
constexpr int tile_rows(int vectors) {
  return vectors == 1 ? 8 : 6;
}
#endif

// One tile of C. kUnitRows: A's row stride is 1 (a transposed matrix), which spares the address
// arithmetic.
template <typename A, int kRows, int kVectors, bool kUnitRows>
void multiply_tile(std::int64_t depth, LeftOperand<A> a, RightOperand<A> b, A* c,
                   std::int64_t c_row_stride, bool accumulate) {
  Vec<A> sum[kRows][kVectors];
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      sum[i][v] = accumulate ? load<A>(c + i * c_row_stride + v * kLanes<A>) : Vec<A>{};
    }
  }
  const std::int64_t row_stride = kUnitRows ? 1 : a.row_stride;
  for (std::int64_t k = 0; k < depth; ++k) {
    Vec<A> right[kVectors];
    for (int v = 0; v < kVectors; ++v) right[v] = load<A>(b.data + v * b.vector_stride);
    for (int i = 0; i < kRows; ++i) {
      const Vec<A> left = broadcast<A>(a.data[i * row_stride]);
      for (int v = 0; v < kVectors; ++v) sum[i][v] = madd(left, right[v], sum[i][v]);
    }
    a.data += a.column_stride;
    b.data += b.row_stride;
  }
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kVectors; ++v) store<A>(c + i * c_row_stride + v * kLanes<A>, sum[i][v]);
  }
}

template <typename A>
using TileFunction = void (*)(std::int64_t, LeftOperand<A>, RightOperand<A>, A*, std::int64_t,
                              bool);

// tiles[rows - 1] for one number of vectors.
template <typename A, int kVectors, bool kUnitRows, int... kRowIndex>
constexpr auto tile_functions(std::integer_sequence<int, kRowIndex...>) {
  return std::array<TileFunction<A>, sizeof...(kRowIndex)>{
      &multiply_tile<A, kRowIndex + 1, kVectors, kUnitRows>...};
}

// All rows of C under one column of tiles. The rows are dealt evenly over as few tiles as possible:
// a last tile of one row would leave the multipliers idle.
template <typename A, int kVectors, bool kUnitRows>
void multiply_column(std::int64_t rows, std::int64_t depth, LeftOperand<A> a, RightOperand<A> b,
                     A* c, std::int64_t c_row_stride, bool accumulate) {
  constexpr int kTileRows = tile_rows(kVectors);
  static constexpr auto kTiles =
      tile_functions<A, kVectors, kUnitRows>(std::make_integer_sequence<int, kTileRows>{});
  for (std::int64_t tiles = (rows + kTileRows - 1) / kTileRows; tiles > 0; --tiles) {
    const std::int64_t count = (rows + tiles - 1) / tiles;
    kTiles[static_cast<std::size_t>(count - 1)](depth, a, b, c, c_row_stride, accumulate);
    a.data += count * a.row_stride;
    c += count * c_row_stride;
    rows -= count;
  }
}

template <typename A, bool kUnitRows>
void multiply_columns(std::int64_t rows, std::int64_t vectors, std::int64_t depth, LeftOperand<A> a,
                      RightOperand<A> b, A* c, std::int64_t c_row_stride, bool accumulate) {
  while (vectors > 0) {
    const std::int64_t tiles = (vectors + kMaxTileVectors - 1) / kMaxTileVectors;
    const std::int64_t count = (vectors + tiles - 1) / tiles;
    const auto column = [&]<int kVectors>(std::integral_constant<int, kVectors>) {
      multiply_column<A, kVectors, kUnitRows>(rows, depth, a, b, c, c_row_stride, accumulate);
    };
    if (count == 1) column(std::integral_constant<int, 1>{});
    if (count == 2) column(std::integral_constant<int, 2>{});
    if constexpr (kMaxTileVectors > 2) {
      if (count == 3) column(std::integral_constant<int, 3>{});
      if (count == 4) column(std::integral_constant<int, 4>{});
    }
    b.data += count * b.vector_stride;
    c += count * kLanes<A>;
    vectors -= count;
  }
}

}  // namespace detail

// C = A B (accumulate: C += A B) for A [rows x depth], B [depth x vectors * kLanes] and
// C [rows x vectors * kLanes] with C's rows c_row_stride apart.
template <typename A>
void multiply_small(std::int64_t rows, std::int64_t vectors, std::int64_t depth, LeftOperand<A> a,
                    RightOperand<A> b, A* c, std::int64_t c_row_stride, bool accumulate) {
  if (a.row_stride == 1) {
    detail::multiply_columns<A, true>(rows, vectors, depth, a, b, c, c_row_stride, accumulate);
  } else {
    detail::multiply_columns<A, false>(rows, vectors, depth, a, b, c, c_row_stride, accumulate);
  }
}

}  // namespace sherd::cpu
