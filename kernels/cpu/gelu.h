// SPDX-License-Identifier: Apache-2.0
// GELU (Hendrycks and Gimpel, 2016) over contiguous arrays of T = double, float, bf16 or f16.
#pragma once

#include <sherd/kernels/arguments/gelu.h>
#include <sherd/kernels/cpu/simd.h>

namespace sherd::cpu {

using arguments::GeluForm;

// output = gelu(input); '='; output may be input.
template <typename T>
void gelu_forward(int threads, std::int64_t n, GeluForm form, const T* input, T* output);
// grad_input = grad_output * gelu'(input); '='; grad_input may be grad_output.
template <typename T>
void gelu_backward(int threads, std::int64_t n, GeluForm form, const T* input, const T* grad_output,
                   T* grad_input);

}  // namespace sherd::cpu
