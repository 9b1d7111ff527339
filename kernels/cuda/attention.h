// SPDX-License-Identifier: Apache-2.0
// Attention on CUDA. bf16 and f16 with head dimensions 32, 64, 80, 96 and 128 run on tensor cores
// where every view's address and strides are multiples of 16 bytes: products of T summed in fp32,
// probabilities and gradients of scores rounded to T between two products. Everything else runs in
// a plain kernel whose arithmetic is acc_t<T>, for head dimensions up to 256. Results have the same
// bits in every run.
#pragma once

#include <sherd/kernels/arguments/attention.h>

namespace sherd {

class Stream;

namespace cuda {

using arguments::acc_t;
using arguments::AttentionShape;
using arguments::AttentionView;

// Bytes at `workspace` that the calls below overwrite: in backward a number for each query and
// head. Here, not in a source: a plan for a GPU may be made by a build without CUDA.
template <typename T>
std::size_t attention_workspace_bytes(const AttentionShape& shape, bool backward) {
  return backward ? static_cast<std::size_t>(shape.batch * shape.heads * shape.queries) *
                        sizeof(acc_t<T>)
                  : 0;
}

// output '=', lse '=' [batch, heads, queries]. Throws for a head dimension above 256.
template <typename T>
void attention_forward(Stream& stream, const AttentionShape& shape, AttentionView<const T> q,
                       AttentionView<const T> k, AttentionView<const T> v, AttentionView<T> output,
                       acc_t<T>* lse, void* workspace);

// grad_q, grad_k and grad_v '='. They must not be the memory of an input: one kernel writes grad_q,
// the next one reads q again.
template <typename T>
void attention_backward(Stream& stream, const AttentionShape& shape,
                        AttentionView<const T> grad_output, AttentionView<const T> q,
                        AttentionView<const T> k, AttentionView<const T> v,
                        AttentionView<const T> output, const acc_t<T>* lse, AttentionView<T> grad_q,
                        AttentionView<T> grad_k, AttentionView<T> grad_v, void* workspace);

}  // namespace cuda
}  // namespace sherd
