// SPDX-License-Identifier: Apache-2.0
// The functions of kernels/cpu/elementwise.h on a GPU, with the same bits.
#pragma once

#include <sherd/kernels/arguments/types.h>

namespace sherd {

class Stream;

namespace cuda {

using arguments::acc_t;

template <typename T>
void fill(Stream& stream, std::int64_t n, acc_t<T> value, T* out);
template <typename T>
void add(Stream& stream, std::int64_t n, const T* a, const T* b, T* out);
template <typename T>
void add_inplace(Stream& stream, std::int64_t n, const T* x, T* y);
template <typename T>
void accumulate(Stream& stream, std::int64_t n, const T* x, acc_t<T>* y);
template <typename T>
void scale(Stream& stream, std::int64_t n, const T* a, acc_t<T> factor, T* out);

template <typename T>
void relu_forward(Stream& stream, std::int64_t n, const T* input, T* output);
template <typename T>
void relu_backward(Stream& stream, std::int64_t n, const T* x, const T* grad_output, T* grad_input);

template <typename T>
void scale_rows(Stream& stream, std::int64_t rows, std::int64_t cols, const T* in,
                const acc_t<T>* row_scale, T* out);
template <typename T>
void add_scaled_rows(Stream& stream, std::int64_t rows, std::int64_t cols, const T* a, const T* b,
                     const acc_t<T>* row_scale, T* out);

// From: any of double, float, bf16, f16 and std::uint8_t.
template <typename From, typename To>
void cast(Stream& stream, std::int64_t n, const From* in, To* out);

}  // namespace cuda
}  // namespace sherd
