// SPDX-License-Identifier: Apache-2.0
// Layer normalisation (Ba, Kiros and Hinton, 2016) over the rows of a contiguous [rows, cols]
// matrix of T = double, float, bf16 or f16. Statistics take two passes (mean, then the mean square
// of what is left) in the arithmetic type, so a large mean costs no digits.
#pragma once

#include <sherd/kernels/arguments/types.h>

namespace sherd::arguments {

template <typename T>
struct LayerNormForward {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  const T* input = nullptr;
  const T* residual = nullptr;  // optional: input + residual is normalised
  const T* weight = nullptr;    // [cols]; null: ones
  const T* bias = nullptr;      // [cols]; null: zeros
  acc_t<T> eps = 0;
  T* sum = nullptr;          // '=' input + residual rounded to T, which is what is normalised;
                             // needed with a residual; may be input or residual itself
  T* output = nullptr;       // '='; may be input or residual (unless sum is it too)
  acc_t<T>* mean = nullptr;  // '=' [rows]
  acc_t<T>* rstd = nullptr;  // '=' [rows], 1 / sqrt(variance + eps)
};

template <typename T>
struct LayerNormBackward {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  const T* input = nullptr;  // what was normalised: the forward's input, or its sum
  const T* weight = nullptr;
  const acc_t<T>* mean = nullptr;
  const acc_t<T>* rstd = nullptr;
  const T* grad_output = nullptr;
  bool accumulate = false;          // grad_input '+=' instead of '='
  T* grad_input = nullptr;          // optional; may be grad_output ('=')
  acc_t<T>* grad_weight = nullptr;  // '=' [cols], optional
  acc_t<T>* grad_bias = nullptr;    // '=' [cols], optional
  acc_t<T>* workspace = nullptr;    // needed with grad_weight or grad_bias
};

}  // namespace sherd::arguments
