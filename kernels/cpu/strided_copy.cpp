// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/parallel.h>
#include <sherd/kernels/cpu/strided_copy.h>

#include <cstring>

namespace sherd::cpu {

using arguments::merged;

namespace {

// Where a plane (an index over all dimensions but the last `inner`) begins, in elements.
std::int64_t plane_offset(const StridedView& view, int inner, std::int64_t plane) {
  std::int64_t offset = 0;
  for (int d = view.rank - inner; d-- > 0;) {
    const auto at = static_cast<std::size_t>(d);
    offset += plane % view.size[at] * view.stride[at];
    plane /= view.size[at];
  }
  return offset;
}

// An element as a plain integer of its size. (memcpy, as views need not be aligned to it.)
template <typename Word>
void copy_row(std::int64_t count, std::int64_t stride, const char* from, char* to) {
  constexpr auto size = static_cast<std::int64_t>(sizeof(Word));
  if (stride == 1) {
    std::memcpy(to, from, static_cast<std::size_t>(count * size));
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, from + i * stride * size, sizeof word);
    std::memcpy(to + i * size, &word, sizeof word);
  }
}

// Elements on a tile's side: a cache line of them.
template <typename Word>
inline constexpr std::int64_t kTile = 64 / static_cast<std::int64_t>(sizeof(Word));

// Up to kTile rows of a transposition (along a row the stride is `stride`, from row to row 1), a
// tile at a time: a tile's cache lines are then used whole while they are near.
template <typename Word>
void copy_band(std::int64_t rows, std::int64_t cols, std::int64_t stride, const char* from,
               char* to) {
  constexpr auto size = static_cast<std::int64_t>(sizeof(Word));
  for (std::int64_t begin = 0; begin < cols; begin += kTile<Word>) {
    const std::int64_t count = std::min(kTile<Word>, cols - begin);
    for (std::int64_t r = 0; r < rows; ++r) {
      copy_row<Word>(count, stride, from + (r + begin * stride) * size,
                     to + (r * cols + begin) * size);
    }
  }
}

template <typename Word>
void copy_view(int threads, const StridedView& view, const char* from, char* to) {
  constexpr auto size = static_cast<std::int64_t>(sizeof(Word));
  const auto last = static_cast<std::size_t>(view.rank - 1);
  const bool transposed = view.rank >= 2 && view.stride[last] != 1 && view.stride[last - 1] == 1;
  const std::int64_t cols = view.size[last];
  if (view.rank == 1 && view.stride[last] == 1) {
    parallel_blocks(threads, cols, kElementwiseBlock, [&](std::int64_t begin, std::int64_t end) {
      copy_row<Word>(end - begin, 1, from + begin * size, to + begin * size);
    });
    return;
  }
  const std::int64_t height = transposed ? view.size[last - 1] : 1;
  const std::int64_t bands = transposed ? (height + kTile<Word> - 1) / kTile<Word> : 1;
  std::int64_t planes = 1;
  for (int d = 0; d < view.rank - (transposed ? 2 : 1); ++d) {
    planes *= view.size[static_cast<std::size_t>(d)];
  }
  const std::int64_t band_size = (transposed ? kTile<Word> : 1) * cols;
  const std::int64_t group = std::max<std::int64_t>(1, kElementwiseBlock / band_size);
  parallel_blocks(threads, planes * bands, group, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t row = i % bands * kTile<Word>;
      const char* const source =
          from +
          (plane_offset(view, transposed ? 2 : 1, i / bands) + (transposed ? row : 0)) * size;
      char* const target = to + (i / bands * height + (transposed ? row : 0)) * cols * size;
      if (transposed) {
        copy_band<Word>(std::min(kTile<Word>, height - row), cols, view.stride[last], source,
                        target);
      } else {
        copy_row<Word>(cols, view.stride[last], source, target);
      }
    }
  });
}

}  // namespace

void strided_copy(int threads, const StridedView& original, std::size_t element_size,
                  const void* from, void* to) {
  for (int d = 0; d < original.rank; ++d) {
    if (original.size[static_cast<std::size_t>(d)] == 0) return;
  }
  StridedView view = merged(original);
  if (view.rank == 0) view = {1, {1}, {1}};
  const auto* const source = static_cast<const char*>(from);
  auto* const target = static_cast<char*>(to);
  switch (element_size) {
    case 1: return copy_view<std::uint8_t>(threads, view, source, target);
    case 2: return copy_view<std::uint16_t>(threads, view, source, target);
    case 4: return copy_view<std::uint32_t>(threads, view, source, target);
    default: return copy_view<std::uint64_t>(threads, view, source, target);
  }
}

}  // namespace sherd::cpu
