// SPDX-License-Identifier: Apache-2.0
// Softmax cross-entropy, and the top-1 prediction.
#pragma once

#include <sherd/kernels/arguments/cross_entropy.h>
#include <sherd/kernels/cpu/simd.h>

namespace sherd::cpu {

using arguments::CrossEntropy;

// row_loss '=' [rows]; lse '=' [rows], the log of the sum of exponentials, for the backward pass.
template <typename T>
void cross_entropy_forward(int threads, const CrossEntropy<T>& p, acc_t<T>* row_loss,
                           acc_t<T>* lse);
// grad_logits '=' scale * row_scale[r] * (softmax * (sum of the row's targets) - target).
// row_scale may be null (ones). grad_logits may be the logits.
template <typename T>
void cross_entropy_backward(int threads, const CrossEntropy<T>& p, const acc_t<T>* lse,
                            acc_t<T> scale, const acc_t<T>* row_scale, T* grad_logits);

// The first row whose label is not in [0, classes), or -1.
std::int64_t first_bad_label(std::int64_t rows, std::int64_t classes, const std::int64_t* labels);

// index '=' [rows]: the lowest index of the row's maximum; -1 where the row holds a NaN.
template <typename T>
void argmax_rows(int threads, std::int64_t rows, std::int64_t classes, const T* logits,
                 std::int64_t* index);
// How many of the indices equal their label; -1 never does.
std::int64_t count_equal(std::int64_t rows, const std::int64_t* index, const std::int64_t* labels);

}  // namespace sherd::cpu
