// SPDX-License-Identifier: Apache-2.0
// Threads for CPU kernels. OpenMP where the build has it (oneDNN and Eigen use the same pool; a
// second pool beside a spinning one halves the speed), plain threads otherwise (the
// thread-sanitizer build, since the sanitizer cannot see OpenMP's own synchronisation).
#pragma once

#include <algorithm>
#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#else
#include <thread>
#include <vector>
#endif

namespace sherd::cpu {

// Calls body(worker, task) for every task in [0, tasks), on at most `threads` threads, tasks dealt
// in contiguous runs. `worker` is in [0, min(threads, tasks)) and is one thread: scratch memory may
// be cut by it. Which worker runs a task must not change its result. `body` must not throw.
template <typename Body>
void parallel_workers(int threads, std::int64_t tasks, const Body& body) {
  const auto most = static_cast<int>(std::min<std::int64_t>(threads, tasks));
  const auto run = [&](int worker, int workers) {
    const std::int64_t end = tasks * (worker + 1) / workers;
    for (std::int64_t task = tasks * worker / workers; task < end; ++task) body(worker, task);
  };
  if (most <= 1) {
    run(0, 1);
    return;
  }
#ifdef _OPENMP
  // The runtime may grant fewer threads than asked for.
#pragma omp parallel num_threads(most)
  run(omp_get_thread_num(), omp_get_num_threads());
#else
  std::vector<std::thread> pool;
  for (int worker = 1; worker < most; ++worker) pool.emplace_back(run, worker, most);
  run(0, most);
  for (std::thread& thread : pool) thread.join();
#endif
}

// The same for tasks that need no scratch memory: body(task).
template <typename Body>
void parallel_tasks(int threads, std::int64_t tasks, const Body& body) {
  parallel_workers(threads, tasks, [&](int, std::int64_t task) { body(task); });
}

// Calls body(begin, end) over a cut of [0, count) into ranges of at most `block` elements. The cut
// depends on `block` alone, so a reduction kept per range does not depend on the thread count.
template <typename Body>
void parallel_blocks(int threads, std::int64_t count, std::int64_t block, const Body& body) {
  parallel_tasks(threads, (count + block - 1) / block, [&](std::int64_t task) {
    body(task * block, std::min(count, (task + 1) * block));
  });
}

// Elements an elementwise kernel hands to a thread at once: large enough to pay for the hand-over.
inline constexpr std::int64_t kElementwiseBlock = 8192;

}  // namespace sherd::cpu
