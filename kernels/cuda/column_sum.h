// SPDX-License-Identifier: Apache-2.0
// Sums over the rows of a matrix: the gradient of a bias. Rows are summed in blocks into a
// workspace with a row for each block, and the blocks are then added. The cut depends on the sizes
// and the type alone; so do the bits, and the bytes of the workspace, in builds without CUDA too.
#pragma once

#include <sherd/kernels/arguments/types.h>

#include <algorithm>

namespace sherd {

class Stream;

namespace cuda {

using arguments::acc_t;

// A block sums kColumnSumPieces pieces of 16 bytes of each of its rows.
inline constexpr std::int64_t kColumnSumPieces = 32;

struct ColumnSumCut {
  std::int64_t rows_per_block = 0, row_blocks = 0, column_blocks = 0;
};
// element_bytes: of T.
constexpr ColumnSumCut column_sum_cut(std::int64_t rows, std::int64_t cols,
                                      std::int64_t element_bytes) {
  constexpr std::int64_t kWarps = 8;            // of a block, a row each
  constexpr std::int64_t kLeastRows = 64;       // of a block: else the second pass costs too much
  constexpr std::int64_t kEnoughBlocks = 1056;  // for the largest GPUs
  const auto ceil_div = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  ColumnSumCut cut;
  cut.column_blocks = ceil_div(cols * element_bytes, kColumnSumPieces * 16);
  const std::int64_t wanted = ceil_div(rows * cut.column_blocks, kEnoughBlocks);
  cut.rows_per_block = ceil_div(std::max(wanted, kLeastRows), kWarps) * kWarps;
  cut.row_blocks = ceil_div(rows, cut.rows_per_block);
  return cut;
}

template <typename T>
constexpr std::size_t column_sum_workspace_bytes(std::int64_t rows, std::int64_t cols) {
  return static_cast<std::size_t>(column_sum_cut(rows, cols, sizeof(T)).row_blocks * cols) *
         sizeof(acc_t<T>);
}

// out[c] = sum over r of in[r, c]; '=' [cols].
template <typename T>
void column_sum(Stream& stream, std::int64_t rows, std::int64_t cols, const T* in, acc_t<T>* out,
                acc_t<T>* workspace);

// out[c] = sum over b of partial[b * stride + c]; '=' [cols]. And, where second_out is not null,
// second_out[c] = sum over b of partial[b * stride + cols + c]. The second half of column_sum, for
// kernels that fill the blocks themselves.
template <typename A>
void add_blocks(Stream& stream, std::int64_t blocks, std::int64_t cols, std::int64_t stride,
                const A* partial, A* out, A* second_out = nullptr);

}  // namespace cuda
}  // namespace sherd
