// SPDX-License-Identifier: Apache-2.0
// Element types. f16 and bf16 are storage types: arithmetic converts to fp32, computes, and rounds
// once to nearest-even on the way back.
#pragma once

#include <sherd/runtime/api.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace sherd {

enum class DType : std::uint8_t { f64, f32, f16, bf16, i64, i32, u8 };

SHERD_API std::size_t size_of(DType dtype);              // bytes of one element
SHERD_API std::string_view name_of(DType dtype);         // "f32", "bf16", ...
SHERD_API DType dtype_from_name(std::string_view name);  // accepts "fp32"/"float32" too; throws
SHERD_API bool is_floating(DType dtype);

// bfloat16: the upper half of an fp32.
struct bf16 {
  std::uint16_t bits = 0;
  bf16() = default;
  explicit bf16(float value) : bits(round(value)) {}
  explicit operator float() const {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }

 private:
  static std::uint16_t round(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    if ((word & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((word >> 16) | 0x40u);
    return static_cast<std::uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
};

// IEEE binary16.
struct f16 {
  std::uint16_t bits = 0;
  f16() = default;
  explicit f16(float value) : bits(from_float(value)) {}
  explicit operator float() const { return to_float(bits); }

  SHERD_API static std::uint16_t from_float(float value);
  SHERD_API static float to_float(std::uint16_t bits);
};

// The DType of a C++ element type.
template <typename T>
struct dtype_of;
template <>
struct dtype_of<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct dtype_of<f16> {
  static constexpr DType value = DType::f16;
};
template <>
struct dtype_of<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct dtype_of<std::int64_t> {
  static constexpr DType value = DType::i64;
};
template <>
struct dtype_of<std::int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct dtype_of<std::uint8_t> {
  static constexpr DType value = DType::u8;
};

}  // namespace sherd
