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

// grad_input = grad_output * gelu'(input), and the sums of its columns before they are rounded to
// T: the gradient of a bias that was added before. All contiguous [rows, cols].
template <typename T>
struct GeluBackwardSums {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  GeluForm form = GeluForm::exact;
  const T* input = nullptr;
  const T* grad_output = nullptr;
  T* grad_input = nullptr;        // '='; may be grad_output or input
  acc_t<T>* grad_bias = nullptr;  // '=' [cols]
  acc_t<T>* workspace = nullptr;
};

}  // namespace sherd::arguments
