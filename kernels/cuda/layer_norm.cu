// SPDX-License-Identifier: Apache-2.0
//
// Note [Layer normalisation on a GPU]
// Both directions are bound by memory, so both read their inputs once and keep a row in registers.
// Forward gives a row to a warp, which needs no barrier; a lane holds up to kMostPerLane elements
// of it. Backward also sums over rows, in registers too; so there a thread holds no more than
// kPerThread columns, a row takes as many warps as it needs, and a block goes through several rows,
// loading the next ones while it computes. How many is a matter of the sizes alone. Longer rows,
// and forward those of fp64, take a block each and are read once for each pass; they stay in the
// cache.
#include <sherd/kernels/cuda/column_sum.h>
#include <sherd/kernels/cuda/layer_norm.h>
#include <sherd/kernels/cuda/vector.h>

#include <cmath>

namespace sherd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kForwardThreads = 128;
constexpr int kStep = 8;          // elements of a lane grow in steps of this
constexpr int kMostPerLane = 48;  // more would leave too few warps to wait for memory

// ---- forward

// N: elements a lane holds; cols <= 32 N.
template <typename T, int N, bool residual>
__global__ void __launch_bounds__(kForwardThreads)
    forward_in_warps(LayerNormForward<T> p, bool whole) {
  using A = acc_t<T>;
  constexpr int n = kVector<T>, pieces = N / n;
  const int lane = threadIdx.x % kWarp;
  const std::int64_t row =
      std::int64_t{blockIdx.x} * (kForwardThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= p.rows) return;
  const int cols = static_cast<int>(p.cols);
  const std::int64_t first = row * p.cols;
  uint4 raw[pieces], added[residual ? pieces : 1];
#pragma unroll
  for (int k = 0; k < pieces; ++k) {
    const int at = (k * kWarp + lane) * n;
    raw[k] = load_piece(p.input + first, at, cols, whole);
    if constexpr (residual) added[k] = load_piece(p.residual + first, at, cols, whole);
  }
  A x[N];
#pragma unroll
  for (int k = 0; k < pieces; ++k) {
    A part[n];
    unpack<T>(raw[k], part);
    if constexpr (residual) {
      A other[n];
      unpack<T>(added[k], other);
#pragma unroll
      for (int i = 0; i < n; ++i) part[i] += other[i];
      store_piece(p.sum + first, (k * kWarp + lane) * n, cols, whole, part);
      unpack<T>(pack<T>(part), part);  // rounded to T, as the backward pass will see it
    }
#pragma unroll
    for (int i = 0; i < n; ++i) x[k * n + i] = part[i];
  }
  const A mean = warp_sum(sum_of(x)) / static_cast<A>(cols);
  A squares[4] = {};
#pragma unroll
  for (int k = 0; k < pieces; ++k) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const A centred = (k * kWarp + lane) * n + i < cols ? x[k * n + i] - mean : A(0);
      x[k * n + i] = centred;
      squares[i % 4] = std::fma(centred, centred, squares[i % 4]);
    }
  }
  const A square = warp_sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  const A rstd = A(1) / std::sqrt(square / static_cast<A>(cols) + p.eps);
  if (lane == 0) {
    p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
#pragma unroll
  for (int k = 0; k < pieces; ++k) {
    const int at = (k * kWarp + lane) * n;
    A weight[n], bias[n] = {}, y[n];
    if (p.weight != nullptr) unpack<T>(load_piece(p.weight, at, cols, whole), weight);
    if (p.bias != nullptr) unpack<T>(load_piece(p.bias, at, cols, whole), bias);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      y[i] = x[k * n + i] * rstd;
      y[i] = p.weight != nullptr ? std::fma(y[i], weight[i], bias[i]) : y[i] + bias[i];
    }
    store_piece(p.output + first, at, cols, whole, y);
  }
}

// Any width, a block a row.
template <typename T>
__global__ void __launch_bounds__(kThreads) forward_in_blocks(LayerNormForward<T> p) {
  using A = acc_t<T>;
  SHERD_SHARED(A, shared, kWarp);
  const std::int64_t row = blockIdx.x, cols = p.cols;
  const T* x = p.input + row * cols;
  A sum = 0;
  for (std::int64_t c = threadIdx.x; c < cols; c += kThreads) {
    A value = to_acc(x[c]);
    if (p.residual != nullptr) {
      const T rounded = from_acc<T>(value + to_acc(p.residual[row * cols + c]));
      p.sum[row * cols + c] = rounded;
      value = to_acc(rounded);
    }
    sum += value;
  }
  if (p.residual != nullptr) x = p.sum + row * cols;  // a thread reads what it wrote itself
  const A mean = block_sum(sum, shared) / static_cast<A>(cols);
  A squares = 0;
  for (std::int64_t c = threadIdx.x; c < cols; c += kThreads) {
    const A centred = to_acc(x[c]) - mean;
    squares = std::fma(centred, centred, squares);
  }
  const A rstd = A(1) / std::sqrt(block_sum(squares, shared) / static_cast<A>(cols) + p.eps);
  if (threadIdx.x == 0) {
    p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
  for (std::int64_t c = threadIdx.x; c < cols; c += kThreads) {
    const A y = (to_acc(x[c]) - mean) * rstd;
    const A bias = p.bias != nullptr ? to_acc(p.bias[c]) : A(0);
    p.output[row * cols + c] =
        from_acc<T>(p.weight != nullptr ? std::fma(y, to_acc(p.weight[c]), bias) : y + bias);
  }
}

// The kernel whose lanes hold just enough.
template <typename T, int N = kStep>
void launch_forward(Stream& stream, const LayerNormForward<T>& p, bool whole) {
  if constexpr (N < kMostPerLane) {
    if (p.cols > N * kWarp) return launch_forward<T, N + kStep>(stream, p, whole);
  }
  const auto kernel =
      p.residual != nullptr ? forward_in_warps<T, N, true> : forward_in_warps<T, N, false>;
  launch(kernel, dim3(static_cast<unsigned>(ceil_div(p.rows, kForwardThreads / kWarp))),
         dim3(kForwardThreads), 0, native(stream), p, whole);
}

// ---- backward

constexpr int kPerThread = LayerNormCut::kPerThread, kWarps = LayerNormCut::kWarps;
static_assert(kThreads == kWarps * kWarp && kWarp == LayerNormCut::kWarp);

// With h = (x - mean) rstd and d = grad_output * weight, grad_input is
// rstd (d - mean(d) - h mean(d h)).
template <typename T>
__global__ void __launch_bounds__(kThreads, kLayerNormBlocksOfProcessor<T>)
    backward_in_warps(LayerNormBackward<T> p, LayerNormCut cut, bool whole) {
  using A = acc_t<T>;
  constexpr int n = kVector<T>, pieces = kPerThread / n;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int warps = static_cast<int>(cut.warps), groups = static_cast<int>(cut.groups);
  const int group = warp / warps, first_warp = group * warps;
  const int thread = threadIdx.x - first_warp * kWarp, threads = warps * kWarp;
  const int cols = static_cast<int>(p.cols);
  const std::int64_t begin = blockIdx.x * cut.rows_per_block;
  const std::int64_t end =
      begin + cut.rows_per_block < p.rows ? begin + cut.rows_per_block : p.rows;

  struct Row {
    uint4 x[pieces], grad[pieces];
    A mean, rstd;
  };
  // Zeros where there is no such row: they add nothing to any sum.
  const auto load_row = [&](std::int64_t row) {
    Row result;
    const bool there = row < end;
    const std::int64_t first = there ? row * p.cols : 0;
    const int limit = there ? cols : 0;
#pragma unroll
    for (int k = 0; k < pieces; ++k) {
      const int at = (k * threads + thread) * n;
      result.x[k] = load_piece(p.input + first, at, limit, whole);
      result.grad[k] = load_piece(p.grad_output + first, at, limit, whole);
    }
    result.mean = there ? p.mean[row] : A(0);
    result.rstd = there ? p.rstd[row] : A(0);
    return result;
  };
  uint4 weight[pieces];
#pragma unroll
  for (int k = 0; k < pieces; ++k) {
    A ones[n];
#pragma unroll
    for (int i = 0; i < n; ++i) ones[i] = A(1);
    weight[k] = p.weight != nullptr ? load_piece(p.weight, (k * threads + thread) * n, cols, whole)
                                    : pack<T>(ones);
  }

  SHERD_SHARED(A, exchange, 2 * 2 * kWarps);
  A grad_weight[kPerThread] = {}, grad_bias[kPerThread] = {};
  int turn = 0;  // by turns, so that one barrier a row is enough
  Row next = load_row(begin + group);
  for (std::int64_t base = begin; base < end; base += groups) {
    const std::int64_t row = base + group;
    const Row now = next;
    next = load_row(row + groups);
    uint4 before[pieces];
    if (p.accumulate && p.grad_input != nullptr) {
#pragma unroll
      for (int k = 0; k < pieces; ++k)
        before[k] = load_piece(p.grad_input + (row < end ? row : 0) * p.cols,
                               (k * threads + thread) * n, row < end ? cols : 0, whole);
    }
    A sum = 0, dot = 0;
#pragma unroll
    for (int k = 0; k < pieces; ++k) {
      A x[n], grad[n], w[n];
      unpack<T>(now.x[k], x);
      unpack<T>(now.grad[k], grad);
      unpack<T>(weight[k], w);
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const A h = (x[i] - now.mean) * now.rstd;
        grad_weight[k * n + i] = std::fma(grad[i], h, grad_weight[k * n + i]);
        grad_bias[k * n + i] += grad[i];
        const A d = grad[i] * w[i];
        sum += d;
        dot = std::fma(d, h, dot);
      }
    }
    if (p.grad_input == nullptr) continue;
    sum = warp_sum(sum);
    dot = warp_sum(dot);
    if (warps > 1) {
      A* const all = exchange + turn * 2 * kWarps;
      turn = 1 - turn;
      if (lane == 0) {
        all[2 * warp] = sum;
        all[2 * warp + 1] = dot;
      }
      __syncthreads();
      sum = dot = 0;
      for (int w = first_warp; w < first_warp + warps; ++w) {
        sum += all[2 * w];
        dot += all[2 * w + 1];
      }
    }
    if (row >= end) continue;
    const A shift = sum / static_cast<A>(cols), slope = dot / static_cast<A>(cols);
#pragma unroll
    for (int k = 0; k < pieces; ++k) {
      A x[n], grad[n], w[n], result[n];
      unpack<T>(now.x[k], x);
      unpack<T>(now.grad[k], grad);
      unpack<T>(weight[k], w);
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const A h = (x[i] - now.mean) * now.rstd;
        result[i] = std::fma(-h, slope, grad[i] * w[i] - shift) * now.rstd;
      }
      if (p.accumulate) {
        A old[n];
        unpack<T>(before[k], old);
#pragma unroll
        for (int i = 0; i < n; ++i) result[i] += old[i];
      }
      store_piece(p.grad_input + row * p.cols, (k * threads + thread) * n, cols, whole, result);
    }
  }

  if (p.workspace == nullptr) return;
  // The groups' sums, added in order: first grad_weight, then grad_bias.
  SHERD_SHARED(A, shared, kThreads * kPerThread);
  A* const partial = p.workspace + blockIdx.x * 2 * p.cols;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
      shared[i * kThreads + threadIdx.x] = which == 0 ? grad_weight[i] : grad_bias[i];
    __syncthreads();
    if (group != 0) continue;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int column = (i / n * threads + thread) * n + i % n;
      A total = 0;
      for (int g = 0; g < groups; ++g) total += shared[i * kThreads + g * threads + thread];
      if (column < cols) partial[which * p.cols + column] = total;
    }
  }
}

// Any width, a block for a row at a time. A thread adds to its own columns of the block's partial
// sums in memory.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    backward_in_blocks(LayerNormBackward<T> p, LayerNormCut cut) {
  using A = acc_t<T>;
  SHERD_SHARED(A, shared, kWarp);
  const std::int64_t cols = p.cols, begin = blockIdx.x * cut.rows_per_block;
  const std::int64_t end =
      begin + cut.rows_per_block < p.rows ? begin + cut.rows_per_block : p.rows;
  A* const grad_weight = p.workspace != nullptr ? p.workspace + blockIdx.x * 2 * cols : nullptr;
  A* const grad_bias = grad_weight + cols;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* const x = p.input + row * cols;
    const T* const grad = p.grad_output + row * cols;
    const A mean = p.mean[row], rstd = p.rstd[row];
    A sum = 0, dot = 0;
    for (std::int64_t c = threadIdx.x; c < cols; c += kThreads) {
      const A g = to_acc(grad[c]), h = (to_acc(x[c]) - mean) * rstd;
      if (p.workspace != nullptr) {
        grad_weight[c] = std::fma(g, h, row == begin ? A(0) : grad_weight[c]);
        grad_bias[c] = (row == begin ? A(0) : grad_bias[c]) + g;
      }
      const A d = p.weight != nullptr ? g * to_acc(p.weight[c]) : g;
      sum += d;
      dot = std::fma(d, h, dot);
    }
    if (p.grad_input == nullptr) continue;
    const A shift = block_sum(sum, shared) / static_cast<A>(cols);
    const A slope = block_sum(dot, shared) / static_cast<A>(cols);
    T* const out = p.grad_input + row * cols;
    for (std::int64_t c = threadIdx.x; c < cols; c += kThreads) {
      const A g = to_acc(grad[c]), h = (to_acc(x[c]) - mean) * rstd;
      const A d = p.weight != nullptr ? g * to_acc(p.weight[c]) : g;
      const A result = std::fma(-h, slope, d - shift) * rstd;
      out[c] = from_acc<T>(p.accumulate ? to_acc(out[c]) + result : result);
    }
  }
}

}  // namespace

template <typename T>
void layer_norm_forward(Stream& stream, const LayerNormForward<T>& p) {
  if (p.rows == 0 || p.cols == 0) return;
  if constexpr (sizeof(T) < 8) {
    if (p.cols <= kMostPerLane * kWarp) {
      const bool whole = p.cols % kVector<T> == 0 &&
                         is_aligned({p.input, p.residual, p.weight, p.bias, p.sum, p.output});
      return launch_forward<T>(stream, p, whole);
    }
  }
  launch(forward_in_blocks<T>, dim3(static_cast<unsigned>(p.rows)), dim3(kThreads), 0,
         native(stream), p);
}

template <typename T>
void layer_norm_backward(Stream& stream, const LayerNormBackward<T>& given) {
  LayerNormBackward<T> p = given;
  if (p.cols == 0) return;
  const bool parameters = p.grad_weight != nullptr || p.grad_bias != nullptr;
  if (!parameters) p.workspace = nullptr;
  const LayerNormCut cut = layer_norm_cut<T>(p.rows, p.cols);
  if (p.rows > 0 && cut.warps > 0) {
    const bool whole =
        p.cols % kVector<T> == 0 && is_aligned({p.input, p.weight, p.grad_output, p.grad_input});
    launch(backward_in_warps<T>, dim3(static_cast<unsigned>(cut.blocks)),
           dim3(static_cast<unsigned>(cut.groups * cut.warps * kWarp)), 0, native(stream), p, cut,
           whole);
  } else if (p.rows > 0) {
    launch(backward_in_blocks<T>, dim3(static_cast<unsigned>(cut.blocks)), dim3(kThreads), 0,
           native(stream), p, cut);
  }
  if (!parameters) return;
  if (p.grad_weight != nullptr) {
    add_blocks(stream, cut.blocks, p.cols, 2 * p.cols, p.workspace, p.grad_weight, p.grad_bias);
  } else {
    add_blocks(stream, cut.blocks, p.cols, 2 * p.cols, p.workspace + p.cols, p.grad_bias);
  }
}

#define SHERD_INSTANTIATE(T)                                                \
  template void layer_norm_forward<T>(Stream&, const LayerNormForward<T>&); \
  template void layer_norm_backward<T>(Stream&, const LayerNormBackward<T>&);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cuda
