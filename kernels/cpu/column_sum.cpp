// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/column_sum.h>
#include <sherd/kernels/cpu/vector_loop.h>

namespace sherd::cpu {
namespace {

std::int64_t block_count(std::int64_t rows) {
  return (rows + kColumnSumRows - 1) / kColumnSumRows;
}

// sum[c] = the sum over `rows` rows. Four rows at a time, which spares three of four trips of the
// running sum through memory.
template <typename T>
void sum_block(std::int64_t rows, std::int64_t cols, const T* in, acc_t<T>* sum) {
  using A = acc_t<T>;
  std::fill(sum, sum + cols, A(0));
  std::int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const T* const row = in + r * cols;
    for_each_vector<T>(
        cols, [=](std::int64_t c, int count) __attribute__((always_inline)) {
          const Vec<T> pair0 = load<T>(row + c, count) + load<T>(row + cols + c, count);
          const Vec<T> pair1 =
              load<T>(row + 2 * cols + c, count) + load<T>(row + 3 * cols + c, count);
          store<A>(sum + c, load<A>(sum + c, count) + (pair0 + pair1), count);
        });
  }
  for (; r < rows; ++r) {
    const T* const row = in + r * cols;
    for_each_vector<T>(
        cols, [=](std::int64_t c, int count) __attribute__((always_inline)) {
          store<A>(sum + c, load<A>(sum + c, count) + load<T>(row + c, count), count);
        });
  }
}

}  // namespace

template <typename T>
std::size_t column_sum_workspace_bytes(std::int64_t rows, std::int64_t cols) {
  return static_cast<std::size_t>(block_count(rows) * cols) * sizeof(acc_t<T>);
}

template <typename T>
void column_sum(int threads, std::int64_t rows, std::int64_t cols, const T* in, acc_t<T>* out,
                acc_t<T>* workspace) {
  const std::int64_t group = std::max<std::int64_t>(1, rows_per_task(cols) / kColumnSumRows);
  parallel_blocks(threads, block_count(rows), group, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      const std::int64_t first = b * kColumnSumRows;
      sum_block<T>(std::min(kColumnSumRows, rows - first), cols, in + first * cols,
                   workspace + b * cols);
    }
  });
  add_blocks(threads, block_count(rows), cols, cols, workspace, out);
}

template <typename A>
void add_blocks(int threads, std::int64_t blocks, std::int64_t cols, std::int64_t stride,
                const A* partial, A* out) {
  const std::int64_t width = 4 * kLanes<A>;
  const int workers = blocks * cols < kElementwiseBlock ? 1 : threads;
  parallel_blocks(workers, cols, width, [=](std::int64_t begin, std::int64_t end) {
    if (end - begin == width) {
      Vec<A> sum[4] = {};
      for (std::int64_t b = 0; b < blocks; ++b) {
        for (int k = 0; k < 4; ++k) sum[k] += load<A>(partial + b * stride + begin + k * kLanes<A>);
      }
      for (int k = 0; k < 4; ++k) store<A>(out + begin + k * kLanes<A>, sum[k]);
      return;
    }
    for_each_vector<A>(end - begin, [=](std::int64_t i, int count) {
      Vec<A> sum = {};
      for (std::int64_t b = 0; b < blocks; ++b) {
        sum += load<A>(partial + b * stride + begin + i, count);
      }
      store<A>(out + begin + i, sum, count);
    });
  });
}

#define SHERD_INSTANTIATE(T)                                                      \
  template std::size_t column_sum_workspace_bytes<T>(std::int64_t, std::int64_t); \
  template void column_sum<T>(int, std::int64_t, std::int64_t, const T*, acc_t<T>*, acc_t<T>*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE
template void add_blocks<double>(int, std::int64_t, std::int64_t, std::int64_t, const double*,
                                 double*);
template void add_blocks<float>(int, std::int64_t, std::int64_t, std::int64_t, const float*,
                                float*);

}  // namespace sherd::cpu
