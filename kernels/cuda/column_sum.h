// SPDX-License-Identifier: Apache-2.0
// Sums over the rows of a matrix: the gradient of a bias. Rows are summed in blocks into a
// workspace with a row for each block, and the blocks are then added; the cut depends on the sizes
// and the type alone.
#pragma once

#include <sherd/kernels/arguments/types.h>

namespace sherd {

class Stream;

namespace cuda {

using arguments::acc_t;

// out[c] = sum over r of in[r, c]; '=' [cols].
template <typename T>
void column_sum(Stream& stream, std::int64_t rows, std::int64_t cols, const T* in, acc_t<T>* out,
                acc_t<T>* workspace);
template <typename T>
std::size_t column_sum_workspace_bytes(std::int64_t rows, std::int64_t cols);

// out[c] = sum over b of partial[b * stride + c]; '=' [cols]. And, where second_out is not null,
// second_out[c] = sum over b of partial[b * stride + cols + c]. The second half of column_sum, for
// kernels that fill the blocks themselves.
template <typename A>
void add_blocks(Stream& stream, std::int64_t blocks, std::int64_t cols, std::int64_t stride,
                const A* partial, A* out, A* second_out = nullptr);

}  // namespace cuda
}  // namespace sherd
