// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/column_sum.h>
#include <sherd/kernels/cpu/layer_norm.h>
#include <sherd/kernels/cpu/vector_loop.h>

namespace sherd::cpu {
namespace {

// Note [Prefetching rows]
// Of the passes over a row only the first waits for memory, and the processor's own prefetcher
// stops between rows while the others compute. So each pass asks for one array's next piece: one
// each, because all in one pass would fill the queue of misses and stall it.

template <typename T>
SHERD_INLINE void normalize_row(const LayerNormForward<T>& p, std::int64_t row) {
  using A = acc_t<T>;
  const std::int64_t cols = p.cols;
  const std::int64_t next = row + 1 < p.rows ? cols : 0;
  const T* x = p.input + row * cols;
  const T* const next_input = x + next;
  const T* next_residual = next_input;
  A total;
  if (p.residual != nullptr) {
    const T* const residual = p.residual + row * cols;
    next_residual = residual + next;
    T* const sum = p.sum + row * cols;
    total = row_sum<T>(
        cols, [=](std::int64_t c, int count) __attribute__((always_inline)) {
          store<T>(sum + c, load<T>(x + c, count) + load<T>(residual + c, count), count);
          return load<T>(sum + c, count);  // rounded to T, as the backward pass will see it
        });
    x = sum;
  } else {
    total = row_sum<T>(
        cols, [=](std::int64_t c, int count)
                  __attribute__((always_inline)) { return load<T>(x + c, count); });
  }
  const A mean = total / static_cast<A>(cols);
  const A squares = row_sum<T>(
      cols, [=](std::int64_t c, int count) __attribute__((always_inline)) {
        __builtin_prefetch(next_input + c);  // see Note [Prefetching rows]
        const Vec<T> centred = load<T>(x + c, count) - mean;
        return centred * centred;
      });
  const A rstd = A(1) / std::sqrt(squares / static_cast<A>(cols) + p.eps);
  p.mean[row] = mean;
  p.rstd[row] = rstd;
  const T* const weight = p.weight;
  const T* const bias = p.bias;
  T* const output = p.output + row * cols;
  for_each_vector<T>(
      cols, [=](std::int64_t c, int count) __attribute__((always_inline)) {
        __builtin_prefetch(next_residual + c);
        Vec<T> y = (load<T>(x + c, count) - mean) * rstd;
        const Vec<T> shift = bias != nullptr ? load<T>(bias + c, count) : Vec<T>{};
        y = weight != nullptr ? madd(y, load<T>(weight + c, count), shift) : y + shift;
        store<T>(output + c, y, count);
      });
}

template <typename T>
SHERD_INLINE Vec<T> weighted_grad(const T* weight, const T* grad, std::int64_t c, int count) {
  const Vec<T> g = load<T>(grad + c, count);
  return weight != nullptr ? g * load<T>(weight + c, count) : g;
}

// With h = (x - mean) rstd and d = grad_output * weight, grad_input is
// rstd (d - mean(d) - h mean(d h)).
template <typename T>
SHERD_INLINE void grad_input_row(const LayerNormBackward<T>& p, std::int64_t row) {
  using A = acc_t<T>;
  const std::int64_t cols = p.cols;
  const T* const x = p.input + row * cols;
  const T* const grad = p.grad_output + row * cols;
  const T* const weight = p.weight;
  T* const out = p.grad_input + row * cols;
  const A mean = p.mean[row], rstd = p.rstd[row];
  const std::int64_t next = row + 1 < p.rows ? cols : 0;
  Vec<T> sums[2] = {}, dots[2] = {};
  const auto add_to = [&](int k, std::int64_t c, int count) __attribute__((always_inline)) {
    __builtin_prefetch(x + next + c);                           // see Note [Prefetching rows]
    const Vec<T> d = weighted_grad<T>(weight, grad, c, count);  // zero past count, if x is not
    sums[k] += d;
    dots[k] += d * (load<T>(x + c, count) - mean);
  };
  constexpr int n = kLanes<T>;
  std::int64_t at = 0;
  for (; at + 2 * n <= cols; at += 2 * n) {
    add_to(0, at, n);
    add_to(1, at + n, n);
  }
  if (at + n <= cols) {
    add_to(0, at, n);
    at += n;
  }
  if (at < cols) add_to(1, at, static_cast<int>(cols - at));
  const A sum = horizontal_sum<T>(sums[0] + sums[1]), dot = horizontal_sum<T>(dots[0] + dots[1]);
  const A shift = sum / static_cast<A>(cols);
  const A slope = dot * rstd * rstd / static_cast<A>(cols);
  const bool accumulate = p.accumulate;
  for_each_vector<T>(
      cols, [=](std::int64_t c, int count) __attribute__((always_inline)) {
        __builtin_prefetch(grad + next + c);
        const Vec<T> centred = load<T>(x + c, count) - mean;
        const Vec<T> d = weighted_grad<T>(weight, grad, c, count) - shift;
        const Vec<T> result = madd(-centred, broadcast<T>(slope), d) * rstd;
        store<T>(out + c, accumulate ? load<T>(out + c, count) + result : result, count);
      });
}

// Adds the row's share to the block's grad_weight and grad_bias.
template <typename T>
SHERD_INLINE void grad_parameters_row(const LayerNormBackward<T>& p, std::int64_t row,
                                      acc_t<T>* grad_weight, acc_t<T>* grad_bias) {
  using A = acc_t<T>;
  const T* const x = p.input + row * p.cols;
  const T* const grad = p.grad_output + row * p.cols;
  const A mean = p.mean[row], rstd = p.rstd[row];
  const T* const to_write = p.grad_input != nullptr ? p.grad_input + row * p.cols : grad;
  for_each_vector<T>(
      p.cols, [=](std::int64_t c, int count) __attribute__((always_inline)) {
        __builtin_prefetch(to_write + c, 1);  // see Note [Prefetching rows]
        const Vec<T> g = load<T>(grad + c, count);
        const Vec<T> h = (load<T>(x + c, count) - mean) * rstd;
        store<A>(grad_weight + c, madd(g, h, load<A>(grad_weight + c, count)), count);
        store<A>(grad_bias + c, load<A>(grad_bias + c, count) + g, count);
      });
}

}  // namespace

template <typename T>
void layer_norm_forward(int threads, const LayerNormForward<T>& p) {
  parallel_blocks(threads, p.rows, rows_per_task(p.cols),
                  [&](std::int64_t begin, std::int64_t end) {
                    const LayerNormForward<T> local = p;
                    for (std::int64_t row = begin; row < end; ++row) normalize_row<T>(local, row);
                  });
}

template <typename T>
std::size_t layer_norm_backward_workspace_bytes(std::int64_t rows, std::int64_t cols) {
  return 2 * column_sum_workspace_bytes<T>(rows, cols);
}

template <typename T>
void layer_norm_backward(int threads, const LayerNormBackward<T>& p) {
  using A = acc_t<T>;
  const bool parameters = p.grad_weight != nullptr || p.grad_bias != nullptr;
  // See Note [Column sums in blocks]: a block's row of the workspace is grad_weight, then
  // grad_bias.
  parallel_blocks(threads, p.rows, kColumnSumRows, [&](std::int64_t begin, std::int64_t end) {
    const LayerNormBackward<T> local = p;
    A* partial = nullptr;
    if (parameters) {
      partial = local.workspace + begin / kColumnSumRows * 2 * local.cols;
      std::fill(partial, partial + 2 * local.cols, A(0));
    }
    for (std::int64_t row = begin; row < end; ++row) {
      // First the parameters: grad_input may take grad_output's place.
      if (parameters) grad_parameters_row<T>(local, row, partial, partial + local.cols);
      if (p.grad_input != nullptr) grad_input_row<T>(local, row);
    }
  });
  const std::int64_t blocks = (p.rows + kColumnSumRows - 1) / kColumnSumRows;
  if (p.grad_weight != nullptr) {
    add_blocks<A>(threads, blocks, p.cols, 2 * p.cols, p.workspace, p.grad_weight);
  }
  if (p.grad_bias != nullptr) {
    add_blocks<A>(threads, blocks, p.cols, 2 * p.cols, p.workspace + p.cols, p.grad_bias);
  }
}

#define SHERD_INSTANTIATE(T)                                              \
  template void layer_norm_forward<T>(int, const LayerNormForward<T>&);   \
  template void layer_norm_backward<T>(int, const LayerNormBackward<T>&); \
  template std::size_t layer_norm_backward_workspace_bytes<T>(std::int64_t, std::int64_t);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cpu
