// SPDX-License-Identifier: Apache-2.0
// Note [Copies in words]
// The view is first put into bytes, then into the widest words (up to 16 bytes) that divide its
// contiguous runs, its strides and the addresses. A thread then takes words of the output, which
// are neighbours in a warp, and finds where each comes from. Where the words are single elements
// and another dimension is contiguous (a transposition), tiles go through shared memory, so that
// both sides are read and written in rows.
#include <sherd/kernels/cuda/device.h>
#include <sherd/kernels/cuda/divider.h>
#include <sherd/kernels/cuda/strided_copy.h>
#include <sherd/runtime/cuda/device.h>

namespace sherd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWords = 4;  // of a thread, all under way at once
constexpr int kTile = 32;
constexpr int kTileRows = 8;  // of a block's threads

template <typename Divider>
struct Gather {
  std::int64_t words = 0;
  int rank = 0;
  Divider size[kMaxCopyRank];
  std::int64_t stride[kMaxCopyRank] = {};
};

template <typename Word, typename Divider>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(Gather<Divider> view, const Word* from, Word* to) {
  using Index = typename Divider::Index;
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads * kWords) + threadIdx.x;
  Word words[kWords];
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    const std::int64_t word = first + k * kThreads;
    if (word >= view.words) continue;
    auto rest = static_cast<Index>(word);
    std::int64_t offset = 0;
    for (int d = view.rank - 1; d > 0; --d) {
      const Index quotient = view.size[d].quotient(rest);
      offset += static_cast<std::int64_t>(rest - quotient * view.size[d].divisor) * view.stride[d];
      rest = quotient;
    }
    words[k] = from[offset + static_cast<std::int64_t>(rest) * view.stride[0]];
  }
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    const std::int64_t word = first + k * kThreads;
    if (word < view.words) to[word] = words[k];
  }
}

// `rows` is the dimension that is contiguous in `from`, `cols` that which is in `to`.
struct Transposition {
  std::int64_t rows = 0, cols = 0;
  std::int64_t col_stride = 0;  // in from
  std::int64_t row_stride = 0;  // in to
  unsigned row_tiles = 0, col_tiles = 0;
  int rank = 0;  // the dimensions around them
  unsigned size[kMaxCopyRank] = {};
  std::int64_t from_stride[kMaxCopyRank] = {}, to_stride[kMaxCopyRank] = {};
};

template <typename Word>
__global__ void __launch_bounds__(kTile* kTileRows)
    transpose_kernel(Transposition view, const Word* from, Word* to) {
  SHERD_SHARED(Word, tile, kTile * (kTile + 1));
  unsigned block = blockIdx.x;
  const std::int64_t col = static_cast<std::int64_t>(block % view.col_tiles) * kTile;
  block /= view.col_tiles;
  const std::int64_t row = static_cast<std::int64_t>(block % view.row_tiles) * kTile;
  block /= view.row_tiles;
  for (int d = view.rank - 1; d >= 0; --d) {
    const unsigned index = block % view.size[d];
    from += index * view.from_stride[d];
    to += index * view.to_stride[d];
    block /= view.size[d];
  }
  const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
#pragma unroll
  for (int i = y; i < kTile; i += kTileRows) {
    if (row + x < view.rows && col + i < view.cols)
      tile[i * (kTile + 1) + x] = from[row + x + (col + i) * view.col_stride];
  }
  __syncthreads();
#pragma unroll
  for (int i = y; i < kTile; i += kTileRows) {
    if (row + i < view.rows && col + x < view.cols)
      to[(row + i) * view.row_stride + col + x] = tile[x * (kTile + 1) + i];
  }
}

std::int64_t words_of(const StridedView& view) {
  std::int64_t words = 1;
  for (int d = 0; d < view.rank; ++d) words *= view.size[static_cast<std::size_t>(d)];
  return words;
}

template <typename Word, typename Divider>
void gather(Stream& stream, const StridedView& view, const void* from, void* to) {
  Gather<Divider> p;
  p.words = words_of(view);
  p.rank = view.rank;
  for (int d = 0; d < view.rank; ++d) {
    p.size[d] = Divider(view.size[static_cast<std::size_t>(d)]);
    p.stride[d] = view.stride[static_cast<std::size_t>(d)];
  }
  const std::int64_t blocks = ceil_div(p.words, kThreads * kWords);
  launch(gather_kernel<Word, Divider>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0,
         native(stream), p, static_cast<const Word*>(from), static_cast<Word*>(to));
}

// Dimension `rows` of the view is the one with stride 1.
template <typename Word>
void transpose(Stream& stream, const StridedView& view, int rows, const void* from, void* to) {
  Transposition p;
  std::int64_t to_stride = 1;
  std::int64_t planes = 1;
  for (int d = view.rank - 1; d >= 0; --d) {
    const auto at = static_cast<std::size_t>(d);
    if (d == view.rank - 1) {
      p.cols = view.size[at];
      p.col_stride = view.stride[at];
    } else if (d == rows) {
      p.rows = view.size[at];
      p.row_stride = to_stride;
    } else {
      // The blocks of a grid are fewer than 2^31, and so are these.
      p.size[p.rank] = static_cast<unsigned>(view.size[at]);
      p.from_stride[p.rank] = view.stride[at];
      p.to_stride[p.rank++] = to_stride;
      planes *= view.size[at];
    }
    to_stride *= view.size[at];
  }
  p.row_tiles = static_cast<unsigned>(ceil_div(p.rows, kTile));
  p.col_tiles = static_cast<unsigned>(ceil_div(p.cols, kTile));
  const std::int64_t blocks = planes * p.row_tiles * p.col_tiles;
  launch(transpose_kernel<Word>, dim3(static_cast<unsigned>(blocks)), dim3(kTile, kTileRows), 0,
         native(stream), p, static_cast<const Word*>(from), static_cast<Word*>(to));
}

template <typename Word>
void copy_words(Stream& stream, const StridedView& view, const void* from, void* to,
                std::int64_t wide_from) {
  // A tile half of whose rows or columns are missing gains nothing.
  const auto last = static_cast<std::size_t>(view.rank - 1);
  if (view.stride[last] != 1 && view.size[last] >= kTile / 2) {
    for (int d = 0; d + 1 < view.rank; ++d) {
      const auto at = static_cast<std::size_t>(d);
      if (view.stride[at] == 1 && view.size[at] >= kTile / 2)
        return transpose<Word>(stream, view, d, from, to);
    }
  }
  if (words_of(view) < wide_from) return gather<Word, Divider32>(stream, view, from, to);
  gather<Word, Divider64>(stream, view, from, to);
}

// The view in words of `bytes` times those it has, where they divide everything.
bool widen(StridedView& view, std::int64_t bytes) {
  const auto last = static_cast<std::size_t>(view.rank - 1);
  if (view.stride[last] != 1 || view.size[last] % bytes != 0) return false;
  for (std::size_t d = 0; d < last; ++d) {
    if (view.stride[d] % bytes != 0) return false;
  }
  view.size[last] /= bytes;
  for (std::size_t d = 0; d < last; ++d) view.stride[d] /= bytes;
  return true;
}

StridedView in_bytes(const StridedView& elements, std::int64_t element_size) {
  StridedView view = merged(elements);
  for (int d = 0; d < view.rank; ++d) view.stride[static_cast<std::size_t>(d)] *= element_size;
  const auto last = static_cast<std::size_t>(view.rank - 1);
  if (view.rank > 0 && view.stride[last] == element_size) {
    view.size[last] *= element_size;
    view.stride[last] = 1;
  } else {
    append(view, element_size, 1);  // tensors have 6 dimensions, so there is room
  }
  return view;
}

}  // namespace

void strided_copy(Stream& stream, const StridedView& elements, std::size_t element_size,
                  const void* from, void* to, std::int64_t wide_from) {
  if (words_of(elements) == 0) return;
  StridedView view = in_bytes(elements, static_cast<std::int64_t>(element_size));
  if (view.rank == 1) return copy(stream, to, from, static_cast<std::size_t>(view.size[0]));
  const std::uintptr_t addresses =
      reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to);
  std::int64_t word = 16;
  while (addresses % static_cast<std::uintptr_t>(word) != 0 || !widen(view, word)) word /= 2;
  view = merged(view);
  switch (word) {
    case 1: return copy_words<std::uint8_t>(stream, view, from, to, wide_from);
    case 2: return copy_words<std::uint16_t>(stream, view, from, to, wide_from);
    case 4: return copy_words<std::uint32_t>(stream, view, from, to, wide_from);
    case 8: return copy_words<uint2>(stream, view, from, to, wide_from);
    default: return copy_words<uint4>(stream, view, from, to, wide_from);
  }
}

}  // namespace sherd::cuda
