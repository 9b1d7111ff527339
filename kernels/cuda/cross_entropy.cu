// SPDX-License-Identifier: Apache-2.0
// A row takes a warp, or where there are many classes a block. Its logits are read once for each
// pass: they are few, and stay in the cache.
#include <sherd/kernels/cuda/cross_entropy.h>
#include <sherd/kernels/cuda/vector.h>

#include <cmath>
#include <limits>

namespace sherd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr std::int64_t kManyClasses = 2048;

// The threads of a row, and what they compute together.
template <bool wide>
struct RowThreads {
  static constexpr int kCount = wide ? kThreads : kWarp;
  std::int64_t row;
  int first;

  __device__ __forceinline__ RowThreads()
      : row(wide ? std::int64_t{blockIdx.x}
                 : std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp),
        first(static_cast<int>(wide ? threadIdx.x : threadIdx.x % kWarp)) {}

  template <typename Body>
  __device__ __forceinline__ void each(std::int64_t classes, const Body& body) const {
    for (std::int64_t c = first; c < classes; c += kCount) body(c);
  }
  template <typename A>
  __device__ __forceinline__ A sum(A value, A* shared) const {
    if constexpr (wide) return block_sum(value, shared);
    return warp_sum(value);
  }
  template <typename A>
  __device__ __forceinline__ A max(A value, A* shared) const {
    if constexpr (wide) return block_max(value, shared);
    return warp_max(value);
  }
};

template <typename A>
__device__ __forceinline__ A nan() {
  return std::numeric_limits<A>::quiet_NaN();
}

template <typename T>
__device__ __forceinline__ bool label_fits(const CrossEntropy<T>& p, std::int64_t row) {
  return p.labels[row] >= 0 && p.labels[row] < p.classes;
}

template <typename T, bool wide>
__global__ void __launch_bounds__(kThreads)
    forward_rows(CrossEntropy<T> p, acc_t<T>* row_loss, acc_t<T>* lse) {
  using A = acc_t<T>;
  SHERD_SHARED(A, shared, kWarp);
  const RowThreads<wide> threads;
  const std::int64_t row = threads.row;
  if (row >= p.rows) return;
  const T* const x = p.logits + row * p.classes;
  A highest = -std::numeric_limits<A>::infinity();
  threads.each(p.classes, [&](std::int64_t c) {
    const A value = to_acc(x[c]);
    highest = value > highest ? value : highest;  // a NaN shows in the sum
  });
  highest = threads.max(highest, shared);
  A sum = 0;
  threads.each(p.classes, [&](std::int64_t c) { sum += std::exp(to_acc(x[c]) - highest); });
  const A log_sum = highest + std::log(threads.sum(sum, shared));

  const A rest = A(1) - p.smoothing, spread = p.smoothing / static_cast<A>(p.classes);
  A loss = 0;
  if (p.soft_targets != nullptr) {
    const A* const target = p.soft_targets + row * p.classes;
    threads.each(p.classes, [&](std::int64_t c) {
      loss += std::fma(target[c], rest, spread) * (log_sum - to_acc(x[c]));
    });
    loss = threads.sum(loss, shared);
  } else {
    const bool fits = label_fits(p, row);
    const A picked = fits ? log_sum - to_acc(x[p.labels[row]]) : nan<A>();
    A all = 0;
    if (p.smoothing != 0) {
      threads.each(p.classes, [&](std::int64_t c) { all += log_sum - to_acc(x[c]); });
      all = threads.sum(all, shared);
    }
    loss = p.smoothing != 0 ? rest * picked + spread * all : picked;
  }
  if (threads.first == 0) {
    row_loss[row] = loss;
    lse[row] = log_sum;
  }
}

template <typename T, bool wide>
__global__ void __launch_bounds__(kThreads)
    backward_rows(CrossEntropy<T> p, const acc_t<T>* lse, const acc_t<T>* grad_loss,
                  acc_t<T> factor, const acc_t<T>* row_scale, T* grad_logits) {
  using A = acc_t<T>;
  SHERD_SHARED(A, shared, kWarp);
  const RowThreads<wide> threads;
  const std::int64_t row = threads.row;
  if (row >= p.rows) return;
  const T* const x = p.logits + row * p.classes;
  T* const grad = grad_logits + row * p.classes;
  const A log_sum = lse[row];
  const A scale = grad_loss[0] * factor;
  const A row_factor = row_scale != nullptr ? scale * row_scale[row] : scale;
  const A rest = A(1) - p.smoothing, spread = p.smoothing / static_cast<A>(p.classes);
  if (p.soft_targets != nullptr) {
    const A* const target = p.soft_targets + row * p.classes;
    A total = 0;
    threads.each(p.classes, [&](std::int64_t c) { total += target[c]; });
    total = rest * threads.sum(total, shared) + p.smoothing;
    threads.each(p.classes, [&](std::int64_t c) {
      const A t = std::fma(target[c], rest, spread);
      grad[c] = from_acc<T>((std::exp(to_acc(x[c]) - log_sum) * total - t) * row_factor);
    });
    return;
  }
  const bool fits = label_fits(p, row);
  const std::int64_t label = p.labels[row];
  threads.each(p.classes, [&](std::int64_t c) {
    const A t = c == label ? rest + spread : spread;
    const A value = (std::exp(to_acc(x[c]) - log_sum) - t) * row_factor;
    grad[c] = from_acc<T>(fits ? value : nan<A>());
  });
}

template <typename T, bool wide>
__global__ void __launch_bounds__(kThreads)
    argmax(std::int64_t rows, std::int64_t classes, const T* logits, std::int64_t* index) {
  using A = acc_t<T>;
  SHERD_SHARED(A, shared, kWarp);
  SHERD_SHARED(std::int64_t, shared_places, kWarp);
  const RowThreads<wide> threads;
  if (threads.row >= rows) return;
  const T* const x = logits + threads.row * classes;
  A highest = -std::numeric_limits<A>::infinity();
  std::int64_t any_nan = 0;
  threads.each(classes, [&](std::int64_t c) {
    const A value = to_acc(x[c]);
    highest = value > highest ? value : highest;
    if (value != value) any_nan = 1;
  });
  highest = threads.max(highest, shared);
  any_nan = threads.max(any_nan, shared_places);
  std::int64_t before_end = 0;  // classes - index: the largest is the first place
  threads.each(classes, [&](std::int64_t c) {
    if (before_end == 0 && to_acc(x[c]) == highest) before_end = classes - c;
  });
  before_end = threads.max(before_end, shared_places);
  if (threads.first == 0) index[threads.row] = any_nan != 0 ? -1 : classes - before_end;
}

// One block each: these are for a batch of rows, and then read by the host.
__global__ void __launch_bounds__(kThreads)
    find_bad_label(std::int64_t rows, std::int64_t classes, const std::int64_t* labels,
                   std::int64_t* result) {
  SHERD_SHARED(std::int64_t, shared, kWarp);
  std::int64_t before_end = 0;
  for (std::int64_t row = threadIdx.x; row < rows; row += kThreads) {
    const bool bad = labels[row] < 0 || labels[row] >= classes;
    if (bad && before_end == 0) before_end = rows - row;
  }
  before_end = block_max(before_end, shared);
  if (threadIdx.x == 0) *result = before_end != 0 ? rows - before_end : -1;
}
__global__ void __launch_bounds__(kThreads)
    count_equal_rows(std::int64_t rows, const std::int64_t* index, const std::int64_t* labels,
                     std::int64_t* result) {
  SHERD_SHARED(std::int64_t, shared, kWarp);
  std::int64_t count = 0;
  for (std::int64_t row = threadIdx.x; row < rows; row += kThreads)
    count += index[row] == labels[row] && index[row] >= 0 ? 1 : 0;
  count = block_sum(count, shared);
  if (threadIdx.x == 0) *result = count;
}

// Calls body(wide, grid) with what suits rows of so many classes.
template <typename Body>
void for_rows(std::int64_t rows, std::int64_t classes, const Body& body) {
  if (rows == 0) return;
  if (classes > kManyClasses) {
    body(std::true_type{}, dim3(static_cast<unsigned>(rows)));
  } else {
    body(std::false_type{}, dim3(static_cast<unsigned>(ceil_div(rows, kWarps))));
  }
}

}  // namespace

template <typename T>
void cross_entropy_forward(Stream& stream, const CrossEntropy<T>& p, acc_t<T>* row_loss,
                           acc_t<T>* lse) {
  for_rows(p.rows, p.classes, [&](auto wide, dim3 grid) {
    launch(forward_rows<T, wide>, grid, dim3(kThreads), 0, native(stream), p, row_loss, lse);
  });
}

template <typename T>
void cross_entropy_backward(Stream& stream, const CrossEntropy<T>& p, const acc_t<T>* lse,
                            const acc_t<T>* grad_loss, acc_t<T> factor, const acc_t<T>* row_scale,
                            T* grad_logits) {
  for_rows(p.rows, p.classes, [&](auto wide, dim3 grid) {
    launch(backward_rows<T, wide>, grid, dim3(kThreads), 0, native(stream), p, lse, grad_loss,
           factor, row_scale, grad_logits);
  });
}

template <typename T>
void argmax_rows(Stream& stream, std::int64_t rows, std::int64_t classes, const T* logits,
                 std::int64_t* index) {
  for_rows(rows, classes, [&](auto wide, dim3 grid) {
    launch(argmax<T, wide>, grid, dim3(kThreads), 0, native(stream), rows, classes, logits, index);
  });
}

void first_bad_label(Stream& stream, std::int64_t rows, std::int64_t classes,
                     const std::int64_t* labels, std::int64_t* row) {
  launch(find_bad_label, dim3(1), dim3(kThreads), 0, native(stream), rows, classes, labels, row);
}

void count_equal(Stream& stream, std::int64_t rows, const std::int64_t* index,
                 const std::int64_t* labels, std::int64_t* count) {
  launch(count_equal_rows, dim3(1), dim3(kThreads), 0, native(stream), rows, index, labels, count);
}

#define SHERD_INSTANTIATE(T)                                                                     \
  template void cross_entropy_forward<T>(Stream&, const CrossEntropy<T>&, acc_t<T>*, acc_t<T>*); \
  template void cross_entropy_backward<T>(Stream&, const CrossEntropy<T>&, const acc_t<T>*,      \
                                          const acc_t<T>*, acc_t<T>, const acc_t<T>*, T*);       \
  template void argmax_rows<T>(Stream&, std::int64_t, std::int64_t, const T*, std::int64_t*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cuda
