// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cuda/column_sum.h>
#include <sherd/kernels/cuda/gelu.h>
#include <sherd/kernels/cuda/math.h>
#include <sherd/kernels/cuda/pack.h>

namespace sherd::cuda {
namespace {

// A block takes a piece of the columns, V for each lane, and kRows rows, of which its warps take
// every kWarps-th. The cut, and with it the order of the sums, depends on the sizes alone. (Where
// the addresses do not allow vectors a lane takes one column; the order of its sum is the same.)
constexpr int kLanes = 32;
constexpr int kWarps = 8;
constexpr int kUnrolled = 4;
constexpr int kRows = kGeluSumRows;

template <typename T>
bool whole_vectors(std::int64_t cols, const T* a, const T* b, const T* c) {
  constexpr int V = kVectorOf<T>;
  return cols % V == 0 && elements_before_vectors<V>(a, b, c, c) == 0;
}

dim3 grid_of(std::int64_t rows, std::int64_t cols, int vector) {
  return {static_cast<unsigned>(ceil_div(rows, kRows)),
          static_cast<unsigned>(ceil_div(cols, kLanes * vector))};
}

// For the rows of this warp: load_row(offset, k) for kUnrolled of them, then body(offset, k) for
// the same.
template <typename Load, typename Body>
__device__ __forceinline__ void for_each_row(std::int64_t rows, std::int64_t cols, std::int64_t col,
                                             const Load& load_row, const Body& body) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kRows + threadIdx.y;
  for (int begin = 0; begin < kRows; begin += kWarps * kUnrolled) {
#pragma unroll
    for (int k = 0; k < kUnrolled; ++k) {
      const std::int64_t row = first + begin + k * kWarps;
      if (row < rows) load_row(row * cols + col, k);
    }
#pragma unroll
    for (int k = 0; k < kUnrolled; ++k) {
      const std::int64_t row = first + begin + k * kWarps;
      if (row < rows) body(row * cols + col, k);
    }
  }
}

template <int V, GeluForm kForm, typename T>
__global__ void __launch_bounds__(kLanes* kWarps) sums_kernel(GeluBackwardSums<T> p) {
  using A = acc_t<T>;
  const std::int64_t col = (static_cast<std::int64_t>(blockIdx.y) * kLanes + threadIdx.x) * V;
  A sum[V] = {};
  if (col < p.cols) {
    Pack<T, V> x[kUnrolled], grad[kUnrolled];
    for_each_row(
        p.rows, p.cols, col,
        [&](std::int64_t at, int k) {
          x[k] = load<V>(p.input + at);
          grad[k] = load<V>(p.grad_output + at);
        },
        [&](std::int64_t at, int k) {
          Pack<T, V> out;
#pragma unroll
          for (int i = 0; i < V; ++i) {
            const A slope = gelu_slope<kForm>(to_acc(x[k].at[i]));
            const A value = to_acc(grad[k].at[i]) * slope;
            out.at[i] = from_acc<T>(value);
            sum[i] += value;
          }
          store<V>(p.grad_input + at, out);
        });
  }
  SHERD_SHARED(A, sums, V * kWarps * kLanes);
#pragma unroll
  for (int i = 0; i < V; ++i) sums[(i * kWarps + threadIdx.y) * kLanes + threadIdx.x] = sum[i];
  __syncthreads();
  // Warp y adds up columns y, y + kWarps, ... of each lane's.
  for (int i = static_cast<int>(threadIdx.y); i < V && col < p.cols; i += kWarps) {
    A total = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp)
      total += sums[(i * kWarps + warp) * kLanes + threadIdx.x];
    p.workspace[blockIdx.x * p.cols + col + i] = total;
  }
}

}  // namespace

template <typename T>
void gelu_backward_sums(Stream& stream, const GeluBackwardSums<T>& p) {
  if (p.rows > 0 && p.cols > 0) {
    constexpr int V = kVectorOf<T>;
    const bool whole = whole_vectors(p.cols, p.input, p.grad_output, p.grad_input);
    const bool exact = p.form == GeluForm::exact;
    const auto kernel =
        whole ? (exact ? sums_kernel<V, GeluForm::exact, T> : sums_kernel<V, GeluForm::tanh, T>)
              : (exact ? sums_kernel<1, GeluForm::exact, T> : sums_kernel<1, GeluForm::tanh, T>);
    launch(kernel, grid_of(p.rows, p.cols, whole ? V : 1), dim3(kLanes, kWarps), 0, native(stream),
           p);
  }
  add_blocks(stream, ceil_div(p.rows, kRows), p.cols, p.cols, p.workspace, p.grad_bias);
}

#define SHERD_INSTANTIATE(T) \
  template void gelu_backward_sums<T>(Stream&, const GeluBackwardSums<T>&);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cuda
