// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sherd/kernels/arguments/layer_norm.h>
#include <sherd/kernels/cpu/simd.h>

namespace sherd::cpu {

using arguments::LayerNormBackward;
using arguments::LayerNormForward;

template <typename T>
void layer_norm_forward(int threads, const LayerNormForward<T>& p);

template <typename T>
void layer_norm_backward(int threads, const LayerNormBackward<T>& p);
template <typename T>
std::size_t layer_norm_backward_workspace_bytes(std::int64_t rows, std::int64_t cols);

}  // namespace sherd::cpu
