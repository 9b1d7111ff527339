// SPDX-License-Identifier: Apache-2.0
// Both directions are permutations of eight dimensions, whose innermost (a patch's row of pixels)
// stays: the strided copy moves them in its widest words.
#include <sherd/kernels/cuda/patchify.h>
#include <sherd/kernels/cuda/strided_copy.h>

namespace sherd::cuda {

void patchify(Stream& stream, const PatchShape& s, std::size_t element_size, const void* images,
              void* patches) {
  const std::int64_t frame = s.height * s.width;
  StridedView view;
  append(view, s.batch, s.channels * s.time * frame);
  append(view, s.time / s.patch_time, s.patch_time * frame);
  append(view, s.height / s.patch_height, s.patch_height * s.width);
  append(view, s.width / s.patch_width, s.patch_width);
  append(view, s.channels, s.time * frame);
  append(view, s.patch_time, frame);
  append(view, s.patch_height, s.width);
  append(view, s.patch_width, 1);
  strided_copy(stream, view, element_size, images, patches);
}

void unpatchify(Stream& stream, const PatchShape& s, std::size_t element_size, const void* patches,
                void* images) {
  const std::int64_t area = s.patch_height * s.patch_width, volume = s.patch_time * area;
  const std::int64_t patch = s.channels * volume;
  const std::int64_t across = s.width / s.patch_width, down = s.height / s.patch_height;
  const std::int64_t along = s.time / s.patch_time;
  StridedView view;
  append(view, s.batch, along * down * across * patch);
  append(view, s.channels, volume);
  append(view, along, down * across * patch);
  append(view, s.patch_time, area);
  append(view, down, across * patch);
  append(view, s.patch_height, s.patch_width);
  append(view, across, patch);
  append(view, s.patch_width, 1);
  strided_copy(stream, view, element_size, patches, images);
}

}  // namespace sherd::cuda
