// SPDX-License-Identifier: Apache-2.0
// Images to patches and back: a pure permutation, so the element type does not matter, only its
// size in bytes.
//
//   images  [batch, channels, time, height, width]
//   patches [batch, (time/pt) (height/ph) (width/pw), channels pt ph pw]
//
// A patch's columns are ordered (channel, pt, ph, pw), as a convolution weight flattened, so patch
// embedding is one matrix product. Time is 1 for still images.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sherd::arguments {

struct PatchShape {
  std::int64_t batch = 1;
  std::int64_t channels = 1;
  std::int64_t time = 1;
  std::int64_t height = 1;
  std::int64_t width = 1;
  std::int64_t patch_time = 1;  // each divides its extent
  std::int64_t patch_height = 1;
  std::int64_t patch_width = 1;

  // Patches of one sample, and elements of a patch: rows and columns of a sample's matrix.
  constexpr std::int64_t count() const {
    return time / patch_time * (height / patch_height) * (width / patch_width);
  }
  constexpr std::int64_t columns() const {
    return channels * patch_time * patch_height * patch_width;
  }
};

}  // namespace sherd::arguments
