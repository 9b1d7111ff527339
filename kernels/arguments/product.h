// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sherd/kernels/arguments/activation.h>
#include <sherd/kernels/arguments/types.h>

namespace sherd::arguments {

// out [m, n] = activation(op(a) [m, k] op(b) [k, n] + bias [n]); all row-major and gapless. a, b
// and bias are of one type; out is of that type, or fp32 for operands of 16 bits: then the sums,
// which are fp32 in any case, are not rounded.
struct Product {
  std::int64_t m = 0, n = 0, k = 0;
  bool transpose_a = false, transpose_b = false;
  bool bias = false;
  Activation activation = Activation::none;
  DType dtype = DType::f32;
  DType out_dtype = DType::f32;

  bool operator==(const Product&) const = default;
};

}  // namespace sherd::arguments
