// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cuda/elementwise.h>
#include <sherd/kernels/cuda/map.h>
#include <sherd/kernels/cuda/math.h>

namespace sherd::cuda {
namespace {

template <typename T>
struct Fill {
  T value;
  __device__ T operator()() const { return value; }
};
struct Add {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return from_acc<T>(to_acc(a) + to_acc(b));
  }
};
template <typename T>
struct Accumulate {
  __device__ acc_t<T> operator()(acc_t<T> y, T x) const { return y + to_acc(x); }
};
template <typename T>
struct Scale {
  acc_t<T> factor;
  __device__ T operator()(T a) const { return from_acc<T>(to_acc(a) * factor); }
};
struct ReluForward {
  template <typename T>
  __device__ T operator()(T x) const {
    return acc_t<T>(0) > to_acc(x) ? from_acc<T>(0) : x;  // x where x is NaN
  }
};
struct ReluBackward {
  template <typename T>
  __device__ T operator()(T x, T grad) const {
    return to_acc(x) <= acc_t<T>(0) ? from_acc<T>(0) : grad;
  }
};

// [rows, cols] with a factor for each row: a block takes a piece of a row, and rows gridDim.y
// apart.
constexpr unsigned kMostRowBlocks = 65535;

template <int V, typename T, bool kAdds>
__global__ void __launch_bounds__(kMapThreads)
    scale_rows_kernel(std::int64_t rows, std::int64_t cols, const T* a, const T* b,
                      const acc_t<T>* row_scale, T* out) {
  const std::int64_t col = (static_cast<std::int64_t>(blockIdx.x) * kMapThreads + threadIdx.x) * V;
  if (col >= cols) return;
  for (std::int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const acc_t<T> factor = row_scale[row];
    const Pack<T, V> y = load<V>(b + row * cols + col);
    Pack<T, V> x, result;
    if constexpr (kAdds) x = load<V>(a + row * cols + col);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if constexpr (kAdds) {
        result.at[i] = from_acc<T>(madd(to_acc(y.at[i]), factor, to_acc(x.at[i])));
      } else {
        result.at[i] = from_acc<T>(to_acc(y.at[i]) * factor);
      }
    }
    store<V>(out + row * cols + col, result);
  }
}

template <typename T, bool kAdds>
void scale_rows(Stream& stream, std::int64_t rows, std::int64_t cols, const T* a, const T* b,
                const acc_t<T>* row_scale, T* out) {
  if (rows == 0 || cols == 0) return;
  constexpr int V = kVectorOf<T>;
  const bool vectors = cols % V == 0 && elements_before_vectors<V>(a, b, out) == 0;
  const std::int64_t pieces = ceil_div(cols, kMapThreads * (vectors ? V : 1));
  const dim3 grid(static_cast<unsigned>(pieces),
                  static_cast<unsigned>(std::min<std::int64_t>(rows, kMostRowBlocks)));
  const auto kernel = vectors ? scale_rows_kernel<V, T, kAdds> : scale_rows_kernel<1, T, kAdds>;
  launch(kernel, grid, dim3(kMapThreads), 0, native(stream), rows, cols, a, b, row_scale, out);
}

}  // namespace

template <typename T>
void fill(Stream& stream, std::int64_t n, acc_t<T> value, T* out) {
  map(stream, n, Fill<T>{T(value)}, out);
}
template <typename T>
void add(Stream& stream, std::int64_t n, const T* a, const T* b, T* out) {
  map(stream, n, Add{}, out, a, b);
}
template <typename T>
void add_inplace(Stream& stream, std::int64_t n, const T* x, T* y) {
  map(stream, n, Add{}, y, y, x);
}
template <typename T>
void accumulate(Stream& stream, std::int64_t n, const T* x, acc_t<T>* y) {
  map(stream, n, Accumulate<T>{}, y, y, x);
}
template <typename T>
void scale(Stream& stream, std::int64_t n, const T* a, acc_t<T> factor, T* out) {
  map(stream, n, Scale<T>{factor}, out, a);
}
template <typename T>
void relu_forward(Stream& stream, std::int64_t n, const T* input, T* output) {
  map(stream, n, ReluForward{}, output, input);
}
template <typename T>
void relu_backward(Stream& stream, std::int64_t n, const T* x, const T* grad_output,
                   T* grad_input) {
  map(stream, n, ReluBackward{}, grad_input, x, grad_output);
}
template <typename T>
void scale_rows(Stream& stream, std::int64_t rows, std::int64_t cols, const T* in,
                const acc_t<T>* row_scale, T* out) {
  scale_rows<T, false>(stream, rows, cols, nullptr, in, row_scale, out);
}
template <typename T>
void add_scaled_rows(Stream& stream, std::int64_t rows, std::int64_t cols, const T* a, const T* b,
                     const acc_t<T>* row_scale, T* out) {
  scale_rows<T, true>(stream, rows, cols, a, b, row_scale, out);
}

#define SHERD_INSTANTIATE(T)                                                                       \
  template void fill<T>(Stream&, std::int64_t, acc_t<T>, T*);                                      \
  template void add<T>(Stream&, std::int64_t, const T*, const T*, T*);                             \
  template void add_inplace<T>(Stream&, std::int64_t, const T*, T*);                               \
  template void accumulate<T>(Stream&, std::int64_t, const T*, acc_t<T>*);                         \
  template void scale<T>(Stream&, std::int64_t, const T*, acc_t<T>, T*);                           \
  template void relu_forward<T>(Stream&, std::int64_t, const T*, T*);                              \
  template void relu_backward<T>(Stream&, std::int64_t, const T*, const T*, T*);                   \
  template void scale_rows<T>(Stream&, std::int64_t, std::int64_t, const T*, const acc_t<T>*, T*); \
  template void add_scaled_rows<T>(Stream&, std::int64_t, std::int64_t, const T*, const T*,        \
                                   const acc_t<T>*, T*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cuda
