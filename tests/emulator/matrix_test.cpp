// SPDX-License-Identifier: Apache-2.0
// ldmatrix and mma.sync against a plain matrix product: the fragments of ldmatrix go into mma, and
// the layout of the result is the manual's.
#include <cstdint>
#include <cstring>
#include <random>

#include "emulated.h"

using namespace emulated;

namespace {

std::mt19937 generator(11);
using Half = std::uint16_t;

float from_bf16(Half h) {
  return __uint_as_float(static_cast<unsigned>(h) << 16);
}
// By the definition of the format, not by the emulator's trick.
float from_f16(Half h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  const double sign = h & 0x8000 ? -1 : 1;
  if (exponent == 31) return static_cast<float>(fraction != 0 ? NAN : sign * INFINITY);
  if (exponent == 0) return static_cast<float>(sign * std::ldexp(fraction, -24));
  return static_cast<float>(sign * std::ldexp(1024 + fraction, exponent - 25));
}

// Random numbers of moderate size, with all mantissa bits in use; fp16 ones also subnormal.
std::vector<Half> random_bf16(std::size_t n) {
  std::vector<Half> values(n);
  for (Half& v : values)
    v = static_cast<Half>((generator() & 0x80FFu) | (0x3E80u + (generator() & 0x100u)));
  return values;
}
std::vector<Half> random_f16(std::size_t n) {
  std::vector<Half> values(n);
  for (Half& v : values) v = static_cast<Half>(generator() & 0xBFFFu);  // below 2
  return values;
}

// C (16x8) = A (16x16) B (16x8), all through shared memory. B is row-major, so its columns come by
// the transposing load.
template <class Type>
__global__ void product(const Half* a, const Half* b, float* c) {
  EMULATOR_SHARED(Half, tile_a, 16 * 24);  // rows of 48 bytes
  EMULATOR_SHARED(Half, tile_b, 16 * 8);
  const int l = static_cast<int>(threadIdx.x);
  for (int i = l; i < 256; i += 32) tile_a[i / 16 * 24 + i % 16] = a[i];
  for (int i = l; i < 128; i += 32) tile_b[i] = b[i];
  __syncwarp();
  std::uint32_t fa[4], fb[2];
  float d[4] = {1, 2, 3, 4};
  emulator::ldmatrix_x4(fa, &tile_a[l % 16 * 24 + l / 16 * 8]);
  emulator::ldmatrix_x2_trans(fb, &tile_b[l % 16 * 8]);
  emulator::mma_m16n8k16(d, fa, fb, Type{});
  const int g = l / 4, t = l % 4 * 2;
  c[g * 8 + t] = d[0];
  c[g * 8 + t + 1] = d[1];
  c[(g + 8) * 8 + t] = d[2];
  c[(g + 8) * 8 + t + 1] = d[3];
}

template <class Type>
void check_product(const std::vector<Half>& a, const std::vector<Half>& b, float (*value)(Half)) {
  const DeviceArray<Half> device_a(a), device_b(b);
  const DeviceArray<float> c(128);
  run(product<Type>, 1, 32, device_a.data(), device_b.data(), c.data());
  const std::vector<float> got = c.host();
  for (std::size_t i = 0; i < 16; ++i) {
    for (std::size_t j = 0; j < 8; ++j) {
      double sum = 1 + static_cast<double>(i / 8 * 2 + j % 2), size = 0;
      for (std::size_t k = 0; k < 16; ++k) {
        const double term = static_cast<double>(value(a[i * 16 + k])) * value(b[k * 8 + j]);
        sum += term;
        size += std::abs(term);
      }
      REQUIRE(std::abs(got[i * 8 + j] - sum) <= 1e-6 * (size + 4));
    }
  }
}

// Each matrix of every form of ldmatrix, element by element.
template <int Matrices>
__global__ void load(const Half* in, std::uint32_t* out) {
  EMULATOR_SHARED(Half, tile, 64 * Matrices);
  const int l = static_cast<int>(threadIdx.x);
  for (int i = l; i < 64 * Matrices; i += 32) tile[i] = in[i];
  __syncwarp();
  // The addresses of lanes that a form does not read may be anything.
  const Half* row = l < 8 * Matrices ? &tile[l * 8] : nullptr;
  std::uint32_t plain[Matrices], transposed[Matrices];
  if constexpr (Matrices == 1) {
    emulator::ldmatrix_x1(plain, row);
    emulator::ldmatrix_x1_trans(transposed, row);
  } else if constexpr (Matrices == 2) {
    emulator::ldmatrix_x2(plain, row);
    emulator::ldmatrix_x2_trans(transposed, row);
  } else {
    emulator::ldmatrix_x4(plain, row);
    emulator::ldmatrix_x4_trans(transposed, row);
  }
  for (int i = 0; i < Matrices; ++i) {
    out[(2 * i) * 32 + l] = plain[i];
    out[(2 * i + 1) * 32 + l] = transposed[i];
  }
}

template <int Matrices>
void check_load() {
  std::vector<Half> in(64 * Matrices);
  for (Half& v : in) v = static_cast<Half>(generator());
  const DeviceArray<Half> device_in(in);
  const DeviceArray<std::uint32_t> out(64 * Matrices);
  run(load<Matrices>, 1, 32, device_in.data(), out.data());
  const std::vector<std::uint32_t> got = out.host();
  for (std::size_t i = 0; i < Matrices; ++i) {
    for (std::size_t l = 0; l < 32; ++l) {
      const Half* m = &in[64 * i];
      const std::size_t a = l / 4, b = l % 4 * 2;
      REQUIRE(got[2 * i * 32 + l] == (m[a * 8 + b] | std::uint32_t{m[a * 8 + b + 1]} << 16));
      REQUIRE(got[(2 * i + 1) * 32 + l] ==
              (m[b * 8 + a] | std::uint32_t{m[(b + 1) * 8 + a]} << 16));
    }
  }
}

__global__ void tf32_product(const std::uint32_t* a, const std::uint32_t* b, float* c) {
  const int l = static_cast<int>(threadIdx.x), g = l / 4, t = l % 4;
  const std::uint32_t fa[4] = {a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + t + 4],
                               a[(g + 8) * 8 + t + 4]};
  const std::uint32_t fb[2] = {b[t * 8 + g], b[(t + 4) * 8 + g]};
  float d[4] = {0, 0, 0, 0};
  emulator::mma_m16n8k8_tf32(d, fa, fb);
  for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

__global__ void powers_of_two(const float* x, float* y) {
  y[threadIdx.x] = emulator::ex2(x[threadIdx.x]);
}

}  // namespace

TEST_CASE("emulator: mma.sync of bf16 and fp16 is the matrix product") {
  in_all_orders([] {
    for (int repeat = 0; repeat < 5; ++repeat) {
      check_product<emulator::Bf16>(random_bf16(256), random_bf16(128), from_bf16);
      check_product<emulator::F16>(random_f16(256), random_f16(128), from_f16);
    }
  });
}

TEST_CASE("emulator: mma.sync reads every fp16 value right") {
  // One value of A meets 1.0 in B: the result is the value itself.
  std::vector<Half> a(256), b(128, 0);
  b[0] = 0x3C00;
  for (unsigned first = 0; first < 65536; first += 16) {
    for (unsigned i = 0; i < 16; ++i) a[i * 16] = static_cast<Half>(first + i);
    const DeviceArray<Half> device_a(a), device_b(b);
    const DeviceArray<float> c(128);
    run(product<emulator::F16>, 1, 32, device_a.data(), device_b.data(), c.data());
    const std::vector<float> got = c.host();
    for (unsigned i = 0; i < 16; ++i) {
      const float value = from_f16(a[i * 16]), sum = 1 + static_cast<float>(i / 8 * 2) + value;
      REQUIRE((std::isnan(sum) ? std::isnan(got[i * 8]) : got[i * 8] == sum));
    }
  }
}

TEST_CASE("emulator: ldmatrix of one, two and four matrices, plain and transposed") {
  in_all_orders([] {
    check_load<1>();
    check_load<2>();
    check_load<4>();
  });
}

TEST_CASE("emulator: mma.sync of tf32 drops the low bits") {
  std::vector<std::uint32_t> a(128), b(64);
  const auto random_bits = [] { return (generator() & 0x80FFFFFFu) | 0x3F000000u; };
  for (auto& v : a) v = random_bits();
  for (auto& v : b) v = random_bits();
  const DeviceArray<std::uint32_t> device_a(a), device_b(b);
  const DeviceArray<float> c(128);
  run(tf32_product, 1, 32, device_a.data(), device_b.data(), c.data());
  const std::vector<float> got = c.host();
  const auto value = [](std::uint32_t bits) {
    return static_cast<double>(__uint_as_float(bits & ~0x1FFFu));
  };
  for (std::size_t i = 0; i < 16; ++i) {
    for (std::size_t j = 0; j < 8; ++j) {
      double sum = 0;
      for (std::size_t k = 0; k < 8; ++k) sum += value(a[i * 8 + k]) * value(b[k * 8 + j]);
      REQUIRE(std::abs(got[i * 8 + j] - sum) <= 1e-5);
    }
  }
}

TEST_CASE("emulator: ex2") {
  const std::vector<float> x{0, 1, -1, 0.5f, 10, -126, -INFINITY};
  const DeviceArray<float> device_x(x), y(x.size());
  run(powers_of_two, 1, static_cast<unsigned>(x.size()), device_x.data(), y.data());
  const std::vector<float> got = y.host();
  for (std::size_t i = 0; i < x.size(); ++i) CHECK(got[i] == std::exp2(x[i]));
}
