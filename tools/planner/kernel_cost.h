// SPDX-License-Identifier: Apache-2.0
// The time of a kernel, a copy or a file on one device, by a model of few constants, which all are
// in the file of the system.
//
// Note [The time of a product]
// C[m, n] = A[m, k] B[k, n] is made in tiles of r x c, of which a multiprocessor has one at a time:
//
//   waves   = ceil(ceil(m/r) ceil(n/c) s / multiprocessors)
//   seconds = smallest + max(waves * 2 r c (ceil(k/s) + prologue) / (f R), bytes / bandwidth)
//
// R is the rate of a multiprocessor inside a tile, f the tile's fraction of it, prologue what
// filling the pipeline and writing the tile cost, as elements of k (so short k are slow), s the
// parts into which k is split, each of which writes an fp32 result more that is then read
// (split-K). As libraries do, the fastest of the file's tiles and of s = 1, 2, 4, ... counts. R is
// such that the product that was measured takes the time that was measured, and at most the peak.
//
// Tiles and waves: NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave
// quantization);
// https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication.
//
// Attention: smallest + max(flops / (fraction * measured rate), bytes / bandwidth). Other kernels:
// smallest + bytes / bandwidth, where the bandwidth is the reached fraction of the data sheet's.
#pragma once

#include <sherd/runtime/schedule.h>
#include <sherd/tools/planner/system.h>

namespace sherd {

// FLOP/s of one multiprocessor inside a tile, as the measured product says.
SHERD_API double tile_rate(const System& system, const ProductRates& products);

// 2 m n k FLOPs. `bytes` as in Work: the operands and the result, read and written.
SHERD_API double product_seconds(const System& system, DType dtype, std::int64_t m, std::int64_t n,
                                 std::int64_t k, std::int64_t bytes);

// Of kind kernel, product, copy, host or file; throws on a collective. world: ranks of the world,
// which share the processors' memory and the disk of their node; 0: a rank on every device.
SHERD_API double kernel_seconds(const System& system, const Work& work, int world = 0);

}  // namespace sherd
