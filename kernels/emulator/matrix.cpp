// SPDX-License-Identifier: Apache-2.0
// ldmatrix and mma.sync: layouts of fragments from the PTX manual, "Warp Level Matrix
// Multiply-Accumulate Instructions".
#include <cstring>

#include "block.h"

namespace emulator {
namespace {

float bf16_low(std::uint32_t pair) {
  return bits_as<float>(pair << 16);
}
float bf16_high(std::uint32_t pair) {
  return bits_as<float>(pair & 0xFFFF0000u);
}

// fp16 to fp32: the exponent is moved by a product, which also normalises subnormal numbers.
float f16(std::uint32_t half) {
  const std::uint32_t rest = (half & 0x7FFFu) << 13;
  std::uint32_t bits = bits_as<std::uint32_t>(bits_as<float>(rest) * 0x1p112f);
  if (rest >= 0x7C00u << 13) bits |= 0x7F800000u;  // infinity and NaN
  return bits_as<float>(bits | (half & 0x8000u) << 16);
}
float f16_low(std::uint32_t pair) {
  return f16(pair & 0xFFFFu);
}
float f16_high(std::uint32_t pair) {
  return f16(pair >> 16);
}

template <int K>
struct Matrices {
  float a[16][K];
  alignas(64) float b[K][8];
  alignas(64) float d[16][8];

  void load_sums(const Fragments* const* in) {
    for (int l = 0; l < 32; ++l) {
      const int g = l / 4, t = l % 4 * 2;
      std::memcpy(&d[g][t], in[l]->d, 8);
      std::memcpy(&d[g + 8][t], in[l]->d + 2, 8);
    }
  }
  void store_sums(const Fragments* const* in) {
    for (int l = 0; l < 32; ++l) {
      const int g = l / 4, t = l % 4 * 2;
      std::memcpy(in[l]->d, &d[g][t], 8);
      std::memcpy(in[l]->d + 2, &d[g + 8][t], 8);
    }
  }
  void multiply() {
    for (int i = 0; i < 16; ++i) {
      for (int k = 0; k < K; ++k) {
        const float x = a[i][k];
        for (int j = 0; j < 8; ++j) d[i][j] += x * b[k][j];
      }
    }
  }
};

template <float (*Low)(std::uint32_t), float (*High)(std::uint32_t)>
void multiply_pairs(const Fragments* const* in) {
  Matrices<16> m;
  for (int l = 0; l < 32; ++l) {
    const int g = l / 4, t = l % 4 * 2;
    const Fragments& f = *in[l];
    for (int i = 0; i < 4; ++i) {
      float* a = &m.a[g + i % 2 * 8][t + i / 2 * 8];
      a[0] = Low(f.a[i]);
      a[1] = High(f.a[i]);
    }
    for (int i = 0; i < 2; ++i) {
      m.b[t + 8 * i][g] = Low(f.b[i]);
      m.b[t + 8 * i + 1][g] = High(f.b[i]);
    }
  }
  m.load_sums(in);
  m.multiply();
  m.store_sums(in);
}

void need_whole_warp(unsigned lanes, const char* problem, Location where) {
  if (lanes != ~0u) fail(where, problem);
}
constexpr const char* kPartialMma = "mma.sync needs all 32 lanes of a warp";

}  // namespace

void multiply_bf16(const Fragments* const* in, unsigned lanes, Location where) {
  need_whole_warp(lanes, kPartialMma, where);
  multiply_pairs<bf16_low, bf16_high>(in);
}

void multiply_f16(const Fragments* const* in, unsigned lanes, Location where) {
  need_whole_warp(lanes, kPartialMma, where);
  multiply_pairs<f16_low, f16_high>(in);
}

void multiply_tf32(const Fragments* const* in, unsigned lanes, Location where) {
  need_whole_warp(lanes, kPartialMma, where);
  const auto tf32 = [](std::uint32_t bits) { return bits_as<float>(bits & 0xFFFFE000u); };
  Matrices<8> m;
  for (int l = 0; l < 32; ++l) {
    const int g = l / 4, t = l % 4;
    const Fragments& f = *in[l];
    for (int i = 0; i < 4; ++i) m.a[g + i % 2 * 8][t + i / 2 * 4] = tf32(f.a[i]);
    for (int i = 0; i < 2; ++i) m.b[t + 4 * i][g] = tf32(f.b[i]);
  }
  m.load_sums(in);
  m.multiply();
  m.store_sums(in);
}

void distribute_rows(const MatrixRow* const* in, std::uint32_t* const* out, unsigned lanes,
                     int matrices, bool transpose, Location where) {
  need_whole_warp(lanes, "ldmatrix needs all 32 lanes of a warp", where);
  for (int l = 0; l < 32; ++l) {
    for (int i = 0; i < matrices; ++i) {
      if (transpose) {
        const MatrixRow* const* rows = in + 8 * i + l % 4 * 2;
        out[l][i] = rows[0]->element[l / 4] | std::uint32_t{rows[1]->element[l / 4]} << 16;
      } else {
        std::memcpy(&out[l][i], &in[8 * i + l / 4]->element[l % 4 * 2], 4);
      }
    }
  }
}

}  // namespace emulator
