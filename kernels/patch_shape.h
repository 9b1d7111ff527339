// SPDX-License-Identifier: Apache-2.0
// Shared by the dispatch files over images: how images are cut into patches, checked.
#pragma once

#include <sherd/kernels/arguments/patchify.h>
#include <sherd/kernels/tokens.h>

namespace sherd {

inline arguments::PatchShape patch_shape(const char* operation, const Shape& images,
                                         const PatchSize& patch) {
  SHERD_CHECK(images.rank() == 4 || images.rank() == 5,
              "{}: expected images [B, C, H, W] or [B, C, T, H, W], got {}", operation,
              images.to_string());
  arguments::PatchShape shape;
  shape.batch = images.dim(0);
  shape.channels = images.dim(1);
  shape.time = images.rank() == 5 ? images.dim(2) : 1;
  shape.height = images.dim(-2);
  shape.width = images.dim(-1);
  shape.patch_time = patch.frames;
  shape.patch_height = patch.height;
  shape.patch_width = patch.width;
  SHERD_CHECK(patch.frames > 0 && patch.height > 0 && patch.width > 0 &&
                  shape.time % patch.frames == 0 && shape.height % patch.height == 0 &&
                  shape.width % patch.width == 0,
              "{}: images {} are not divisible into patches of {} x {} x {}", operation,
              images.to_string(), patch.frames, patch.height, patch.width);
  return shape;
}

}  // namespace sherd
