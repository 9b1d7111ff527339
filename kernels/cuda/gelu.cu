// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cuda/gelu.h>
#include <sherd/kernels/cuda/map.h>
#include <sherd/kernels/cuda/math.h>

namespace sherd::cuda {
namespace {

template <GeluForm kForm>
struct Forward {
  template <typename T>
  __device__ T operator()(T x) const {
    return from_acc<T>(gelu<kForm>(to_acc(x)));
  }
};
template <GeluForm kForm>
struct Backward {
  template <typename T>
  __device__ T operator()(T x, T grad) const {
    return from_acc<T>(to_acc(grad) * gelu_slope<kForm>(to_acc(x)));
  }
};

}  // namespace

template <typename T>
void gelu_forward(Stream& stream, std::int64_t n, GeluForm form, const T* input, T* output) {
  if (form == GeluForm::exact) return map(stream, n, Forward<GeluForm::exact>{}, output, input);
  map(stream, n, Forward<GeluForm::tanh>{}, output, input);
}

template <typename T>
void gelu_backward(Stream& stream, std::int64_t n, GeluForm form, const T* input,
                   const T* grad_output, T* grad_input) {
  if (form == GeluForm::exact)
    return map(stream, n, Backward<GeluForm::exact>{}, grad_input, input, grad_output);
  map(stream, n, Backward<GeluForm::tanh>{}, grad_input, input, grad_output);
}

#define SHERD_INSTANTIATE(T)                                                    \
  template void gelu_forward<T>(Stream&, std::int64_t, GeluForm, const T*, T*); \
  template void gelu_backward<T>(Stream&, std::int64_t, GeluForm, const T*, const T*, T*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cuda
