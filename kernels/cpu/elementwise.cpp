// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/arguments/rounding.h>
#include <sherd/kernels/cpu/elementwise.h>
#include <sherd/kernels/cpu/vector_loop.h>

namespace sherd::cpu {

template <typename T>
void fill(int threads, std::int64_t n, acc_t<T> value, T* out) {
  parallel_vectors<T>(threads, n, [=](std::int64_t i, int count) {
    store<T>(out + i, broadcast<T>(value), count);
  });
}

template <typename T>
void add(int threads, std::int64_t n, const T* a, const T* b, T* out) {
  parallel_vectors<T>(threads, n, [=](std::int64_t i, int count) {
    store<T>(out + i, load<T>(a + i, count) + load<T>(b + i, count), count);
  });
}

template <typename T>
void add_inplace(int threads, std::int64_t n, const T* x, T* y) {
  add(threads, n, y, x, y);
}

template <typename T>
void accumulate(int threads, std::int64_t n, const T* x, acc_t<T>* y) {
  using A = acc_t<T>;
  parallel_vectors<T>(threads, n, [=](std::int64_t i, int count) {
    store<A>(y + i, load<A>(y + i, count) + load<T>(x + i, count), count);
  });
}

template <typename T>
void scale(int threads, std::int64_t n, const T* a, acc_t<T> factor, T* out) {
  parallel_vectors<T>(threads, n, [=](std::int64_t i, int count) {
    store<T>(out + i, load<T>(a + i, count) * factor, count);
  });
}

template <typename T>
void relu_forward(int threads, std::int64_t n, const T* input, T* output) {
  parallel_vectors<T>(threads, n, [=](std::int64_t i, int count) {
    // In this order a NaN, which is not less than zero, is what vmax picks.
    store<T>(output + i, vmax(Vec<T>{}, load<T>(input + i, count)), count);
  });
}

template <typename T>
void relu_backward(int threads, std::int64_t n, const T* x, const T* grad_output, T* grad_input) {
  parallel_vectors<T>(threads, n, [=](std::int64_t i, int count) {
    const Mask<T> dead = load<T>(x + i, count) <= Vec<T>{};
    store<T>(grad_input + i, keep<T>(~dead, load<T>(grad_output + i, count)), count);
  });
}

namespace {
// Calls body(row, offset, count) for each vector of each row; long rows are cut, short ones share a
// task.
template <typename T, typename Body>
SHERD_INLINE void parallel_row_vectors(int threads, std::int64_t rows, std::int64_t cols,
                                       const Body& body) {
  if (rows == 0 || cols == 0) return;
  const std::int64_t parts = (cols + kElementwiseBlock - 1) / kElementwiseBlock;
  const std::int64_t group = rows_per_task(cols);
  const std::int64_t groups = (rows + group - 1) / group;
  parallel_tasks(threads, groups * parts, [=](std::int64_t task) {
    const Body local = body;
    const std::int64_t begin = task % parts * kElementwiseBlock;
    const std::int64_t end = std::min(cols, begin + kElementwiseBlock);
    const std::int64_t last = std::min(rows, (task / parts + 1) * group);
    for (std::int64_t row = task / parts * group; row < last; ++row) {
      for_each_vector<T>(
          end - begin, [=](std::int64_t i, int count) __attribute__((always_inline)) {
            local(row, row * cols + begin + i, count);
          });
    }
  });
}
}  // namespace

template <typename T>
void scale_rows(int threads, std::int64_t rows, std::int64_t cols, const T* in,
                const acc_t<T>* row_scale, T* out) {
  parallel_row_vectors<T>(threads, rows, cols, [=](std::int64_t row, std::int64_t i, int count) {
    store<T>(out + i, load<T>(in + i, count) * row_scale[row], count);
  });
}

template <typename T>
void add_scaled_rows(int threads, std::int64_t rows, std::int64_t cols, const T* a, const T* b,
                     const acc_t<T>* row_scale, T* out) {
  parallel_row_vectors<T>(threads, rows, cols, [=](std::int64_t row, std::int64_t i, int count) {
    const Vec<T> factor = broadcast<T>(row_scale[row]);
    store<T>(out + i, madd(load<T>(b + i, count), factor, load<T>(a + i, count)), count);
  });
}

namespace {
template <typename From, typename To>
To convert(From value) {
  if constexpr (std::is_same_v<From, bf16> || std::is_same_v<From, f16>) {
    return static_cast<To>(static_cast<float>(value));
  } else {
    return static_cast<To>(value);
  }
}

// A vector's worth of numbers as fp32 that T's own rounding may follow.
template <typename From>
float before_rounding(From value) {
  if constexpr (std::is_same_v<From, double>) {
    return arguments::round_to_odd(value);
  } else {
    return static_cast<float>(value);
  }
}
}  // namespace

template <typename From, typename To>
void cast(int threads, std::int64_t n, const From* in, To* out) {
  if constexpr (!std::is_same_v<From, std::uint8_t> && std::is_same_v<acc_t<From>, acc_t<To>>) {
    parallel_vectors<From>(threads, n, [=](std::int64_t i, int count) {
      store<To>(out + i, load<From>(in + i, count), count);
    });
  } else if constexpr (std::is_same_v<To, bf16> || std::is_same_v<To, f16>) {
    parallel_vectors<To>(threads, n, [=](std::int64_t i, int count) {
      float numbers[kLanes<To>] = {};
      for (int k = 0; k < count; ++k) numbers[k] = before_rounding(in[i + k]);
      store<To>(out + i, load<float>(numbers), count);
    });
  } else {
    parallel_blocks(threads, n, kElementwiseBlock, [=](std::int64_t begin, std::int64_t end) {
      const From* const from = in;
      To* const to = out;
      for (std::int64_t i = begin; i < end; ++i) to[i] = convert<From, To>(from[i]);
    });
  }
}

#define SHERD_INSTANTIATE(T)                                                                   \
  template void fill<T>(int, std::int64_t, acc_t<T>, T*);                                      \
  template void add<T>(int, std::int64_t, const T*, const T*, T*);                             \
  template void add_inplace<T>(int, std::int64_t, const T*, T*);                               \
  template void accumulate<T>(int, std::int64_t, const T*, acc_t<T>*);                         \
  template void scale<T>(int, std::int64_t, const T*, acc_t<T>, T*);                           \
  template void relu_forward<T>(int, std::int64_t, const T*, T*);                              \
  template void relu_backward<T>(int, std::int64_t, const T*, const T*, T*);                   \
  template void scale_rows<T>(int, std::int64_t, std::int64_t, const T*, const acc_t<T>*, T*); \
  template void add_scaled_rows<T>(int, std::int64_t, std::int64_t, const T*, const T*,        \
                                   const acc_t<T>*, T*);                                       \
  template void cast<T, double>(int, std::int64_t, const T*, double*);                         \
  template void cast<T, float>(int, std::int64_t, const T*, float*);                           \
  template void cast<T, bf16>(int, std::int64_t, const T*, bf16*);                             \
  template void cast<T, f16>(int, std::int64_t, const T*, f16*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

template void cast<std::uint8_t, double>(int, std::int64_t, const std::uint8_t*, double*);
template void cast<std::uint8_t, float>(int, std::int64_t, const std::uint8_t*, float*);
template void cast<std::uint8_t, bf16>(int, std::int64_t, const std::uint8_t*, bf16*);
template void cast<std::uint8_t, f16>(int, std::int64_t, const std::uint8_t*, f16*);

}  // namespace sherd::cpu
