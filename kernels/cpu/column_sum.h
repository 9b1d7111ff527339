// SPDX-License-Identifier: Apache-2.0
// Sums over the rows of a matrix: the gradient of a bias.
//
// Note [Column sums in blocks]
// Rows are summed in blocks of kColumnSumRows into a workspace with a row for each block, and the
// blocks are then added in order. Neither cut depends on the thread count, so the bits do not
// either.
#pragma once

#include <sherd/kernels/cpu/simd.h>

#include <cstddef>

namespace sherd::cpu {

inline constexpr std::int64_t kColumnSumRows = 64;

// out[c] = sum over r of in[r, c]; '=' [cols].
template <typename T>
void column_sum(int threads, std::int64_t rows, std::int64_t cols, const T* in, acc_t<T>* out,
                acc_t<T>* workspace);
template <typename T>
std::size_t column_sum_workspace_bytes(std::int64_t rows, std::int64_t cols);

// out[c] = sum over b of partial[b * stride + c], in order of b; '=' [cols]. The second half of
// column_sum, for kernels that fill the blocks themselves.
template <typename A>
void add_blocks(int threads, std::int64_t blocks, std::int64_t cols, std::int64_t stride,
                const A* partial, A* out);

}  // namespace sherd::cpu
