// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/product.h>

namespace sherd::cpu {

bool product_supports(Context&, DType dtype) {
  return dtype == DType::f32 || dtype == DType::f64;
}

std::size_t product_workspace_bytes(Context&, const Product&) {
  return 0;
}

std::size_t cached_products(Context&) {
  return 0;
}

void run_product(Context& context, const Product& product, const void* a, const void* b,
                 const void* bias, void* out, void*) {
  const ThreadCountScope threads(context.threads());
  run_product_eigen(context, product, a, b, bias, out);
}

}  // namespace sherd::cpu
