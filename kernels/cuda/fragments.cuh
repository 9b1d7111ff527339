// SPDX-License-Identifier: Apache-2.0
// From tiles in shared memory to the fragments that tensor cores multiply. A tile has D elements a
// row and a pitch of D + 8: an odd number of 16-byte units, so the eight rows of an ldmatrix lie in
// different banks.
#pragma once

#include <sherd/kernels/cuda/device.h>

namespace sherd::cuda {

template <int D>
constexpr int kPitch = D + 8;

struct Lane {
  int lane = static_cast<int>(threadIdx.x) % 32;
  int group = lane / 4;       // row of an accumulator, and group + 8
  int column = lane % 4 * 2;  // column of an accumulator's pair
};

// Fragments of 16 x 16 elements whose corner is `corner`; see ptx::ldmatrix_x4.

// The left operand: rows of the tile are its rows.
template <int D, typename T>
__device__ __forceinline__ void load_left(std::uint32_t (&a)[4], const T* corner, int lane) {
  ptx::ldmatrix_x4(a, corner + lane % 16 * kPitch<D> + lane / 16 * 8);
}
// The same of the transposed tile: columns of the tile are its rows.
template <int D, typename T>
__device__ __forceinline__ void load_left_transposed(std::uint32_t (&a)[4], const T* corner,
                                                     int lane) {
  ptx::ldmatrix_x4_trans(a, corner + (lane % 8 + lane / 16 * 8) * kPitch<D> + lane / 8 % 2 * 8);
}
// Two right operands of a product with the transposed tile: its rows are columns of the product.
template <int D, typename T>
__device__ __forceinline__ void load_right_transposed(std::uint32_t (&b)[2][2], const T* corner,
                                                      int lane) {
  std::uint32_t r[4];
  ptx::ldmatrix_x4(r, corner + (lane % 8 + lane / 16 * 8) * kPitch<D> + lane / 8 % 2 * 8);
  b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}
// Two right operands of a product with the tile: its columns are columns of the product.
template <int D, typename T>
__device__ __forceinline__ void load_right(std::uint32_t (&b)[2][2], const T* corner, int lane) {
  std::uint32_t r[4];
  ptx::ldmatrix_x4_trans(r, corner + lane % 16 * kPitch<D> + lane / 16 * 8);
  b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

}  // namespace sherd::cuda
