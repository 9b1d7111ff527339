// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sherd/kernels/arguments/layer_norm.h>

namespace sherd {

class Stream;

namespace cuda {

using arguments::LayerNormBackward;
using arguments::LayerNormForward;

template <typename T>
void layer_norm_forward(Stream& stream, const LayerNormForward<T>& p);

template <typename T>
void layer_norm_backward(Stream& stream, const LayerNormBackward<T>& p);
template <typename T>
std::size_t layer_norm_backward_workspace_bytes(std::int64_t rows, std::int64_t cols);

}  // namespace cuda
}  // namespace sherd
