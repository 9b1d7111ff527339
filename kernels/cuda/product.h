// SPDX-License-Identifier: Apache-2.0
// The matrix products of a GPU: cuBLASLt's (product_cublaslt.cpp), or in the emulated build plain
// ones (product_emulated.cpp). Operands of all floating types as they are; fp32 without TF32.
#pragma once

#include <sherd/kernels/arguments/product.h>
#include <sherd/runtime/context.h>

namespace sherd::cuda {

using arguments::Product;

// Scratch bytes that run_product needs; the same in every build, so that a plan knows them.
std::size_t product_workspace_bytes(const Product& product);
// On the context's compute stream.
void run_product(Context& context, const Product& product, const void* a, const void* b,
                 const void* bias, void* out, void* workspace);

}  // namespace sherd::cuda
