// SPDX-License-Identifier: Apache-2.0
#include "nccl_reduce.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

namespace emulator {
namespace {

// 16-bit types: arithmetic in fp32, rounded to nearest, ties to even.
struct Bfloat {
  std::uint16_t bits;
  float value() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
  static Bfloat from(float x) {
    const auto wide = std::bit_cast<std::uint32_t>(x);
    if (x != x) return {static_cast<std::uint16_t>(wide >> 16 | 0x40)};
    return {static_cast<std::uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16)};
  }
};
struct Half {
  std::uint16_t bits;
  float value() const {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float x = exponent == 31  ? (fraction != 0 ? NAN : INFINITY)
              : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                              : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
    return bits >> 15 != 0 ? -x : x;
  }
  static Half from(float x) {
    const auto sign = static_cast<std::uint16_t>(std::signbit(x) ? 0x8000 : 0);
    const float size = std::fabs(x);
    if (x != x) return {0x7fff};
    if (size >= 65520.0f) return {static_cast<std::uint16_t>(sign | 0x7c00)};
    int exponent = 0;
    std::frexp(size, &exponent);
    exponent = std::max(exponent, -13);  // below it the steps are those of 2^-14
    // A whole number of steps of 2^(exponent - 11), rounded by the addition itself.
    const auto steps = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(size, 11 - exponent)));
    const std::uint32_t wide =
        steps < 1024 ? steps : (static_cast<std::uint32_t>(exponent + 13) << 10) + steps;
    return {static_cast<std::uint16_t>(sign | wide)};
  }
};

template <typename T>
auto value(T x) {
  if constexpr (std::is_arithmetic_v<T>) {
    return x;
  } else {
    return x.value();
  }
}
template <typename T, typename V>
T rounded(V x) {
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<T>(x);
  } else {
    return T::from(x);
  }
}

template <typename T>
void reduce(const std::vector<const void*>& inputs, std::size_t begin, std::size_t count,
            std::size_t first, ncclRedOp_t op, T* to) {
  using V = decltype(value(T{}));
  const std::size_t ranks = inputs.size();
  constexpr bool kWhole = std::is_integral_v<V>;
  const auto element = [&](std::size_t rank, std::size_t i) {
    const T x = static_cast<const T*>(inputs[rank % ranks])[begin + i];
    // An average multiplies what comes in, and divides whole numbers at the end.
    if constexpr (!kWhole) {
      if (op == ncclAvg)
        return value(rounded<T>(static_cast<V>(value(x) * (V(1) / static_cast<V>(ranks)))));
    }
    return value(x);
  };
  for (std::size_t i = 0; i < count; ++i) {
    V sum = element(first, i);
    for (std::size_t step = 1; step < ranks; ++step) {
      const V x = element(first + step, i);
      V next{};
      switch (op) {
        case ncclSum:
        case ncclAvg: next = static_cast<V>(sum + x); break;
        case ncclProd: next = static_cast<V>(sum * x); break;
        case ncclMax: next = sum > x ? sum : x; break;
        case ncclMin: next = sum < x ? sum : x; break;
      }
      sum = value(rounded<T>(next));
    }
    if constexpr (kWhole) {
      if (op == ncclAvg) sum = static_cast<V>(sum / static_cast<V>(ranks));
    }
    to[i] = rounded<T>(sum);
  }
}

}  // namespace

std::size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
  }
  return 0;
}

void reduce_around(const std::vector<const void*>& inputs, std::size_t begin, std::size_t count,
                   std::size_t first, ncclDataType_t type, ncclRedOp_t op, void* to) {
  const auto run = [&]<typename T>(T) {
    reduce(inputs, begin, count, first, op, static_cast<T*>(to));
  };
  switch (type) {
    case ncclInt8: return run(std::int8_t{});
    case ncclUint8: return run(std::uint8_t{});
    case ncclInt32: return run(std::int32_t{});
    case ncclUint32: return run(std::uint32_t{});
    case ncclInt64: return run(std::int64_t{});
    case ncclUint64: return run(std::uint64_t{});
    case ncclFloat16: return run(Half{});
    case ncclFloat32: return run(float{});
    case ncclFloat64: return run(double{});
    case ncclBfloat16: return run(Bfloat{});
  }
}

}  // namespace emulator
