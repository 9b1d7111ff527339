// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/patchify.h>
#include <sherd/kernels/cpu/strided_copy.h>
#include <sherd/kernels/cuda/divider.h>
#include <sherd/kernels/cuda/patchify.h>
#include <sherd/kernels/cuda/strided_copy.h>

#include <numeric>

#include "array_support.h"

using namespace sherd;
using arguments::PatchShape;
using arguments::StridedView;
using test::Placed;

namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes some_bytes(std::size_t count) {
  const RandomStream stream(9, "test", "bytes");
  Bytes bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::uint8_t>(stream.word(i));
  return bytes;
}

struct View {
  const char* name;
  std::vector<std::int64_t> size, stride;
  std::int64_t origin = 0;  // of the element at index zero, in elements
};

// The permutation of a contiguous array of these sizes.
View permuted(const char* name, const std::vector<std::int64_t>& size,
              const std::vector<int>& order) {
  std::vector<std::int64_t> stride(size.size(), 1);
  for (std::size_t d = size.size() - 1; d > 0; --d) stride[d - 1] = stride[d] * size[d];
  View view{name, {}, {}};
  for (const int d : order) {
    view.size.push_back(size[static_cast<std::size_t>(d)]);
    view.stride.push_back(stride[static_cast<std::size_t>(d)]);
  }
  return view;
}

std::vector<View> views() {
  return {
      {"one element", {}, {}},
      {"nothing", {3, 0, 2}, {1, 1, 1}},
      {"contiguous", {4, 6, 5}, {30, 5, 1}},
      {"rows of 33", {5, 33}, {40, 1}},
      {"rows of 64", {40, 64}, {128, 1}},
      {"rows of 64, one element late", {6, 64}, {128, 1}, 1},
      {"rows of 64, at odd distances", {2, 6, 64}, {800, 97, 1}},
      {"every second", {300}, {2}},
      permuted("transposed", {70, 45}, {1, 0}),
      permuted("transposed, whole tiles", {64, 96}, {1, 0}),
      {"transposed planes with holes", {3, 45, 70}, {5000, 1, 47}},
      permuted("first dimension to the end", {50, 3, 40}, {2, 1, 0}),
      permuted("heads", {2, 9, 3, 16}, {0, 2, 1, 3}),
      permuted("narrow transposition", {200, 3}, {1, 0}),
      permuted("all six", {2, 3, 4, 2, 3, 5}, {5, 3, 1, 4, 2, 0}),
      permuted("all six, pairs", {2, 3, 4, 2, 3, 2}, {3, 1, 4, 2, 0, 5}),
      {"rows repeated", {7, 9}, {0, 1}},
      {"columns repeated", {20, 40}, {1, 0}},
      {"rows backwards", {10, 12}, {-12, 1}, 108},
      {"columns backwards", {10, 12}, {12, -1}, 11},
  };
}

}  // namespace

TEST_CASE("cuda copy: strided views of all element sizes, at any address") {
  constexpr std::size_t kElements = 15000;
  test::in_all_orders([&] {
    for (const View& v : views()) {
      StridedView view;
      std::int64_t count = 1;
      for (std::size_t d = 0; d < v.size.size(); ++d) {
        append(view, v.size[d], v.stride[d]);
        count *= v.size[d];
      }
      for (const std::size_t size : {1, 2, 4, 8}) {
        CAPTURE(v.name);
        CAPTURE(size);
        const Bytes source = some_bytes(kElements * size);
        Bytes expected(static_cast<std::size_t>(count) * size);
        const std::size_t origin = static_cast<std::size_t>(v.origin) * size;
        cpu::strided_copy(1, view, size, source.data() + origin, expected.data());
        const std::size_t offsets[][2] = {{0, 0}, {size, 0}, {0, size}, {1, 0}};
        for (const auto& places : offsets) {
          const std::size_t from = places[0], to = places[1];
          CAPTURE(from);
          CAPTURE(to);
          const Placed<std::uint8_t> in(source, from), out(expected.size(), to);
          // Places in 64 bits too.
          const std::int64_t wide_from = from == to ? std::int64_t{1} << 31 : 0;
          cuda::strided_copy(test::DeviceArray<std::uint8_t>::stream(), view, size,
                             in.data() + origin, out.data(), wide_from);
          CHECK(out.values() == expected);
        }
      }
    }
  });
}

TEST_CASE("cuda copy: division by multiplication") {
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 1;
  const RandomStream stream(5, "test", "division");
  for (std::uint64_t i = 0; i < 20000; ++i) {
    // All magnitudes of both.
    const auto divisor = static_cast<std::int64_t>(stream.below(4 * i, kMost) >> i % 31) + 1;
    std::int64_t number = static_cast<std::int64_t>(stream.below(4 * i + 1, kMost) >> i / 31 % 31);
    if (i % 3 == 1) number = std::min(kMost, number / divisor * divisor);
    if (i % 3 == 2) number = std::min(kMost, (number / divisor + 1) * divisor - 1);
    const auto quotient = cuda::Divider32(divisor).quotient(static_cast<std::uint32_t>(number));
    REQUIRE(quotient == number / divisor);
    REQUIRE(cuda::Divider64(divisor).quotient(number) == number / divisor);
  }
  CHECK(cuda::Divider32(kMost).quotient(static_cast<std::uint32_t>(kMost)) == 1);
  CHECK(cuda::Divider32(1).quotient(static_cast<std::uint32_t>(kMost)) == kMost);
}

TEST_CASE("cuda copy: images to patches and back") {
  // batch, channels, time, height, width, patch time, height, width
  const PatchShape shapes[] = {{2, 3, 1, 32, 48, 1, 16, 16}, {1, 3, 1, 28, 42, 1, 14, 14},
                               {2, 1, 1, 10, 15, 1, 5, 5},   {1, 2, 4, 16, 8, 2, 8, 4},
                               {2, 3, 3, 6, 9, 3, 2, 3},     {1, 1, 1, 4, 4, 1, 4, 4},
                               {0, 3, 1, 16, 16, 1, 16, 16}};
  test::in_all_orders([&] {
    for (const PatchShape& s : shapes) {
      const std::int64_t count = s.batch * s.channels * s.time * s.height * s.width;
      for (const std::size_t size : {1, 2, 4, 8}) {
        for (const std::size_t offset : {std::size_t{0}, size}) {
          CAPTURE(s.patch_width);
          CAPTURE(size);
          CAPTURE(offset);
          const Bytes images = some_bytes(static_cast<std::size_t>(count) * size);
          Bytes patches(images.size());
          cpu::patchify(1, s, size, images.data(), patches.data());
          const Placed<std::uint8_t> from(images, offset), between(images.size(), 0),
              back(images.size(), offset);
          Stream& stream = test::DeviceArray<std::uint8_t>::stream();
          cuda::patchify(stream, s, size, from.data(), between.data());
          CHECK(between.values() == patches);
          cuda::unpatchify(stream, s, size, between.data(), back.data());
          CHECK(back.values() == images);
        }
      }
    }
  });
}
