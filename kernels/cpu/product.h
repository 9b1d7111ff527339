// SPDX-License-Identifier: Apache-2.0
// The matrix-product backend of the CPU: product_onednn.cpp where the build has oneDNN, else
// product_without_onednn.cpp; both fall back to product_eigen.cpp.
#pragma once

#include <sherd/kernels/arguments/product.h>
#include <sherd/runtime/context.h>
#include <sherd/runtime/dtype.h>

#include <cstddef>
#include <cstdint>

namespace sherd::cpu {

using arguments::Product;

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
