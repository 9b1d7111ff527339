// SPDX-License-Identifier: Apache-2.0
// Patch embedding without a matrix of patches in memory. The gradient's sum over rows is cut into
// parts, which are summed into a workspace and then added in their order. The cut depends on sizes
// and the type alone; so do the bits, and the bytes of the workspace, in builds without CUDA too.
//
// Not for empty results or sums over no rows. Limits, which the caller checks: rows, and elements
// of the weight, up to 2^30; elements of the output up to 2^40.
#pragma once

#include <sherd/kernels/arguments/patch_embed.h>

#include <algorithm>

namespace sherd {

class Stream;

namespace cuda {

using arguments::acc_t;
using arguments::PatchEmbedBackwardWeight;
using arguments::PatchEmbedForward;
using arguments::PatchShape;

// Side of the square part of a result that a block computes: on tensor cores, and without.
template <typename T>
inline constexpr std::int64_t kPatchEmbedTile = sizeof(T) == 2 ? 128 : 64;

struct PatchEmbedCut {
  std::int64_t rows_per_part = 0, parts = 1;
};
template <typename T>
constexpr PatchEmbedCut patch_embed_cut(const PatchShape& shape, std::int64_t dim) {
  constexpr std::int64_t kLeastRows = 256;  // of a part: else writing its sums costs too much
  // Two for each multiprocessor of the largest GPUs. As many tiles bound the workspace: 17 MB where
  // the weight is not larger.
  constexpr std::int64_t kEnoughBlocks = 264;
  const auto ceil_div = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const std::int64_t rows = shape.batch * shape.count();
  const std::int64_t tiles =
      ceil_div(dim, kPatchEmbedTile<T>) * ceil_div(shape.columns(), kPatchEmbedTile<T>);
  const std::int64_t wanted = tiles == 0 ? 1 : ceil_div(kEnoughBlocks, tiles);
  PatchEmbedCut cut;
  cut.rows_per_part = ceil_div(std::max(ceil_div(rows, wanted), kLeastRows), 32) * 32;
  cut.parts = std::max<std::int64_t>(1, ceil_div(rows, cut.rows_per_part));
  return cut;
}

template <typename T>
constexpr std::size_t patch_embed_backward_weight_workspace_bytes(const PatchShape& shape,
                                                                  std::int64_t dim) {
  const std::int64_t parts = patch_embed_cut<T>(shape, dim).parts;
  if (parts == 1) return 0;  // it writes the gradient itself
  return static_cast<std::size_t>(parts * dim * shape.columns()) * sizeof(acc_t<T>);
}

template <typename T>
void patch_embed_forward(Stream& stream, const PatchEmbedForward<T>& p);
template <typename T>
void patch_embed_backward_weight(Stream& stream, const PatchEmbedBackwardWeight<T>& p);

}  // namespace cuda
}  // namespace sherd
