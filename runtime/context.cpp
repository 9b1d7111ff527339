// SPDX-License-Identifier: Apache-2.0
#include <sched.h>
#include <sherd/runtime/context.h>
#include <sherd/runtime/error.h>

#include <algorithm>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace sherd {

Context::Context(const ContextOptions& options) : options_(options) {
  SHERD_CHECK(options.threads >= 0, "a context needs at least one thread, got {}", options.threads);
  if (options_.threads == 0) options_.threads = default_threads();
  allocator_ = std::make_shared<Allocator>(options.device, options.memory_limit);
  host_allocator_ =
      std::make_shared<Allocator>(options.device, options.host_memory_limit, MemoryPool::host,
                                  Allocator::kHostGranule, Allocator::kHostGranule);
  trace_ = std::make_unique<Trace>(options.rank, Trace::kDefaultMaxEvents, options.trace_origin);
  compute_stream_ =
      std::make_unique<Stream>(is_meta() ? Stream::Kind::meta : Stream::Kind::in_place, "compute");
}

Context::~Context() = default;

int default_threads() {
#ifdef _OPENMP
  return std::max(1, omp_get_max_threads());
#else
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
#endif
}

#ifdef _OPENMP
ThreadCountScope::ThreadCountScope(int threads) : previous_(omp_get_max_threads()) {
  if (threads != previous_) omp_set_num_threads(threads);
}
ThreadCountScope::~ThreadCountScope() {
  if (omp_get_max_threads() != previous_) omp_set_num_threads(previous_);
}
#else
ThreadCountScope::ThreadCountScope(int threads) : previous_(threads) {}
ThreadCountScope::~ThreadCountScope() = default;
#endif

}  // namespace sherd
