// SPDX-License-Identifier: Apache-2.0
// The instructions that kernels are built on do on this device what the PTX manual says of them,
// and what the emulator therefore does.
#include "ptx_kernels.h"

#include "device_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

Stream& stream() {
  return device_context().compute_stream();
}

std::vector<std::uint16_t> random_bits(std::size_t count, const char* name) {
  const RandomStream random(7, "test", name);
  std::vector<std::uint16_t> bits(count);
  for (std::size_t i = 0; i < count; ++i) bits[i] = static_cast<std::uint16_t>(random.word(i));
  return bits;
}

// Small whole numbers: their products and sums are exact in any order and width.
template <typename T>
std::vector<T> whole_numbers(std::size_t count, const char* name) {
  const RandomStream random(7, "test", name);
  std::vector<T> values(count);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = T(static_cast<float>(static_cast<int>(random.below(i, 17)) - 8));
  return values;
}

template <typename T>
std::uint32_t pair_of(T low, T high) {
  return low.bits | static_cast<std::uint32_t>(high.bits) << 16;
}

template <typename T>
void check_mma() {
  const std::vector<T> a = whole_numbers<T>(16 * 16, "a"), b = whole_numbers<T>(16 * 8, "b");
  std::vector<std::uint32_t> left(32 * 4), right(32 * 2);
  std::vector<float> sums(32 * 4), expected(32 * 4);
  for (std::size_t lane = 0; lane < 32; ++lane) {
    const std::size_t g = lane / 4, t = lane % 4 * 2;
    const auto in_a = [&](std::size_t row, std::size_t column) {
      return pair_of(a[row * 16 + column], a[row * 16 + column + 1]);
    };
    left[lane * 4] = in_a(g, t);
    left[lane * 4 + 1] = in_a(g + 8, t);
    left[lane * 4 + 2] = in_a(g, t + 8);
    left[lane * 4 + 3] = in_a(g + 8, t + 8);
    for (std::size_t half = 0; half < 2; ++half) {
      const std::size_t row = t + 8 * half;
      right[lane * 2 + half] = pair_of(b[row * 8 + g], b[(row + 1) * 8 + g]);
    }
    for (std::size_t i = 0; i < 4; ++i) {
      const std::size_t row = g + i / 2 * 8, column = t + i % 2;
      sums[lane * 4 + i] = static_cast<float>(lane) - 9.f;
      float sum = sums[lane * 4 + i];
      for (std::size_t k = 0; k < 16; ++k)
        sum += static_cast<float>(a[row * 16 + k]) * static_cast<float>(b[k * 8 + column]);
      expected[lane * 4 + i] = sum;
    }
  }
  const DeviceArray<std::uint32_t> on_left(left), on_right(right);
  const DeviceArray<float> d(sums);
  run_mma(stream(), dtype_of<T>::value == DType::bf16, on_left.data(), on_right.data(), d.data());
  CHECK(d.values() == expected);
}

}  // namespace

TEST_CASE("device: ldmatrix deals out 8 x 8 matrices as said") {
  const std::vector<std::uint16_t> rows = random_bits(32 * 8, "rows");
  const DeviceArray<std::uint16_t> on_device(rows);
  in_all_orders([&] {
    for (const int matrices : {2, 4}) {
      for (const bool transposed : {false, true}) {
        CAPTURE(matrices);
        CAPTURE(transposed);
        const DeviceArray<std::uint32_t> out(32 * 4);
        run_ldmatrix(stream(), matrices, transposed, on_device.data(), out.data());
        const std::vector<std::uint32_t> got = out.values();
        for (std::size_t lane = 0; lane < 32; ++lane) {
          for (std::size_t m = 0; m < static_cast<std::size_t>(matrices); ++m) {
            const auto at = [&](std::size_t row, std::size_t column) -> std::uint32_t {
              return rows[(m * 8 + row) * 8 + column];
            };
            const std::size_t row = lane / 4, first = lane % 4 * 2;
            const std::uint32_t expected = transposed ? at(first, row) | at(first + 1, row) << 16
                                                      : at(row, first) | at(row, first + 1) << 16;
            CHECK(got[lane * 4 + m] == expected);
          }
        }
      }
    }
  });
}

TEST_CASE("device: mma multiplies fragments as said") {
  in_all_orders([] {
    check_mma<bf16>();
    check_mma<f16>();
  });
}

TEST_CASE("device: shuffles and ballots") {
  std::vector<std::uint32_t> values;
  for (const std::uint16_t bits : random_bits(32, "values")) values.push_back(bits);
  const DeviceArray<std::uint32_t> on_device(values);
  in_all_orders([&] {
    const DeviceArray<std::uint32_t> out(32 * 5);
    run_shuffles(stream(), on_device.data(), out.data());
    const std::vector<std::uint32_t> got = out.values();
    std::uint32_t odd = 0;
    for (std::size_t lane = 0; lane < 32; ++lane) odd |= (values[lane] % 2) << lane;
    for (std::size_t lane = 0; lane < 32; ++lane) {
      CHECK(got[lane * 5] == values[lane ^ 5]);
      CHECK(got[lane * 5 + 1] == values[lane < 3 ? lane : lane - 3]);
      CHECK(got[lane * 5 + 2] == values[lane > 28 ? lane : lane + 3]);
      CHECK(got[lane * 5 + 3] == values[7]);
      CHECK(got[lane * 5 + 4] == odd);
    }
  });
}

TEST_CASE("device: a copy in the background fills up with zeros") {
  const std::vector<std::uint16_t> from = random_bits(32 * 8, "from");
  const DeviceArray<std::uint16_t> on_device(from);
  in_all_orders([&] {
    for (const bool whole : {true, false}) {
      CAPTURE(whole);
      const DeviceArray<std::uint16_t> to(32 * 8);
      run_copy(stream(), whole, on_device.data(), to.data());
      const std::vector<std::uint16_t> got = to.values();
      for (std::size_t lane = 0; lane < 32; ++lane) {
        const std::size_t bytes = 16 * (lane + 1) / 32;
        for (std::size_t i = 0; i < 8; ++i) {
          const std::uint16_t mask = bytes >= 2 * i + 2 ? 0xffff : bytes == 2 * i + 1 ? 0xff : 0;
          CHECK(got[lane * 8 + i] == (from[lane * 8 + i] & mask));
        }
      }
    }
  });
}
