// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sherd/kernels/arguments/gelu.h>

namespace sherd {

class Stream;

namespace cuda {

using arguments::GeluBackwardSums;
using arguments::GeluForm;

// output = gelu(input); '='; output may be input.
template <typename T>
void gelu_forward(Stream& stream, std::int64_t n, GeluForm form, const T* input, T* output);
// grad_input = grad_output * gelu'(input); '='; grad_input may be grad_output.
template <typename T>
void gelu_backward(Stream& stream, std::int64_t n, GeluForm form, const T* input,
                   const T* grad_output, T* grad_input);

// The sums cost no second pass over the gradient.
template <typename T>
void gelu_backward_sums(Stream& stream, const GeluBackwardSums<T>& p);
inline constexpr std::int64_t kGeluSumRows = 128;  // of a block
// Also in builds without CUDA, which plan for GPUs.
template <typename T>
constexpr std::size_t gelu_backward_sums_workspace_bytes(std::int64_t rows, std::int64_t cols) {
  return static_cast<std::size_t>((rows + kGeluSumRows - 1) / kGeluSumRows * cols) *
         sizeof(arguments::acc_t<T>);
}

}  // namespace cuda
}  // namespace sherd
