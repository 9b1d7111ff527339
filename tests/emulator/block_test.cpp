// SPDX-License-Identifier: Apache-2.0
// Blocks and grids: barriers, shared memory, asynchronous copies, orders.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <numeric>

#include "emulated.h"

using namespace emulated;

namespace {

// A tree sum over the block: as many barriers as steps.
__global__ void block_sum(const int* in, int* out) {
  EMULATOR_SHARED(int, sums, 1024);
  const unsigned i = threadIdx.x;
  sums[i] = in[blockIdx.x * blockDim.x + i];
  __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (i < half) sums[i] += sums[i + half];
    __syncthreads();
  }
  if (i == 0) out[blockIdx.x] = sums[0];
}

__global__ void counting(const int* in, int* out) {
  const unsigned i = threadIdx.x, n = blockDim.x;
  for (unsigned round = 0; round < 3; ++round) {
    const int value = in[i] > static_cast<int>(round);
    int* o = out + (round * n + i) * 3;
    o[0] = __syncthreads_count(value);
    o[1] = __syncthreads_or(value);
    o[2] = __syncthreads_and(value);
  }
}

// Threads that return early are no longer waited for.
__global__ void early_exit(int stay, int* out) {
  EMULATOR_SHARED(int, seen, 128);
  const int i = static_cast<int>(threadIdx.x);
  if (i >= stay) return;
  seen[i] = i + 1;
  __syncthreads();
  out[i] = seen[(i + 1) % stay];
}

// Two producers and one consumer warp with barriers of their own, as in specialised kernels.
__global__ void named(int* out) {
  EMULATOR_SHARED(int, box, 64);
  const int i = static_cast<int>(threadIdx.x), pair = i / 64;
  if (i % 64 < 32) {
    box[pair * 32 + i % 32] = 100 * pair + i % 32;
    emulator::named_barrier(1 + pair, 64);
  } else {
    emulator::named_barrier(1 + pair, 64);
    out[pair * 32 + i % 32] = box[pair * 32 + 31 - i % 32];
  }
}

__global__ void indices(int* out) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] +=
      static_cast<int>(block * 1000 + thread);
}

// Numbers of threads in the order of their running.
__global__ void note_order(int* count, int* ran) {
  ran[atomicAdd(count, 1)] = static_cast<int>(blockIdx.x * 1000 + threadIdx.x);
}

__global__ void read_unwritten(unsigned* out) {
  EMULATOR_SHARED(unsigned, fixed, 4);
  EMULATOR_DYNAMIC_SHARED(unsigned, dynamic);
  if (threadIdx.x == 0) {
    out[2 * blockIdx.x] = fixed[3];
    out[2 * blockIdx.x + 1] = dynamic[3];
    fixed[3] = dynamic[3] = 0;
  }
}

__global__ void fill_dynamic(unsigned char* out, unsigned bytes) {
  EMULATOR_DYNAMIC_SHARED(unsigned char, data);
  for (unsigned i = threadIdx.x; i < bytes; i += blockDim.x)
    data[i] = static_cast<unsigned char>(i * 7);
  __syncthreads();
  for (unsigned i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = data[bytes - 1 - i];
}

// Three groups in flight; what is not waited for is NaN.
__global__ void copies(const float* in, float* out) {
  EMULATOR_SHARED(float, tile, 3 * 32 * 4);
  const int i = static_cast<int>(threadIdx.x);
  for (int group = 0; group < 3; ++group) {
    for (int k = 0; k < 4; ++k) tile[(group * 32 + i) * 4 + k] = 5;
    emulator::cp_async16(&tile[(group * 32 + i) * 4], in + (group * 32 + i) * 4);
    emulator::cp_async_commit();
  }
  const auto look = [&](int step) {
    for (int group = 0; group < 3; ++group)
      out[(step * 3 + group) * 32 + i] = tile[(group * 32 + i) * 4 + 2];
  };
  look(0);
  emulator::cp_async_wait<2>();
  look(1);
  emulator::cp_async_wait<1>();
  look(2);
  emulator::cp_async_wait<0>();
  look(3);
}

__global__ void small_copies(const std::uint32_t* in, std::uint32_t* out) {
  EMULATOR_SHARED(std::uint32_t, tile, 16);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 16; ++i) tile[i] = 9;
    emulator::cp_async16(&tile[0], &in[0], 16);
    emulator::cp_async16(&tile[4], &in[4], 4);
    emulator::cp_async16(&tile[8], nullptr, 0);  // reads nothing
    emulator::cp_async8(&tile[12], &in[12], 4);
    emulator::cp_async4(&tile[14], &in[14]);
    emulator::cp_async4(&tile[15], &in[15], 0);
    emulator::cp_async_commit();
    emulator::cp_async_wait<0>();
    for (int i = 0; i < 16; ++i) out[i] = tile[i];
  }
}

}  // namespace

TEST_CASE("emulator: __syncthreads, in blocks of all sizes") {
  in_all_orders([] {
    for (const unsigned threads : {1u, 2u, 32u, 64u, 256u, 1024u}) {
      std::vector<int> in(threads * 3);
      std::iota(in.begin(), in.end(), -5);
      const DeviceArray<int> device_in(in), out(3);
      run(block_sum, 3, threads, device_in.data(), out.data());
      const std::vector<int> got = out.host();
      for (unsigned b = 0; b < 3; ++b) {
        const auto first = in.begin() + b * threads;
        REQUIRE(got[b] == std::accumulate(first, first + threads, 0));
      }
    }
  });
}

TEST_CASE("emulator: barriers that count, again and again") {
  in_all_orders([] {
    const DeviceArray<int> in(std::vector<int>{3, 3, 2, 1, 1, 1}), out(54);
    run(counting, 1, 6, in.data(), out.data());
    const std::vector<int> got = out.host();
    for (std::size_t i = 0; i < 6; ++i) {
      const int expected[3][3] = {{6, 1, 1}, {3, 1, 0}, {2, 1, 0}};
      for (std::size_t round = 0; round < 3; ++round) {
        for (std::size_t k = 0; k < 3; ++k)
          REQUIRE(got[(round * 6 + i) * 3 + k] == expected[round][k]);
      }
    }
  });
}

TEST_CASE("emulator: threads that return early, and named barriers") {
  in_all_orders([] {
    for (const int stay : {1, 31, 33, 100}) {
      const DeviceArray<int> out(static_cast<std::size_t>(stay));
      run(early_exit, 1, 128, stay, out.data());
      const std::vector<int> got = out.host();
      for (int i = 0; i < stay; ++i)
        REQUIRE(got[static_cast<std::size_t>(i)] == (i + 1) % stay + 1);
    }
    const DeviceArray<int> out(64);
    run(named, 1, 128, out.data());
    const std::vector<int> got = out.host();
    for (int i = 0; i < 64; ++i)
      REQUIRE(got[static_cast<std::size_t>(i)] == 100 * (i / 32) + 31 - i % 32);
  });
}

TEST_CASE("emulator: every thread of every block runs once, with its indices") {
  in_all_orders([] {
    const DeviceArray<int> out(std::vector<int>(24 * 30, 0));
    run(indices, dim3(4, 3, 2), dim3(5, 3, 2), out.data());
    const std::vector<int> got = out.host();
    for (std::size_t i = 0; i < got.size(); ++i)
      REQUIRE(got[i] == static_cast<int>(i / 30 * 1000 + i % 30));
  });
}

TEST_CASE("emulator: orders of threads and blocks") {
  const auto order = [] {
    const DeviceArray<int> count(std::vector<int>{0}), ran(490);
    run(note_order, 7, 70, count.data(), ran.data());
    return ran.host();
  };
  const std::vector<int> forward = order();
  CHECK(std::is_sorted(forward.begin(), forward.end()));
  emulator::set_order(emulator::Order::reverse);
  const std::vector<int> reverse = order();
  CHECK(std::is_sorted(reverse.rbegin(), reverse.rend()));
  emulator::set_order(emulator::Order::random, 1);
  const std::vector<int> random = order();
  CHECK(random == order());  // the seed decides
  emulator::set_order(emulator::Order::random, 2);
  CHECK(random != order());
  CHECK(random != forward);
  CHECK_FALSE(std::is_sorted(random.begin(), random.begin() + 70));
  // Blocks are permuted too.
  std::vector<int> blocks;
  for (std::size_t i = 0; i < random.size(); i += 70) blocks.push_back(random[i] / 1000);
  CHECK_FALSE(std::is_sorted(blocks.begin(), blocks.end()));
  std::vector<int> sorted = random;
  std::sort(sorted.begin(), sorted.end());
  CHECK(sorted == forward);
  emulator::set_order(emulator::Order::forward);
}

TEST_CASE("emulator: shared memory is NaN at the start of every block") {
  const DeviceArray<unsigned> out(6);
  expect(emulator::launch(read_unwritten, 3, 32, 64, nullptr, out.data()));
  for (const unsigned bits : out.host()) CHECK(bits == ~0u);
}

TEST_CASE("emulator: dynamic shared memory of all sizes") {
  for (const unsigned bytes : {1u, 100u, 128u, 48u * 1024, 227u * 1024}) {
    const DeviceArray<unsigned char> out(bytes);
    expect(cudaFuncSetAttribute(fill_dynamic, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(bytes)));
    expect(emulator::launch(fill_dynamic, 2, 64, bytes, nullptr, out.data(), bytes));
    const std::vector<unsigned char> got = out.host();
    for (unsigned i = 0; i < bytes; ++i) {
      REQUIRE(got[i] == static_cast<unsigned char>((bytes - 1 - i) * 7));
    }
  }
}

TEST_CASE("emulator: cp.async arrives with the wait for its group, and is NaN before") {
  in_all_orders([] {
    std::vector<float> in(3 * 32 * 4);
    std::iota(in.begin(), in.end(), 1.0f);
    const DeviceArray<float> device_in(in), out(4 * 3 * 32);
    run(copies, 1, 32, device_in.data(), out.data());
    const std::vector<float> got = out.host();
    for (std::size_t step = 0; step < 4; ++step) {
      for (std::size_t group = 0; group < 3; ++group) {
        for (std::size_t i = 0; i < 32; ++i) {
          const float value = got[(step * 3 + group) * 32 + i];
          if (group < step) REQUIRE(value == in[(group * 32 + i) * 4 + 2]);
          if (group >= step) REQUIRE(std::isnan(value));
        }
      }
    }
  });
}

TEST_CASE("emulator: cp.async of 4, 8 and 16 bytes fills up with zeros") {
  std::vector<std::uint32_t> in(16);
  std::iota(in.begin(), in.end(), 100u);
  const DeviceArray<std::uint32_t> device_in(in), out(16);
  run(small_copies, 1, 32, device_in.data(), out.data());
  CHECK(out.host() ==
        std::vector<std::uint32_t>{100, 101, 102, 103, 104, 0, 0, 0, 0, 0, 0, 0, 112, 0, 114, 0});
}
