// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/parallel.h>
#include <sherd/kernels/cpu/patchify.h>

#include <cstring>

namespace sherd::cpu {
namespace {

// Copies `count` pieces of kBytes bytes (of `bytes` where kBytes is 0), stepping on both sides: a
// length the compiler knows makes a piece one or two moves instead of a call.
template <std::size_t kBytes>
void copy_pieces(std::int64_t count, std::size_t bytes, const char* from, std::size_t from_step,
                 char* to, std::size_t to_step) {
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(to, from, kBytes != 0 ? kBytes : bytes);
    from += from_step;
    to += to_step;
  }
}

using Copy = void (*)(std::int64_t, std::size_t, const char*, std::size_t, char*, std::size_t);

Copy copy_for(std::size_t bytes) {
  switch (bytes) {
    case 4: return copy_pieces<4>;
    case 8: return copy_pieces<8>;
    case 14: return copy_pieces<14>;
    case 16: return copy_pieces<16>;
    case 28: return copy_pieces<28>;
    case 32: return copy_pieces<32>;
    case 56: return copy_pieces<56>;
    case 64: return copy_pieces<64>;
    case 128: return copy_pieces<128>;
    default: return copy_pieces<0>;
  }
}

// One task is a row of patches: whatever lies under one (sample, patch row in time, patch row in
// height). Along the width an image row is a run of pieces, one for each patch.
template <bool kToPatches>
void permute(int threads, const PatchShape& s, std::size_t element_size, const char* from,
             char* to) {
  const std::int64_t across = s.width / s.patch_width;
  const std::int64_t down = s.height / s.patch_height;
  const std::int64_t along = s.time / s.patch_time;
  const std::size_t piece = static_cast<std::size_t>(s.patch_width) * element_size;
  const std::size_t image_row = static_cast<std::size_t>(s.width) * element_size;
  const auto pieces_per_patch =
      static_cast<std::size_t>(s.channels * s.patch_time * s.patch_height);
  const std::size_t patch = pieces_per_patch * piece;
  const Copy copy = copy_for(piece);
  parallel_tasks(threads, s.batch * along * down, [=](std::int64_t task) {
    const std::int64_t patch_down = task % down, patch_along = task / down % along;
    const std::int64_t sample = task / (down * along);
    std::size_t patch_at = static_cast<std::size_t>(task * across) * patch;
    for (std::int64_t c = 0; c < s.channels; ++c) {
      for (std::int64_t dt = 0; dt < s.patch_time; ++dt) {
        const std::int64_t t = patch_along * s.patch_time + dt;
        for (std::int64_t dh = 0; dh < s.patch_height; ++dh) {
          const std::int64_t h = patch_down * s.patch_height + dh;
          const std::size_t image_at =
              static_cast<std::size_t>(((sample * s.channels + c) * s.time + t) * s.height + h) *
              image_row;
          if constexpr (kToPatches) {
            copy(across, piece, from + image_at, piece, to + patch_at, patch);
          } else {
            copy(across, piece, from + patch_at, patch, to + image_at, piece);
          }
          patch_at += piece;
        }
      }
    }
  });
}

}  // namespace

void patchify(int threads, const PatchShape& shape, std::size_t element_size, const void* images,
              void* patches) {
  permute<true>(threads, shape, element_size, static_cast<const char*>(images),
                static_cast<char*>(patches));
}

void unpatchify(int threads, const PatchShape& shape, std::size_t element_size, const void* patches,
                void* images) {
  permute<false>(threads, shape, element_size, static_cast<const char*>(patches),
                 static_cast<char*>(images));
}

}  // namespace sherd::cpu
