// SPDX-License-Identifier: Apache-2.0
// Every operation of a warp against a plain loop, on random data and in all orders.
#include <random>

#include "emulated.h"

using namespace emulated;

namespace {

std::mt19937_64 generator(7);

template <class T>
std::vector<T> random_values(std::size_t n) {
  std::vector<T> values(n);
  for (T& v : values) {
    if constexpr (std::is_integral_v<T>) {
      v = static_cast<T>(generator());
    } else {
      v = std::uniform_real_distribution<T>(-1, 1)(generator);
    }
  }
  return values;
}

template <class T>
__global__ void shuffles(const T* in, const int* source, int width, int step, T* out) {
  const int i = static_cast<int>(threadIdx.x), n = static_cast<int>(blockDim.x);
  out[i] = __shfl_sync(~0u, in[i], source[i], width);
  out[n + i] = __shfl_xor_sync(~0u, in[i], step, width);
  out[2 * n + i] = __shfl_up_sync(~0u, in[i], static_cast<unsigned>(step), width);
  out[3 * n + i] = __shfl_down_sync(~0u, in[i], static_cast<unsigned>(step), width);
}

template <class T>
void check_shuffles() {
  constexpr int kThreads = 96;
  const std::vector<T> in = random_values<T>(kThreads);
  std::vector<int> source(kThreads);
  for (int& s : source) s = static_cast<int>(generator() % 100) - 30;
  const DeviceArray<T> device_in(in);
  const DeviceArray<int> device_source(source);
  for (const int width : {1, 2, 4, 8, 16, 32}) {
    for (const int step : {0, 1, 3, 8, 31}) {
      const DeviceArray<T> out(4 * kThreads);
      run(shuffles<T>, 1, kThreads, device_in.data(), device_source.data(), width, step,
          out.data());
      const std::vector<T> got = out.host();
      for (int i = 0; i < kThreads; ++i) {
        const int lane = i % 32, first = i - lane % width, inside = lane % width;
        const int wrapped = ((source[static_cast<std::size_t>(i)] % width) + width) % width;
        const int flipped = (lane ^ step) % 32;
        // A lane of a later segment keeps its own value; earlier segments can be read.
        const int from_xor = flipped / width > lane / width ? i : i - lane + flipped;
        const int from_up = step <= inside ? i - step : i;
        const int from_down = inside + step < width ? i + step : i;
        const auto value = [&](int k) { return in[static_cast<std::size_t>(k)]; };
        const auto result = [&](int k) { return got[static_cast<std::size_t>(k * kThreads + i)]; };
        REQUIRE(result(0) == value(first + wrapped));
        REQUIRE(result(1) == value(from_xor));
        REQUIRE(result(2) == value(from_up));
        REQUIRE(result(3) == value(from_down));
      }
    }
  }
}

__global__ void votes(const int* in, unsigned* out) {
  const unsigned i = threadIdx.x, n = blockDim.x;
  out[i] = __ballot_sync(~0u, in[i]);
  out[n + i] = static_cast<unsigned>(__any_sync(~0u, in[i]));
  out[2 * n + i] = static_cast<unsigned>(__all_sync(~0u, in[i]));
  // Half-warps vote apart, at one line.
  const unsigned half = i % 32 < 16 ? 0xFFFFu : 0xFFFF0000u;
  out[3 * n + i] = __ballot_sync(half, in[i]);
}

__global__ void reductions(const unsigned* in, unsigned* out) {
  const unsigned i = threadIdx.x, n = blockDim.x, v = in[i];
  const int s = static_cast<int>(v);
  out[i] = __reduce_add_sync(~0u, v);
  out[n + i] = __reduce_min_sync(~0u, v);
  out[2 * n + i] = __reduce_max_sync(~0u, v);
  out[3 * n + i] = __reduce_and_sync(~0u, v | 0xF0u);
  out[4 * n + i] = __reduce_or_sync(~0u, v & 0xFFu);
  out[5 * n + i] = __reduce_xor_sync(~0u, v);
  out[6 * n + i] = static_cast<unsigned>(__reduce_add_sync(~0u, s));
  out[7 * n + i] = static_cast<unsigned>(__reduce_min_sync(~0u, s));
  out[8 * n + i] = static_cast<unsigned>(__reduce_max_sync(~0u, s));
}

// Lanes pass values through shared memory; without the warp's barrier a lane reads what is not
// there.
__global__ void rotate_in_warp(const int* in, int* out) {
  EMULATOR_SHARED(int, tile, 64);
  const unsigned i = threadIdx.x, lane = i % 32;
  tile[i] = in[i];
  __syncwarp();
  out[i] = tile[i - lane + (lane + 1) % 32];
}

}  // namespace

TEST_CASE("emulator: shuffles of all types, widths and steps") {
  in_all_orders([] {
    check_shuffles<int>();
    check_shuffles<unsigned long long>();
    check_shuffles<float>();
    check_shuffles<double>();
  });
}

TEST_CASE("emulator: votes, also of half a warp and of a partial one") {
  in_all_orders([] {
    for (const unsigned threads : {32u, 64u, 41u}) {
      std::vector<int> in(threads);
      for (unsigned i = 0; i < threads; ++i) in[i] = i < 32 ? 1 : static_cast<int>(generator() % 3);
      const DeviceArray<int> device_in(in);
      const DeviceArray<unsigned> out(4 * threads);
      run(votes, 1, threads, device_in.data(), out.data());
      const std::vector<unsigned> got = out.host();
      for (unsigned i = 0; i < threads; ++i) {
        unsigned ballot = 0, live = 0;
        for (unsigned k = i / 32 * 32; k < i / 32 * 32 + 32 && k < threads; ++k) {
          ballot |= static_cast<unsigned>(in[k] != 0) << k % 32;
          live |= 1u << k % 32;
        }
        REQUIRE(got[i] == ballot);
        REQUIRE(got[threads + i] == (ballot != 0));
        REQUIRE(got[2 * threads + i] == (ballot == live));
        REQUIRE(got[3 * threads + i] == (ballot & (i % 32 < 16 ? 0xFFFFu : 0xFFFF0000u)));
      }
    }
  });
}

TEST_CASE("emulator: reductions of a warp") {
  in_all_orders([] {
    const std::vector<unsigned> in = random_values<unsigned>(64);
    const DeviceArray<unsigned> device_in(in), out(9 * 64);
    run(reductions, 1, 64, device_in.data(), out.data());
    const std::vector<unsigned> got = out.host();
    for (unsigned i = 0; i < 64; ++i) {
      const unsigned first = i / 32 * 32;
      unsigned sum = 0, low = ~0u, high = 0, both = ~0u, either = 0, parity = 0;
      int signed_low = INT_MAX, signed_high = INT_MIN;
      for (unsigned k = first; k < first + 32; ++k) {
        sum += in[k];
        low = std::min(low, in[k]);
        high = std::max(high, in[k]);
        both &= in[k] | 0xF0u;
        either |= in[k] & 0xFFu;
        parity ^= in[k];
        signed_low = std::min(signed_low, static_cast<int>(in[k]));
        signed_high = std::max(signed_high, static_cast<int>(in[k]));
      }
      const unsigned expected[9] = {sum,
                                    low,
                                    high,
                                    both,
                                    either,
                                    parity,
                                    sum,
                                    static_cast<unsigned>(signed_low),
                                    static_cast<unsigned>(signed_high)};
      for (unsigned k = 0; k < 9; ++k) REQUIRE(got[k * 64 + i] == expected[k]);
    }
  });
}

TEST_CASE("emulator: __syncwarp orders shared memory") {
  in_all_orders([] {
    const std::vector<int> in = random_values<int>(64);
    const DeviceArray<int> device_in(in), out(64);
    run(rotate_in_warp, 1, 64, device_in.data(), out.data());
    const std::vector<int> got = out.host();
    for (unsigned i = 0; i < 64; ++i) REQUIRE(got[i] == in[i / 32 * 32 + (i + 1) % 32]);
  });
}
