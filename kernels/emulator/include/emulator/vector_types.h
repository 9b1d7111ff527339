// SPDX-License-Identifier: Apache-2.0
// CUDA's vector types, with the sizes and alignments they have on the device.
#pragma once

#define EMULATOR_VECTOR2(name, type)                 \
  struct alignas(2 * sizeof(type)) name##2 {         \
    type x, y;                                       \
  };                                                 \
  constexpr name##2 make_##name##2(type x, type y) { \
    return {x, y};                                   \
  }
#define EMULATOR_VECTOR3(name, type)                         \
  struct name##3 {                                           \
    type x, y, z;                                            \
  };                                                         \
  constexpr name##3 make_##name##3(type x, type y, type z) { \
    return {x, y, z};                                        \
  }
// Sixteen bytes is the widest access of the device: wider vectors are aligned to that.
#define EMULATOR_VECTOR4(name, type)                                 \
  struct alignas(sizeof(type) < 4 ? 4 * sizeof(type) : 16) name##4 { \
    type x, y, z, w;                                                 \
  };                                                                 \
  constexpr name##4 make_##name##4(type x, type y, type z, type w) { \
    return {x, y, z, w};                                             \
  }
#define EMULATOR_VECTORS(name, type) \
  EMULATOR_VECTOR2(name, type)       \
  EMULATOR_VECTOR3(name, type)       \
  EMULATOR_VECTOR4(name, type)

EMULATOR_VECTORS(char, signed char)
EMULATOR_VECTORS(uchar, unsigned char)
EMULATOR_VECTORS(short, short)
EMULATOR_VECTORS(ushort, unsigned short)
EMULATOR_VECTORS(int, int)
EMULATOR_VECTORS(uint, unsigned)
EMULATOR_VECTORS(longlong, long long)
EMULATOR_VECTORS(ulonglong, unsigned long long)
EMULATOR_VECTORS(float, float)
EMULATOR_VECTORS(double, double)

#undef EMULATOR_VECTORS
#undef EMULATOR_VECTOR2
#undef EMULATOR_VECTOR3
#undef EMULATOR_VECTOR4

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned nx = 1, unsigned ny = 1, unsigned nz = 1) : x(nx), y(ny), z(nz) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};
