// SPDX-License-Identifier: Apache-2.0
// Elementwise CPU kernels over contiguous arrays of n elements of T = double, float, bf16 or f16.
//
// Every output is written ('=') unless the line says '+='. An output may be the very array that is
// an input, but must not overlap one otherwise. An element gets the same bits wherever an array is
// cut and on any number of threads.
#pragma once

#include <sherd/kernels/cpu/simd.h>

namespace sherd::cpu {

template <typename T>
void fill(int threads, std::int64_t n, acc_t<T> value, T* out);
template <typename T>  // out = a + b
void add(int threads, std::int64_t n, const T* a, const T* b, T* out);
template <typename T>  // y += x
void add_inplace(int threads, std::int64_t n, const T* x, T* y);
template <typename T>  // y += x, the sum kept in the arithmetic type (a gradient into its fp32
                       // shard)
void accumulate(int threads, std::int64_t n, const T* x, acc_t<T>* y);
template <typename T>  // out = a * factor
void scale(int threads, std::int64_t n, const T* a, acc_t<T> factor, T* out);

// max(x, 0); a NaN stays a NaN.
template <typename T>
void relu_forward(int threads, std::int64_t n, const T* input, T* output);
// grad_output where x is not <= 0, else 0. x may be relu's input or its output.
template <typename T>
void relu_backward(int threads, std::int64_t n, const T* x, const T* grad_output, T* grad_input);

// out[r, c] = row_scale[r] * in[r, c]: drop path (a row is a sample; 0 or 1/keep), and its
// backward.
template <typename T>
void scale_rows(int threads, std::int64_t rows, std::int64_t cols, const T* in,
                const acc_t<T>* row_scale, T* out);
// out[r, c] = a[r, c] + row_scale[r] * b[r, c]: a residual branch with drop path.
template <typename T>
void add_scaled_rows(int threads, std::int64_t rows, std::int64_t cols, const T* a, const T* b,
                     const acc_t<T>* row_scale, T* out);

// out = in in another type, rounded once to nearest-even. From and To: any of double, float, bf16,
// f16; From may be std::uint8_t as well.
template <typename From, typename To>
void cast(int threads, std::int64_t n, const From* in, To* out);

}  // namespace sherd::cpu
