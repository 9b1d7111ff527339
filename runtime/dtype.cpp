// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/dtype.h>
#include <sherd/runtime/error.h>

#include <array>
#include <utility>

namespace sherd {

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64: return 8;
    case DType::f32:
    case DType::i32: return 4;
    case DType::f16:
    case DType::bf16: return 2;
    case DType::u8: return 1;
  }
  fail("size_of: unknown dtype {}", static_cast<int>(dtype));
}

std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::f64: return "f64";
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::i64: return "i64";
    case DType::i32: return "i32";
    case DType::u8: return "u8";
  }
  fail("name_of: unknown dtype {}", static_cast<int>(dtype));
}

DType dtype_from_name(std::string_view name) {
  static constexpr std::array<std::pair<std::string_view, DType>, 18> kNames{{
      {"f64", DType::f64},
      {"fp64", DType::f64},
      {"float64", DType::f64},
      {"f32", DType::f32},
      {"fp32", DType::f32},
      {"float32", DType::f32},
      {"f16", DType::f16},
      {"fp16", DType::f16},
      {"float16", DType::f16},
      {"bf16", DType::bf16},
      {"bfloat16", DType::bf16},
      {"i64", DType::i64},
      {"int64", DType::i64},
      {"i32", DType::i32},
      {"int32", DType::i32},
      {"u8", DType::u8},
      {"uint8", DType::u8},
      {"byte", DType::u8},
  }};
  for (const auto& [known, dtype] : kNames) {
    if (known == name) return dtype;
  }
  fail("unknown element type '{}': expected one of f64, f32, f16, bf16, i64, i32, u8", name);
}

bool is_floating(DType dtype) {
  return dtype == DType::f64 || dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

// Round to nearest-even by letting the fp32 adder do it: adding and removing a power of two that is
// 2^13 times the result's unit in the last place rounds away exactly the bits f16 lacks.
std::uint16_t f16::from_float(float value) {
  const auto word = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((word >> 16) & 0x8000u);
  const std::uint32_t magnitude = word & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);   // NaN
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to inf
  if (magnitude < 0x38800000u) {  // subnormal in f16: unit in the last place is 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;  // ulp of [0.5, 1) is 2^-24
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

float f16::to_float(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fu;
  const std::uint32_t fraction = bits & 0x3ffu;
  if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

}  // namespace sherd
