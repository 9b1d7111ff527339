// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sherd/kernels/arguments/layer_norm.h>

#include <algorithm>

namespace sherd {

class Stream;

namespace cuda {

using arguments::acc_t;
using arguments::LayerNormBackward;
using arguments::LayerNormForward;

template <typename T>
void layer_norm_forward(Stream& stream, const LayerNormForward<T>& p);

template <typename T>
void layer_norm_backward(Stream& stream, const LayerNormBackward<T>& p);

// How the backward pass, which also sums over rows, cuts them: by the sizes and the type alone, so
// that the bits do not depend on the GPU.
struct LayerNormCut {
  static constexpr std::int64_t kWarp = 32, kWarps = 8;
  static constexpr std::int64_t kPerThread = 8;  // columns

  std::int64_t warps = 0;   // of a row; 0: a block a row
  std::int64_t groups = 1;  // rows of a block under way at once
  std::int64_t rows_per_block = 0, blocks = 0;
};
// As many as an H100's processors hold at once without spilling registers.
template <typename T>
inline constexpr int kLayerNormBlocksOfProcessor = sizeof(T) == 2   ? 3
                                                   : sizeof(T) == 4 ? 2
                                                                    : 1;

template <typename T>
constexpr LayerNormCut layer_norm_cut(std::int64_t rows, std::int64_t cols) {
  constexpr std::int64_t kLeastRows = 16;  // of a block: else the sums over blocks cost too much
  constexpr std::int64_t kMostBlocks = 132 * kLayerNormBlocksOfProcessor<T>;
  const auto ceil_div = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  LayerNormCut cut;
  const std::int64_t warps = ceil_div(cols, cut.kPerThread * cut.kWarp);
  if (warps <= cut.kWarps) {
    cut.warps = std::max<std::int64_t>(1, warps);
    cut.groups = cut.kWarps / cut.warps;
  }
  cut.rows_per_block =
      ceil_div(std::max(kLeastRows, ceil_div(rows, kMostBlocks)), cut.groups) * cut.groups;
  cut.blocks = ceil_div(rows, cut.rows_per_block);
  return cut;
}

template <typename T>
constexpr std::size_t layer_norm_backward_workspace_bytes(std::int64_t rows, std::int64_t cols) {
  return static_cast<std::size_t>(layer_norm_cut<T>(rows, cols).blocks * 2 * cols) *
         sizeof(acc_t<T>);
}

}  // namespace cuda
}  // namespace sherd
