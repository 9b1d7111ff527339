// SPDX-License-Identifier: Apache-2.0
// What the kernels of patch embedding share. For .cu files alone.
//
// Note [Patches read from images]
// Element (row, column) of the matrix of patches lies at row_offset(row) + column_offset(column) of
// the images. A product copies its operands tile by tile to shared memory in any case, so it can
// take them from there, and the matrix is never written. The time of writing and reading it is
// little; what counts is its memory, which the weight's gradient would need until backward ends.
#pragma once

#include <sherd/kernels/cuda/device.h>
#include <sherd/kernels/cuda/divider.h>
#include <sherd/kernels/cuda/patch_embed.h>

namespace sherd::cuda {

// The matrix of patches as it lies in the images.
template <typename T>
struct PatchMatrix {
  PatchMatrix(const PatchShape& s, const T* address)
      : images(address),
        rows(static_cast<int>(s.batch * s.count())),
        columns(static_cast<int>(s.columns())),
        width(s.width),
        frame(s.height * s.width),
        channel(s.time * frame),
        sample(s.channels * channel),
        patches_along(s.time / s.patch_time),
        patches_down(s.height / s.patch_height),
        patches_across(s.width / s.patch_width),
        patch_time(s.patch_time),
        patch_height(s.patch_height),
        patch_width(s.patch_width) {}

  __device__ __forceinline__ std::int64_t row_offset(int row) const {
    const auto patch = static_cast<std::uint32_t>(row);
    const std::uint32_t line = patches_across.quotient(patch);
    const std::uint32_t plane = patches_down.quotient(line);
    const std::uint32_t batch = patches_along.quotient(plane);
    return batch * sample + (plane - batch * patches_along.divisor) * patch_time.divisor * frame +
           (line - plane * patches_down.divisor) * patch_height.divisor * width +
           (patch - line * patches_across.divisor) * patch_width.divisor;
  }
  __device__ __forceinline__ std::int64_t column_offset(int column) const {
    const auto pixel = static_cast<std::uint32_t>(column);
    const std::uint32_t line = patch_width.quotient(pixel);
    const std::uint32_t plane = patch_height.quotient(line);
    const std::uint32_t c = patch_time.quotient(plane);
    return c * channel + (plane - c * patch_time.divisor) * frame +
           (line - plane * patch_height.divisor) * width + (pixel - line * patch_width.divisor);
  }

  const T* images;
  int rows, columns;
  std::int64_t width, frame, channel, sample;  // steps in the images
  Divider32 patches_along, patches_down, patches_across;
  Divider32 patch_time, patch_height, patch_width;
};

// fp32 and fp64. sums: [parts, dim, columns].
template <typename T>
void plain_patch_embed_forward(Stream& stream, const PatchEmbedForward<T>& p);
template <typename T>
void plain_patch_embed_backward_weight(Stream& stream, const PatchEmbedBackwardWeight<T>& p,
                                       const PatchEmbedCut& cut, T* sums);

}  // namespace sherd::cuda
