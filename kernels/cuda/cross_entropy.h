// SPDX-License-Identifier: Apache-2.0
// Softmax cross-entropy, and the top-1 prediction. A label outside [0, classes) makes its row's
// loss and gradient NaN: to report it would be to wait for the device in every step.
#pragma once

#include <sherd/kernels/arguments/cross_entropy.h>

namespace sherd {

class Stream;

namespace cuda {

using arguments::acc_t;
using arguments::CrossEntropy;

// row_loss '=' [rows]; lse '=' [rows], the log of the sum of exponentials, for the backward pass.
template <typename T>
void cross_entropy_forward(Stream& stream, const CrossEntropy<T>& p, acc_t<T>* row_loss,
                           acc_t<T>* lse);
// grad_logits '=' grad_loss[0] * factor * row_scale[r] * (softmax * (sum of the row's targets) -
// target). grad_loss is on the device; row_scale may be null (ones). grad_logits may be the logits.
template <typename T>
void cross_entropy_backward(Stream& stream, const CrossEntropy<T>& p, const acc_t<T>* lse,
                            const acc_t<T>* grad_loss, acc_t<T> factor, const acc_t<T>* row_scale,
                            T* grad_logits);

// row '=' [1]: the first whose label is not in [0, classes), or -1.
void first_bad_label(Stream& stream, std::int64_t rows, std::int64_t classes,
                     const std::int64_t* labels, std::int64_t* row);

// index '=' [rows]: the lowest index of the row's maximum; -1 where the row holds a NaN.
template <typename T>
void argmax_rows(Stream& stream, std::int64_t rows, std::int64_t classes, const T* logits,
                 std::int64_t* index);
// count '=' [1]: how many of the indices equal their label; -1 never does.
void count_equal(Stream& stream, std::int64_t rows, const std::int64_t* index,
                 const std::int64_t* labels, std::int64_t* count);

}  // namespace cuda
}  // namespace sherd
