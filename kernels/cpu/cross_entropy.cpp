// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/cross_entropy.h>
#include <sherd/kernels/cpu/math.h>
#include <sherd/kernels/cpu/vector_loop.h>

#include <limits>

namespace sherd::cpu {
namespace {

// A row's maximum; what it is when the row holds a NaN is not said.
template <typename T>
SHERD_INLINE acc_t<T> row_max(std::int64_t cols, const T* x) {
  constexpr int n = kLanes<T>;
  const Vec<T> lowest = broadcast<T>(-std::numeric_limits<acc_t<T>>::infinity());
  Vec<T> best0 = lowest, best1 = lowest;  // two, so as not to wait for each step
  std::int64_t c = 0;
  for (; c + 2 * n <= cols; c += 2 * n) {
    best0 = vmax(best0, load<T>(x + c));
    best1 = vmax(best1, load<T>(x + c + n));
  }
  if (c + n <= cols) {
    best0 = vmax(best0, load<T>(x + c));
    c += n;
  }
  if (c < cols) {
    const auto count = static_cast<int>(cols - c);
    best1 = vmax(best1, select(lanes_below<T>(count), load_first<T>(x + c, count), lowest));
  }
  return horizontal_max<T>(vmax(best0, best1));
}

template <typename T>
SHERD_INLINE acc_t<T> row_lse(std::int64_t classes, const T* x) {
  const acc_t<T> highest = row_max<T>(classes, x);
  return highest + std::log(row_sum<T>(
                       classes, [=](std::int64_t c, int count) __attribute__((always_inline)) {
                         return vexp(load<T>(x + c, count) - highest);
                       }));
}

// -log softmax, summed with the row's targets as weights.
template <typename T>
SHERD_INLINE acc_t<T> row_loss_of(const CrossEntropy<T>& p, std::int64_t row, acc_t<T> lse) {
  using A = acc_t<T>;
  const T* const x = p.logits + row * p.classes;
  const A rest = A(1) - p.smoothing;
  const A spread = p.smoothing / static_cast<A>(p.classes);
  if (p.soft_targets != nullptr) {
    const A* const target = p.soft_targets + row * p.classes;
    return row_sum<T>(
        p.classes, [=](std::int64_t c, int count) __attribute__((always_inline)) {
          const Vec<T> t =
              madd(load<A>(target + c, count), broadcast<T>(rest), broadcast<T>(spread));
          return t * (lse - load<T>(x + c, count));
        });
  }
  const A picked = lse - static_cast<A>(x[p.labels[row]]);
  if (p.smoothing == 0) return picked;
  const A all = row_sum<T>(
      p.classes, [=](std::int64_t c, int count)
                     __attribute__((always_inline)) { return lse - load<T>(x + c, count); });
  return rest * picked + spread * all;
}

template <typename T>
SHERD_INLINE void soft_grad_row(const CrossEntropy<T>& p, std::int64_t row, acc_t<T> lse,
                                acc_t<T> scale, T* grad) {
  using A = acc_t<T>;
  const T* const x = p.logits + row * p.classes;
  const A* const target = p.soft_targets + row * p.classes;
  const A rest = A(1) - p.smoothing;
  const A spread = p.smoothing / static_cast<A>(p.classes);
  const A total =
      rest * row_sum<T>(
                 p.classes, [=](std::int64_t c, int count) __attribute__((
                                always_inline)) { return load<A>(target + c, count); }) +
      p.smoothing;
  for_each_vector<T>(
      p.classes, [=](std::int64_t c, int count) __attribute__((always_inline)) {
        const Vec<T> t = madd(load<A>(target + c, count), broadcast<T>(rest), broadcast<T>(spread));
        store<T>(grad + c, (vexp(load<T>(x + c, count) - lse) * total - t) * scale, count);
      });
}

template <typename T>
SHERD_INLINE void hard_grad_row(const CrossEntropy<T>& p, std::int64_t row, acc_t<T> lse,
                                acc_t<T> scale, T* grad) {
  using A = acc_t<T>;
  const T* const x = p.logits + row * p.classes;
  const A spread = p.smoothing / static_cast<A>(p.classes);
  // The label's own element is computed apart, and before grad may overwrite the logits.
  const std::int64_t label = p.labels[row];
  const Vec<T> softmax = vexp(broadcast<T>(static_cast<A>(x[label]) - lse));
  const Vec<T> at_label = (softmax - ((A(1) - p.smoothing) + spread)) * scale;
  for_each_vector<T>(
      p.classes, [=](std::int64_t c, int count) __attribute__((always_inline)) {
        store<T>(grad + c, (vexp(load<T>(x + c, count) - lse) - spread) * scale, count);
      });
  store_first<T>(grad + label, at_label, 1);
}

}  // namespace

template <typename T>
void cross_entropy_forward(int threads, const CrossEntropy<T>& p, acc_t<T>* row_loss,
                           acc_t<T>* lse) {
  parallel_blocks(threads, p.rows, rows_per_task(p.classes),
                  [&](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t row = begin; row < end; ++row) {
                      lse[row] = row_lse<T>(p.classes, p.logits + row * p.classes);
                      row_loss[row] = row_loss_of<T>(p, row, lse[row]);
                    }
                  });
}

template <typename T>
void cross_entropy_backward(int threads, const CrossEntropy<T>& p, const acc_t<T>* lse,
                            acc_t<T> scale, const acc_t<T>* row_scale, T* grad_logits) {
  parallel_blocks(threads, p.rows, rows_per_task(p.classes),
                  [&](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t row = begin; row < end; ++row) {
                      const acc_t<T> factor = row_scale != nullptr ? scale * row_scale[row] : scale;
                      T* const grad = grad_logits + row * p.classes;
                      if (p.soft_targets != nullptr) {
                        soft_grad_row<T>(p, row, lse[row], factor, grad);
                      } else {
                        hard_grad_row<T>(p, row, lse[row], factor, grad);
                      }
                    }
                  });
}

std::int64_t first_bad_label(std::int64_t rows, std::int64_t classes, const std::int64_t* labels) {
  for (std::int64_t row = 0; row < rows; ++row) {
    if (labels[row] < 0 || labels[row] >= classes) return row;
  }
  return -1;
}

namespace {
template <typename T>
std::int64_t argmax_of(std::int64_t classes, const T* x) {
  Mask<T> largest = {};
  for_each_vector<T>(
      classes, [&](std::int64_t c, int count) __attribute__((always_inline)) {
        largest = vmax(largest, magnitude_bits<T>(load<T>(x + c, count)));
      });
  const auto magnitude = (Vec<T>)largest;
  if (any_lane<T>(magnitude != magnitude)) return -1;
  const acc_t<T> highest = row_max<T>(classes, x);
  std::int64_t c = 0;
  while (c + kLanes<T> <= classes && !any_lane<T>(load<T>(x + c) == highest)) c += kLanes<T>;
  while (static_cast<acc_t<T>>(x[c]) != highest) ++c;
  return c;
}
}  // namespace

template <typename T>
void argmax_rows(int threads, std::int64_t rows, std::int64_t classes, const T* logits,
                 std::int64_t* index) {
  parallel_blocks(threads, rows, rows_per_task(classes), [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      index[row] = argmax_of<T>(classes, logits + row * classes);
    }
  });
}

std::int64_t count_equal(std::int64_t rows, const std::int64_t* index, const std::int64_t* labels) {
  std::int64_t equal = 0;
  for (std::int64_t row = 0; row < rows; ++row) equal += index[row] == labels[row] ? 1 : 0;
  return equal;
}

#define SHERD_INSTANTIATE(T)                                                                      \
  template void cross_entropy_forward<T>(int, const CrossEntropy<T>&, acc_t<T>*, acc_t<T>*);      \
  template void cross_entropy_backward<T>(int, const CrossEntropy<T>&, const acc_t<T>*, acc_t<T>, \
                                          const acc_t<T>*, T*);                                   \
  template void argmax_rows<T>(int, std::int64_t, std::int64_t, const T*, std::int64_t*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cpu
