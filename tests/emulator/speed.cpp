// SPDX-License-Identifier: Apache-2.0
// How fast kernels run: LayerNorm in elements a second, attention in mma.sync a second. Best of
// five.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "example_kernels.h"

namespace {

double now() {  // of this thread: other programs do not count
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

template <class F>
double seconds(F f) {
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const double start = now();
    f();
    best = std::min(best, now() - start);
  }
  return best;
}

template <class T>
T* allocate(std::size_t n) {
  T* p;
  if (cudaMalloc(&p, n * sizeof(T)) != cudaSuccess) std::abort();
  cudaMemset(p, 0, n * sizeof(T));
  return p;
}

template <int D>
void measure_attention() {
  using examples::bf16;
  constexpr int kHeads = 4, kLength = 257, kTiles = (kLength + 63) / 64;
  const std::size_t size = static_cast<std::size_t>(kHeads) * kLength * D;
  bf16 *q = allocate<bf16>(size), *o = allocate<bf16>(size);
  const double t = seconds([&] { examples::launch_attention<D>(q, q, q, o, kHeads, kLength); });
  const double products = kHeads * kTiles * 4.0 * kTiles * 2 * (8 * D / 16);
  std::printf("attention, 4 heads of 257 x %d: %.1f ms, %.0f thousand mma.sync/s\n", D, t * 1e3,
              products / t / 1e3);
}

}  // namespace

int main() {
  constexpr int kRows = 1000, kWidth = 1024;
  const auto* x = allocate<float>(kRows * kWidth);
  auto* y = allocate<examples::bf16>(kRows * kWidth);
  const double t = seconds(
      [&] { emulator::launch(examples::layer_norm<256>, kRows, 256, 0, nullptr, x, y, kWidth); });
  std::printf("LayerNorm of 1024, 256 threads a row: %.1f million elements/s\n",
              kRows * kWidth / t / 1e6);
  measure_attention<64>();
  measure_attention<128>();
}
