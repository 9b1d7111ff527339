// SPDX-License-Identifier: Apache-2.0
// The matrix-product backend of the CPU: product_onednn.cpp where the build has oneDNN, else
// product_without_onednn.cpp; both fall back to product_eigen.cpp.
#pragma once

#include <sherd/kernels/activation.h>
#include <sherd/runtime/context.h>
#include <sherd/runtime/dtype.h>

#include <cstddef>
#include <cstdint>

namespace sherd::cpu {

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

// Whether the backend multiplies this type as it is (bf16 needs a processor that oneDNN supports).
bool product_supports(Context& context, DType dtype);
// Scratch bytes that run_product needs. Asked on meta too, so that a plan knows them.
std::size_t product_workspace_bytes(Context& context, const Product& product);
// How many compiled products a context keeps (never more than a fixed bound).
std::size_t cached_products(Context& context);
void run_product(Context& context, const Product& product, const void* a, const void* b,
                 const void* bias, void* out, void* workspace);

// fp32 and fp64 by Eigen; needs no workspace.
void run_product_eigen(Context& context, const Product& product, const void* a, const void* b,
                       const void* bias, void* out);

}  // namespace sherd::cpu
