// SPDX-License-Identifier: Apache-2.0
// What a single thread computes, against definitions; atomics of many threads.
#include <cstdint>
#include <random>

#include "emulated.h"

using namespace emulated;

namespace {

__global__ void add_atomically(int* i, unsigned* u, unsigned long long* l, float* f, double* d) {
  atomicAdd(i, -1);
  atomicAdd(u, 2u);
  atomicAdd(l, 1ull << 33);
  atomicAdd(f, 0.5f);
  atomicAdd(d, 0.25);
}

__global__ void other_atomics(int* i, unsigned* u, int* old) {
  const int me = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const unsigned n = blockDim.x * gridDim.x;
  atomicMax(&i[0], me);
  atomicMin(&i[1], me);
  atomicSub(&i[2], 1);
  old[me] = atomicExch(&i[3], me);
  atomicAnd(&u[0], ~(1u << (me & 31)));
  atomicOr(&u[1], 1u << (me & 31));
  atomicXor(&u[2], static_cast<unsigned>(me));
  atomicInc(&u[3], n / 2);
  // A lock-free sum by compare and swap.
  unsigned seen = 0;
  for (;;) {
    const unsigned before = atomicCAS(&u[4], seen, seen + 3);
    if (before == seen) break;
    seen = before;
  }
}

}  // namespace

TEST_CASE("emulator: atomics") {
  in_all_orders([] {
    const DeviceArray<int> i(std::vector<int>{5});
    const DeviceArray<unsigned> u(std::vector<unsigned>{5});
    const DeviceArray<unsigned long long> l(std::vector<unsigned long long>{5});
    const DeviceArray<float> f(std::vector<float>{1});
    const DeviceArray<double> d(std::vector<double>{1});
    run(add_atomically, 3, 100, i.data(), u.data(), l.data(), f.data(), d.data());
    CHECK(i.host()[0] == -295);
    CHECK(u.host()[0] == 605);
    CHECK(l.host()[0] == 5 + 300 * (1ull << 33));
    CHECK(f.host()[0] == 151);
    CHECK(d.host()[0] == 76);

    const DeviceArray<int> values(std::vector<int>{-1, 999, 0, -7}), old(300);
    const DeviceArray<unsigned> bits(std::vector<unsigned>{~0u, 0, 0, 0, 0});
    run(other_atomics, 3, 100, values.data(), bits.data(), old.data());
    const std::vector<int> v = values.host(), o = old.host();
    const std::vector<unsigned> b = bits.host();
    CHECK(v[0] == 299);
    CHECK(v[1] == 0);
    CHECK(v[2] == -300);
    long sum = v[3];  // every number was put there once and taken out once
    for (const int x : o) sum += x;
    CHECK(sum == 299 * 300 / 2 - 7);
    unsigned parity = 0;
    for (unsigned k = 0; k < 300; ++k) parity ^= k;
    CHECK(b == std::vector<unsigned>{0, ~0u, parity, 300 % 151, 900});
  });
}

TEST_CASE("emulator: bits") {
  std::mt19937_64 random(3);
  for (int repeat = 0; repeat < 200; ++repeat) {
    const auto x = static_cast<unsigned>(random() >> (random() % 64));
    const auto y = static_cast<unsigned>(random());
    const std::uint64_t big = random() >> (random() % 64), other = random();
    int ones = 0, leading = 0, first = 0;
    unsigned reversed = 0;
    for (int i = 0; i < 32; ++i) {
      ones += x >> i & 1;
      reversed = reversed << 1 | (x >> i & 1);
      if (first == 0 && (x >> i & 1)) first = i + 1;
    }
    while (leading < 32 && !(x >> (31 - leading) & 1)) ++leading;
    CHECK(__popc(x) == ones);
    CHECK(__brev(x) == reversed);
    CHECK(__ffs(static_cast<int>(x)) == first);
    CHECK(__clz(static_cast<int>(x)) == leading);
    int leading_big = 0, ones_big = 0;
    while (leading_big < 64 && !(big >> (63 - leading_big) & 1)) ++leading_big;
    for (int i = 0; i < 64; ++i) ones_big += big >> i & 1;
    CHECK(__clzll(static_cast<long long>(big)) == leading_big);
    CHECK(__popcll(big) == ones_big);
    // Schoolbook product of halves.
    const std::uint64_t a0 = big & 0xFFFFFFFF, a1 = big >> 32, b0 = other & 0xFFFFFFFF,
                        b1 = other >> 32;
    const std::uint64_t middle = a1 * b0 + (a0 * b0 >> 32);
    const std::uint64_t high = a1 * b1 + (middle >> 32) + ((a0 * b1 + (middle & 0xFFFFFFFF)) >> 32);
    CHECK(__umul64hi(big, other) == high);
    std::uint64_t signed_high = high;  // two's complement
    if (big >> 63) signed_high -= other;
    if (other >> 63) signed_high -= big;
    CHECK(__mul64hi(static_cast<long long>(big), static_cast<long long>(other)) ==
          static_cast<long long>(signed_high));
    CHECK(__umulhi(x, y) == static_cast<unsigned>(std::uint64_t{x} * y >> 32));
    CHECK(__mulhi(static_cast<int>(x), static_cast<int>(y)) ==
          static_cast<int>(std::int64_t{static_cast<int>(x)} * static_cast<int>(y) >> 32));
  }
  CHECK(__clz(0) == 32);
  CHECK(__clzll(0) == 64);
  CHECK(__ffs(0) == 0);
  CHECK(__byte_perm(0x33221100, 0x77665544, 0x7531) == 0x77553311);
  CHECK(__byte_perm(0x80000000, 0, 0x000B) == 0x000000FF);
  CHECK(__funnelshift_l(0x80000001, 0x2, 1) == 0x5);
  CHECK(__funnelshift_r(0x80000000, 0x1, 31) == 0x3);
}

TEST_CASE("emulator: conversions saturate as on the device") {
  CHECK(__float2int_rn(2.5f) == 2);
  CHECK(__float2int_rn(3.5f) == 4);
  CHECK(__float2int_rz(-2.7f) == -2);
  CHECK(__float2int_rd(-2.1f) == -3);
  CHECK(__float2int_ru(2.1f) == 3);
  CHECK(__float2int_rn(3e9f) == INT_MAX);
  CHECK(__float2int_rn(-3e9f) == INT_MIN);
  CHECK(__float2int_rn(NAN) == 0);
  CHECK(__float2uint_rn(-1.0f) == 0);
  CHECK(__float2uint_rz(5e9f) == UINT_MAX);
  CHECK(__double2ll_rn(1e30) == LLONG_MAX);
  CHECK(__int2float_rn(16777217) == 16777216.0f);
  CHECK(__float_as_uint(-2.0f) == 0xC0000000u);
  CHECK(__uint_as_float(0x3F800000u) == 1.0f);
  CHECK(__longlong_as_double(__double_as_longlong(0.1)) == 0.1);
  CHECK(__saturatef(NAN) == 0);
  CHECK(__saturatef(1.5f) == 1);
  CHECK(__saturatef(0.25f) == 0.25f);
}

TEST_CASE("emulator: minimum, maximum and arithmetic of one rounding") {
  CHECK(min(-1, 2) == -1);
  CHECK(max(-1, 2u) == ~0u);  // as unsigned numbers, as on the device
  CHECK(min(NAN, 2.0f) == 2.0f);
  CHECK(max(1.5, 2.5) == 2.5);
  CHECK(min(5ull, 1ull << 40) == 5);
  CHECK(__fmaf_rn(1.0f + 0x1p-12f, 1.0f + 0x1p-12f, -1.0f) == 0x1p-11f + 0x1p-24f);
  CHECK(__fmul_rn(1.0f + 0x1p-12f, 1.0f + 0x1p-12f) == 1.0f + 0x1p-11f);
  CHECK(__fadd_rn(1.0f, 0x1p-25f) == 1.0f);
  CHECK(__frcp_rn(3.0f) == 1.0f / 3.0f);
  CHECK(__fsqrt_rn(2.0f) == std::sqrt(2.0f));
  CHECK(__dmul_rn(0.1, 3.0) == 0.1 * 3.0);
  CHECK(__fma_rn(0.1, 10.0, -1.0) == std::fma(0.1, 10.0, -1.0));
  CHECK(rsqrtf(4.0f) == 0.5f);
  CHECK(__expf(1.0f) == std::exp(1.0f));
  CHECK(__logf(10.0f) == std::log(10.0f));
  CHECK(__fdividef(1.0f, 3.0f) == 1.0f / 3.0f);
  CHECK(__exp10f(2.0f) == 100.0f);
}

TEST_CASE("emulator: vector types have the device's sizes and alignments") {
  CHECK((sizeof(float4) == 16 && alignof(float4) == 16));
  CHECK((sizeof(float3) == 12 && alignof(float3) == 4));
  CHECK((sizeof(float2) == 8 && alignof(float2) == 8));
  CHECK((sizeof(double2) == 16 && alignof(double2) == 16));
  CHECK((sizeof(double4) == 32 && alignof(double4) == 16));
  CHECK((sizeof(uchar4) == 4 && alignof(uchar4) == 4));
  CHECK((sizeof(ushort4) == 8 && alignof(ushort4) == 8));
  CHECK((sizeof(dim3) == 12 && dim3(4).y == 1));
  CHECK(make_int4(1, 2, 3, 4).w == 4);
}
