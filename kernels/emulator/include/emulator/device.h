// SPDX-License-Identifier: Apache-2.0
// What kernel sources reach through a header of their own, where the device build has CUDA's syntax
// and PTX: shared memory, launches, matrix operations, asynchronous copies, named barriers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include <emulator/arithmetic.h>
#include <emulator/runtime_api.h>
#include <emulator/warp.h>

// `T name[N]`, one per block, NaN (0xFF bytes) until written. All threads that pass here share it.
#define EMULATOR_SHARED(T, name, N)                                                    \
  static char emulator_tag_of_##name = 0; /* its address is the variable's identity */ \
  T(&name)                                                                             \
  [N] = *reinterpret_cast<T(*)[N]>(                                                    \
      ::emulator::static_shared(&emulator_tag_of_##name, sizeof(T) * (N), alignof(T), #name))
// `T* name`, the launch's dynamic shared memory, aligned to 128 bytes. A guard page follows it.
#define EMULATOR_DYNAMIC_SHARED(T, name) \
  T* const name = reinterpret_cast<T*>(::emulator::dynamic_shared())

namespace emulator {

void* static_shared(const void* tag, std::size_t bytes, std::size_t alignment, const char* name);
void* dynamic_shared();

struct Launch {
  const void* kernel;  // for its name, and for attributes set by cudaFuncSetAttribute
  dim3 grid, block;
  std::size_t shared_bytes;
};
cudaError_t launch_body(const Launch& launch, cudaStream_t stream, std::function<void()> thread);

// kernel<<<grid, block, shared_bytes, stream>>>(args...). Returns what cudaGetLastError would.
template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), dim3 grid, dim3 block, std::size_t shared_bytes,
                   cudaStream_t stream, A&&... args) {
  using Arguments = std::tuple<std::decay_t<P>...>;
  static_assert(sizeof(Arguments) <= 4096, "arguments of a kernel take at most 4 KB");
  return launch_body({reinterpret_cast<const void*>(kernel), grid, block, shared_bytes}, stream,
                     [kernel, values = Arguments(static_cast<P>(std::forward<A>(args))...)] {
                       std::apply(kernel, values);
                     });
}

// bar.sync id, count: `count` threads of the block, whole warps, meet at barrier 1 to 15.
inline void named_barrier(int id, int count, EMULATOR_HERE) {
  block_barrier(id, count, 0, where);
}

// ---- ldmatrix: 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix
// l / 8 (16 bytes, in shared memory) and gets from each matrix i the elements 2(l%4) and 2(l%4)+1
// of row l / 4, or with trans of column l / 4, as r[i]. x1 and x2 read the addresses of the first 8
// and 16 lanes alone.
struct alignas(16) MatrixRow {
  std::uint16_t element[8];
};
// Checks an address of shared memory that is accessed `bytes` at a time.
void check_shared(const void* address, std::size_t bytes, const char* operation, Location where);
void distribute_rows(const MatrixRow* const* in, std::uint32_t* const* out, unsigned lanes,
                     int matrices, bool transpose, Location where);
template <int Matrices, bool Transpose>
inline __attribute__((always_inline)) void ldmatrix(std::uint32_t* r, const void* row,
                                                    Location where) {
  MatrixRow own{};
  if (lane < 8 * Matrices) {
    check_shared(row, 16, "ldmatrix", where);
    // Read here, in the kernel's own code, so that sanitizers name its line.
    for (int i = 0; i < 8; ++i) own.element[i] = static_cast<const std::uint16_t*>(row)[i];
  }
  warp_operation(~0u, Wait::ldmatrix, where, &own, r,
                 [where](const MatrixRow* const* in, std::uint32_t* const* out, unsigned lanes) {
                   distribute_rows(in, out, lanes, Matrices, Transpose, where);
                 });
}
inline void ldmatrix_x1(std::uint32_t (&r)[1], const void* row, EMULATOR_HERE) {
  ldmatrix<1, false>(r, row, where);
}
inline void ldmatrix_x2(std::uint32_t (&r)[2], const void* row, EMULATOR_HERE) {
  ldmatrix<2, false>(r, row, where);
}
inline void ldmatrix_x4(std::uint32_t (&r)[4], const void* row, EMULATOR_HERE) {
  ldmatrix<4, false>(r, row, where);
}
inline void ldmatrix_x1_trans(std::uint32_t (&r)[1], const void* row, EMULATOR_HERE) {
  ldmatrix<1, true>(r, row, where);
}
inline void ldmatrix_x2_trans(std::uint32_t (&r)[2], const void* row, EMULATOR_HERE) {
  ldmatrix<2, true>(r, row, where);
}
inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], const void* row, EMULATOR_HERE) {
  ldmatrix<4, true>(r, row, where);
}

// ---- mma.sync: d (16x8, fp32) += a (16xK, row-major) * b (Kx8, column-major). With g = lane / 4
// and t = lane % 4, d[0], d[1] are row g and d[2], d[3] row g + 8 of columns 2t, 2t + 1. For K = 16
// of 16-bit pairs: a[0], a[2] are row g, a[1], a[3] row g + 8; a[0], a[1] columns 2t, 2t + 1, a[2],
// a[3] those plus 8; b[0] is rows 2t, 2t + 1 and b[1] those plus 8 of column g. Products are exact,
// sums are fp32 in order of K (the device's order and internal width differ).
struct Bf16 {};
struct F16 {};
struct Fragments {  // of a lane
  const std::uint32_t *a, *b;
  float* d;
};
void multiply_bf16(const Fragments* const* in, unsigned lanes, Location where);
void multiply_f16(const Fragments* const* in, unsigned lanes, Location where);
void multiply_tf32(const Fragments* const* in, unsigned lanes, Location where);
template <void (*Multiply)(const Fragments* const*, unsigned, Location)>
inline __attribute__((always_inline)) void mma(const Fragments& own, Location where) {
  char nothing;
  warp_operation(~0u, Wait::mma, where, &own, &nothing,
                 [where](const Fragments* const* in, char* const*, unsigned lanes) {
                   Multiply(in, lanes, where);
                 });
}
inline void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                         Bf16, EMULATOR_HERE) {
  mma<multiply_bf16>({a, b, d}, where);
}
inline void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                         F16, EMULATOR_HERE) {
  mma<multiply_f16>({a, b, d}, where);
}
// m16n8k8 of tf32: fp32 bits whose low 13 bits are ignored. a[0] to a[3] are (g, t), (g + 8, t),
// (g, t + 4), (g + 8, t + 4); b[0], b[1] are (t, g), (t + 4, g).
inline void mma_m16n8k8_tf32(float (&d)[4], const std::uint32_t (&a)[4],
                             const std::uint32_t (&b)[2], EMULATOR_HERE) {
  mma<multiply_tf32>({a, b, d}, where);
}

// ---- cp.async: global to shared memory, in groups. The bytes are copied at the wait; until then
// the destination is NaN, so that a forgotten wait or an overwritten tile shows. Beyond
// source_bytes (0 to the size) the destination gets zeros.
void copy_async(void* to, const void* from, int bytes, int source_bytes, Location where);
inline void cp_async16(void* to, const void* from, int source_bytes = 16, EMULATOR_HERE) {
  copy_async(to, from, 16, source_bytes, where);
}
inline void cp_async8(void* to, const void* from, int source_bytes = 8, EMULATOR_HERE) {
  copy_async(to, from, 8, source_bytes, where);
}
inline void cp_async4(void* to, const void* from, int source_bytes = 4, EMULATOR_HERE) {
  copy_async(to, from, 4, source_bytes, where);
}
void cp_async_commit();
void wait_copies(int groups_left);
template <int GroupsLeft>
inline void cp_async_wait() {
  static_assert(GroupsLeft >= 0);
  wait_copies(GroupsLeft);
}

// ex2.approx: 2 to the power x.
inline float ex2(float x) {
  return std::exp2(x);
}

}  // namespace emulator
