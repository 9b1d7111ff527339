// SPDX-License-Identifier: Apache-2.0
#include <sched.h>
#include <sherd/runtime/context.h>
#include <sherd/runtime/cuda/device.h>
#include <sherd/runtime/cuda/stream_times.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <utility>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace sherd {

Context::Context(const ContextOptions& options) : options_(options) {
  SHERD_CHECK(options.threads >= 0, "a context needs at least one thread, got {}", options.threads);
  if (options_.threads == 0) options_.threads = default_threads();
  SHERD_CHECK(options.meta_of != Device::meta, "a meta context stands for cpu or cuda");
  SHERD_CHECK(options.schedule == nullptr || is_meta(),
              "a schedule is recorded on meta, this context is on {}", name_of(options.device));
  std::unique_ptr<MemorySource> device_memory, host_memory;
  switch (options.device) {
    case Device::cpu:
      compute_stream_ = std::make_unique<Stream>(Stream::Kind::in_place, "compute");
      device_memory = make_process_memory();
      host_memory = make_process_memory();
      break;
    case Device::cuda:
      cuda::require_device(options.device_index);
      compute_stream_ = cuda::make_stream(options.device_index, "compute");
      device_memory = cuda::make_device_memory(options.device_index, compute_stream_);
      host_memory = cuda::make_pinned_memory(options.device_index, compute_stream_);
      break;
    case Device::meta: compute_stream_ = make_stream("compute"); break;
  }
  allocator_ = std::make_shared<Allocator>(std::move(device_memory), options.memory_limit);
  host_allocator_ = std::make_shared<Allocator>(std::move(host_memory), options.host_memory_limit,
                                                MemoryPool::host, Allocator::kHostGranule,
                                                Allocator::kHostGranule);
  trace_ = std::make_unique<Trace>(options.rank, Trace::kDefaultMaxEvents, options.trace_origin,
                                   options.schedule);
  trace_->add_stream_times(0, cuda::kComputeTrack,
                           cuda::make_stream_times(*this, *compute_stream_, *trace_));
  watch_ledger(ledger(), MemoryPool::device);
  watch_ledger(host_ledger(), MemoryPool::host);
}

std::unique_ptr<Stream> Context::make_stream(std::string name) {
  if (device() == Device::cuda) return cuda::make_sibling(*compute_stream_, std::move(name));
  if (schedule() != nullptr) {
    auto backend = make_recording_stream(*schedule(), schedule()->add_stream(name));
    return std::make_unique<Stream>(std::move(backend), std::move(name));
  }
  return std::make_unique<Stream>(is_meta() ? Stream::Kind::meta : Stream::Kind::worker,
                                  std::move(name));
}

// Tensors may outlive it, with the allocators.
Context::~Context() {
  ledger().watch({});
  host_ledger().watch({});
}

// Each change becomes a counter of the trace, or an entry of the schedule.
void Context::watch_ledger(Ledger& ledger, MemoryPool pool) {
  ledger.watch([this, &ledger, pool](MemoryCategory category) {
    if (trace_->enabled()) tell_live(ledger, pool, category);
  });
}

void Context::tell_live(const Ledger& ledger, MemoryPool pool, MemoryCategory category) {
  const std::int64_t live = ledger.live(category);
  if (schedule() != nullptr) return schedule()->memory(pool, category, live);
  trace_->counter(memory_counter(pool, category), static_cast<double>(live));
}

void Context::start_trace() {
  trace_->enable();
  for (const auto& [ledger, pool] : {std::pair{&this->ledger(), MemoryPool::device},
                                     std::pair{&host_ledger(), MemoryPool::host}}) {
    for (std::size_t i = 0; i < kMemoryCategories; ++i) {
      const auto category = static_cast<MemoryCategory>(i);
      if (ledger->live(category) > 0) tell_live(*ledger, pool, category);
    }
  }
}

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
