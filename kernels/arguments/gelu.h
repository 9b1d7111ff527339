// SPDX-License-Identifier: Apache-2.0
// GELU (Hendrycks and Gimpel, 2016).
#pragma once

#include <sherd/kernels/arguments/types.h>

namespace sherd::arguments {

// exact: x * cdf(x), by erf. tanh: x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))).
enum class GeluForm { exact, tanh };

// In which the arithmetic is that of every backend.
inline constexpr double kGeluSlope = 0.79788456080286535588;  // sqrt(2 / pi)
inline constexpr double kGeluCubic = 0.044715;

// output = gelu(x + bias), x and output contiguous [rows, cols]. The sum is not rounded to T.
template <typename T>
struct BiasGelu {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  GeluForm form = GeluForm::exact;
  const T* x = nullptr;
  const T* bias = nullptr;  // [cols]
  T* output = nullptr;      // '='; may be x
};

// grad_x = grad_output * gelu'(x + bias), and the sums of its columns before they are rounded to T.
template <typename T>
struct BiasGeluBackward {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  GeluForm form = GeluForm::exact;
  const T* x = nullptr;
  const T* bias = nullptr;
  const T* grad_output = nullptr;
  T* grad_x = nullptr;            // '='; may be grad_output or x
  acc_t<T>* grad_bias = nullptr;  // '=' [cols]
  acc_t<T>* workspace = nullptr;
};

}  // namespace sherd::arguments
