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

}  // namespace sherd::arguments
