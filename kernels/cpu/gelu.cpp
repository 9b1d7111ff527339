// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/gelu.h>
#include <sherd/kernels/cpu/math.h>
#include <sherd/kernels/cpu/vector_loop.h>

namespace sherd::cpu {
namespace {

// Heavier than a copy, so worth sharing out in smaller pieces.
constexpr std::int64_t kBlock = kElementwiseBlock / 4;
constexpr double kSlope = arguments::kGeluSlope;
constexpr double kCubic = arguments::kGeluCubic;

template <typename T>
SHERD_INLINE Vec<T> tanh_of_inner(Vec<T> x) {
  const Vec<T> cubic = broadcast<T>(static_cast<acc_t<T>>(kSlope * kCubic));
  return vtanh(x * madd(x * x, cubic, broadcast<T>(static_cast<acc_t<T>>(kSlope))));
}

template <typename T, GeluForm kForm>
SHERD_INLINE Vec<T> gelu(Vec<T> x) {
  if constexpr (kForm == GeluForm::exact) {
    Vec<T> cdf, pdf;
    normal_cdf_pdf(x, &cdf, &pdf);
    return x * cdf;
  } else {
    const Vec<T> half = x * acc_t<T>(0.5);
    return madd(half, tanh_of_inner<T>(x), half);
  }
}

template <typename T, GeluForm kForm>
SHERD_INLINE Vec<T> gelu_slope(Vec<T> x) {
  if constexpr (kForm == GeluForm::exact) {
    Vec<T> cdf, pdf;
    normal_cdf_pdf(x, &cdf, &pdf);
    return madd(x, pdf, cdf);
  } else {
    const Vec<T> half = broadcast<T>(acc_t<T>(0.5));
    const Vec<T> t = tanh_of_inner<T>(x);
    const Vec<T> inner_slope = madd(x * x, broadcast<T>(static_cast<acc_t<T>>(3 * kSlope * kCubic)),
                                    broadcast<T>(static_cast<acc_t<T>>(kSlope)));
    const Vec<T> tanh_slope = madd(-t, t, broadcast<T>(1));
    return madd(half * x * tanh_slope, inner_slope, madd(half, t, half));
  }
}

template <typename T, GeluForm kForm>
void forward(int threads, std::int64_t n, const T* input, T* output) {
  parallel_vectors<T>(
      threads, n,
      [=](std::int64_t i, int count) {
        store<T>(output + i, gelu<T, kForm>(load<T>(input + i, count)), count);
      },
      kBlock);
}

template <typename T, GeluForm kForm>
void backward(int threads, std::int64_t n, const T* input, const T* grad_output, T* grad_input) {
  parallel_vectors<T>(
      threads, n,
      [=](std::int64_t i, int count) {
        const Vec<T> slope = gelu_slope<T, kForm>(load<T>(input + i, count));
        store<T>(grad_input + i, load<T>(grad_output + i, count) * slope, count);
      },
      kBlock);
}

}  // namespace

template <typename T>
void gelu_forward(int threads, std::int64_t n, GeluForm form, const T* input, T* output) {
  if (form == GeluForm::exact) return forward<T, GeluForm::exact>(threads, n, input, output);
  forward<T, GeluForm::tanh>(threads, n, input, output);
}

template <typename T>
void gelu_backward(int threads, std::int64_t n, GeluForm form, const T* input, const T* grad_output,
                   T* grad_input) {
  if (form == GeluForm::exact) {
    return backward<T, GeluForm::exact>(threads, n, input, grad_output, grad_input);
  }
  backward<T, GeluForm::tanh>(threads, n, input, grad_output, grad_input);
}

#define SHERD_INSTANTIATE(T)                                                \
  template void gelu_forward<T>(int, std::int64_t, GeluForm, const T*, T*); \
  template void gelu_backward<T>(int, std::int64_t, GeluForm, const T*, const T*, T*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cpu
