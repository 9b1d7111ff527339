// SPDX-License-Identifier: Apache-2.0
// Pieces of 16 bytes: how kernels over rows and arrays read, write and add. Device code, for .cu
// files alone.
//
// Note [Same bits at any address]
// Which thread holds which elements depends on the size of a row or an array and on the type alone.
// Where the address or the size keeps a thread from loading 16 bytes at once it loads the same
// elements one by one, and zeros past the end. So an element's bits do not depend on where its
// tensor begins.
#pragma once

#include <sherd/kernels/cuda/device.h>

#include <initializer_list>

namespace sherd::cuda {

inline constexpr int kWarp = 32;
template <typename T>
inline constexpr int kVector = 16 / sizeof(T);  // elements of a piece

inline bool is_aligned(std::initializer_list<const void*> addresses) {
  std::uintptr_t low_bits = 0;
  for (const void* address : addresses) low_bits |= reinterpret_cast<std::uintptr_t>(address);
  return low_bits % 16 == 0;
}

template <typename T>
__device__ __forceinline__ void unpack(const uint4& piece, acc_t<T> (&x)[kVector<T>]) {
  if constexpr (sizeof(T) == 2) {
    const float2 a = unpack2<T>(piece.x), b = unpack2<T>(piece.y);
    const float2 c = unpack2<T>(piece.z), d = unpack2<T>(piece.w);
    x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
    x[4] = c.x, x[5] = c.y, x[6] = d.x, x[7] = d.y;
  } else if constexpr (sizeof(T) == 4) {
    x[0] = __uint_as_float(piece.x), x[1] = __uint_as_float(piece.y);
    x[2] = __uint_as_float(piece.z), x[3] = __uint_as_float(piece.w);
  } else {
    x[0] = __longlong_as_double(
        static_cast<long long>(static_cast<unsigned long long>(piece.y) << 32 | piece.x));
    x[1] = __longlong_as_double(
        static_cast<long long>(static_cast<unsigned long long>(piece.w) << 32 | piece.z));
  }
}

template <typename T>
__device__ __forceinline__ uint4 pack(const acc_t<T> (&x)[kVector<T>]) {
  if constexpr (sizeof(T) == 2) {
    return make_uint4(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]),
                      pack2<T>(x[6], x[7]));
  } else if constexpr (sizeof(T) == 4) {
    return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                      __float_as_uint(x[3]));
  } else {
    const auto a = static_cast<unsigned long long>(__double_as_longlong(x[0]));
    const auto b = static_cast<unsigned long long>(__double_as_longlong(x[1]));
    return make_uint4(static_cast<unsigned>(a), static_cast<unsigned>(a >> 32),
                      static_cast<unsigned>(b), static_cast<unsigned>(b >> 32));
  }
}

// The piece at `at` of an array of `size` elements; zeros past its end. `whole`: the array begins
// at a multiple of 16 bytes and has whole pieces, as `at` has.
template <typename T, typename Index>
__device__ __forceinline__ uint4 load_piece(const T* array, Index at, Index size, bool whole) {
  if (whole) {
    return at < size ? *reinterpret_cast<const uint4*>(array + at) : make_uint4(0, 0, 0, 0);
  }
  acc_t<T> x[kVector<T>];
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) x[i] = at + i < size ? to_acc(array[at + i]) : acc_t<T>(0);
  return pack<T>(x);
}

template <typename T, typename Index>
__device__ __forceinline__ void store_piece(T* array, Index at, Index size, bool whole,
                                            const acc_t<T> (&x)[kVector<T>]) {
  if (whole) {
    if (at < size) *reinterpret_cast<uint4*>(array + at) = pack<T>(x);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) {
    if (at + i < size) array[at + i] = from_acc<T>(x[i]);
  }
}

// Sum of N numbers in registers, in four chains so as not to wait for each addition.
template <int N, typename A>
__device__ __forceinline__ A sum_of(const A (&x)[N]) {
  static_assert(N % 2 == 0);
  A sum[4] = {};
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i % 4] += x[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// The sum over the threads of a block, whole warps, in one fixed tree; the same bits in every
// thread. `shared` has room for 32.
template <typename A>
__device__ __forceinline__ A block_sum(A value, A* shared) {
  value = warp_sum(value);
  __syncthreads();  // an earlier call may still be reading
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  A sum = 0;
  for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) sum += shared[warp];
  return sum;
}
template <typename A>
__device__ __forceinline__ A block_max(A value, A* shared) {
  value = warp_max(value);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  A highest = shared[0];
  for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp)
    highest = shared[warp] > highest ? shared[warp] : highest;
  return highest;
}

}  // namespace sherd::cuda
