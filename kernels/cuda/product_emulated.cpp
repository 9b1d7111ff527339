// SPDX-License-Identifier: Apache-2.0
// Products of the emulated build: on the processor, in the order of the emulated stream.
#include <cuda_runtime.h>
#include <emulator/emulator.h>
#include <sherd/kernels/cpu/elementwise.h>
#include <sherd/kernels/cpu/product.h>
#include <sherd/kernels/cuda/product.h>

#include <vector>

namespace sherd::cuda {
namespace {

template <typename T>
std::vector<float> widened(const void* values, std::int64_t count) {
  std::vector<float> wide(static_cast<std::size_t>(count));
  cpu::cast<T, float>(1, count, static_cast<const T*>(values), wide.data());
  return wide;
}

// Operands of 16 bits: in fp32, rounded once where the result is of 16 bits too.
template <typename T>
void run_widened(Context& context, Product product, const void* a, const void* b, const void* bias,
                 void* out) {
  const std::int64_t count = product.m * product.n;
  const std::vector<float> left = widened<T>(a, product.m * product.k);
  const std::vector<float> right = widened<T>(b, product.k * product.n);
  const std::vector<float> row = widened<T>(bias, bias == nullptr ? 0 : product.n);
  const bool rounds = product.out_dtype != DType::f32;
  std::vector<float> sums(static_cast<std::size_t>(rounds ? count : 0));
  product.dtype = DType::f32;
  cpu::run_product_eigen(context, product, left.data(), right.data(),
                         bias == nullptr ? nullptr : row.data(), rounds ? sums.data() : out);
  if (rounds) cpu::cast<float, T>(1, count, sums.data(), static_cast<T*>(out));
}

void run_on_processor(Context& context, const Product& product, const void* a, const void* b,
                      const void* bias, void* out) {
  const ThreadCountScope threads(context.threads());
  switch (product.dtype) {
    case DType::bf16: return run_widened<bf16>(context, product, a, b, bias, out);
    case DType::f16: return run_widened<f16>(context, product, a, b, bias, out);
    default: return cpu::run_product_eigen(context, product, a, b, bias, out);
  }
}

}  // namespace

void run_product(Context& context, const Product& product, const void* a, const void* b,
                 const void* bias, void* out, void* workspace) {
  // What cuBLASLt would scribble over must not be anybody's.
  emulator::enqueue(static_cast<cudaStream_t>(context.compute_stream().native()),
                    [&context, product, a, b, bias, out, workspace] {
                      static_cast<unsigned char*>(workspace)[0] = 0xff;
                      run_on_processor(context, product, a, b, bias, out);
                    });
}

}  // namespace sherd::cuda
