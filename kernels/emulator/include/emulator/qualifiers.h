// SPDX-License-Identifier: Apache-2.0
// CUDA's words in front of functions and variables, and its built-in variables.
#pragma once

#include <emulator/vector_types.h>

// __shared__ is left out on purpose: shared memory comes from EMULATOR_SHARED, which knows the
// block. So is __noinline__: as a macro it breaks headers of the C++ library.
#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))

// Set when a thread of the block gets to run: a kernel sees constants. One copy per OS thread,
// since several OS threads may each run a kernel.
#define EMULATOR_THREAD_LOCAL __thread __attribute__((tls_model("initial-exec")))
extern EMULATOR_THREAD_LOCAL uint3 threadIdx;
extern EMULATOR_THREAD_LOCAL uint3 blockIdx;
extern EMULATOR_THREAD_LOCAL dim3 blockDim;
extern EMULATOR_THREAD_LOCAL dim3 gridDim;
inline constexpr int warpSize = 32;
