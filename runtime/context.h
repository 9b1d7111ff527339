// SPDX-License-Identifier: Apache-2.0
// Context: everything that changes while a rank computes. One per rank; several live in one process
// without knowing of each other (ranks as threads, or two models of an embedding program). There
// are no mutable globals and no thread-locals elsewhere.
//
// A context is used by one host thread at a time, and outlives its tensors.
#pragma once

#include <sherd/runtime/allocator.h>
#include <sherd/runtime/device.h>
#include <sherd/runtime/philox.h>
#include <sherd/runtime/schedule.h>
#include <sherd/runtime/stream.h>
#include <sherd/runtime/trace.h>

#include <memory>
#include <typeindex>
#include <unordered_map>

namespace sherd {

class Tape;

// Whose kernels compute attention on cuda.
enum class AttentionKernels : std::uint8_t { automatic, own, cudnn };  // automatic: own

struct ContextOptions {
  Device device = Device::cpu;
  int device_index = 0;          // which GPU
  Device meta_of = Device::cpu;  // on meta: whose sizes of scratch memory are counted
  int threads = 0;               // CPU threads of this context's kernels; 0: default_threads()
  AttentionKernels attention = AttentionKernels::automatic;
  std::uint64_t seed = 0;             // of every random number
  std::size_t memory_limit = 0;       // bytes the device's allocator may reserve; 0: no limit
  std::size_t host_memory_limit = 0;  // the same of the host's
  int rank = 0;                       // named in traces
  Schedule* schedule = nullptr;       // on meta: what is asked of the device is recorded there
  // Of the times in a trace; ranks given the same one share a time line.
  Trace::Clock::time_point trace_origin = Trace::Clock::now();
};

// Which part of the training the random numbers of a forward pass belong to. Dropout is keyed by
// it, so that it depends on the step and on a sample's place in the global batch, never on the
// rank.
struct RandomPosition {
  std::uint64_t step = 0;
  std::int64_t first_sample = 0;  // place in the global batch of this forward pass's first sample
};

// What kernels have done, counted on every device (on meta it is all they do).
struct WorkCounters {
  std::int64_t matmul_flops = 0;     // 2 m n k of every matrix product
  std::int64_t attention_flops = 0;  // of the products inside attention, recomputation included
};

class SHERD_API Context {
 public:
  explicit Context(const ContextOptions& options = {});
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  Device device() const { return options_.device; }
  bool is_meta() const { return options_.device == Device::meta; }
  // The device itself, or the one that meta stands for.
  Device target() const { return is_meta() ? options_.meta_of : options_.device; }
  int device_index() const { return options_.device_index; }
  int threads() const { return options_.threads; }
  AttentionKernels attention() const { return options_.attention; }
  std::uint64_t seed() const { return options_.seed; }
  int rank() const { return options_.rank; }

  // Of the device's memory, which everything that computes uses.
  Allocator& allocator() { return *allocator_; }
  Ledger& ledger() { return allocator_->ledger(); }
  // Of the host's, where state goes that the device should not hold: pinned memory on cuda. On the
  // cpu both are ordinary memory, and the device's is the accounted stand-in for an accelerator's.
  Allocator& host_allocator() { return *host_allocator_; }
  Ledger& host_ledger() { return host_allocator_->ledger(); }
  const std::shared_ptr<Allocator>& shared_allocator(MemoryPool pool) const {
    return pool == MemoryPool::host ? host_allocator_ : allocator_;
  }
  Stream& compute_stream() { return *compute_stream_; }
  // Another stream beside it: a thread on the cpu, a CUDA stream on cuda.
  std::unique_ptr<Stream> make_stream(std::string name);
  Trace& trace() { return *trace_; }
  // Enables it, and tells it what is live.
  void start_trace();
  Schedule* schedule() const { return options_.schedule; }  // null: nothing is recorded
  WorkCounters& work() { return work_; }

  // The tape that operations record on; null where nothing is recorded. Set through TapeScope.
  Tape* tape() const { return tape_; }
  void set_tape(Tape* tape) { tape_ = tape; }
  // Tapes are told apart by a number, so that a value of a dead tape is not mistaken for one of a
  // new tape at the same address.
  std::uint64_t next_tape_id() { return ++last_tape_id_; }
  // Storages are numbered in the order they are made, so that one can tell which came before.
  std::uint64_t next_storage_serial() { return ++last_storage_serial_; }

  // Whether a forward pass is being run again in the middle of a backward pass (recomputation).
  bool recomputing() const { return recomputing_; }
  void set_recomputing(bool recomputing) { recomputing_ = recomputing; }

  // Whether device work is being captured into a graph, to be replayed in later steps.
  bool capturing() const { return capturing_; }
  void set_capturing(bool capturing) { capturing_ = capturing; }

  const RandomPosition& random_position() const { return random_position_; }
  void set_random_position(const RandomPosition& position) { random_position_ = position; }

  // State that a layer above keeps with the context, made on first use (such as a cache of compiled
  // matrix products). It dies with the context.
  template <typename T>
  T& attachment() {
    std::shared_ptr<void>& slot = attachments_[std::type_index(typeid(T))];
    if (!slot) slot = std::make_shared<T>();
    return *static_cast<T*>(slot.get());
  }

 private:
  void watch_ledger(Ledger& ledger, MemoryPool pool);
  void tell_live(const Ledger& ledger, MemoryPool pool, MemoryCategory category);

  ContextOptions options_;
  std::shared_ptr<Stream> compute_stream_;  // shared with the memory that is reused in its order
  std::shared_ptr<Allocator> allocator_, host_allocator_;
  std::unique_ptr<Trace> trace_;
  WorkCounters work_;
  Tape* tape_ = nullptr;
  std::uint64_t last_tape_id_ = 0;
  std::uint64_t last_storage_serial_ = 0;
  RandomPosition random_position_;
  bool recomputing_ = false;
  bool capturing_ = false;
  std::unordered_map<std::type_index, std::shared_ptr<void>> attachments_;
};

// OpenMP's setting of the calling thread, which starts as OMP_NUM_THREADS or else all processors
// this process may use; without OpenMP the latter.
SHERD_API int default_threads();

// The library thread pools (OpenMP's, which oneDNN and Eigen share) follow a setting of the calling
// thread. This sets it to a context's count and restores the caller's own when it ends.
class SHERD_API ThreadCountScope {
 public:
  explicit ThreadCountScope(int threads);
  ~ThreadCountScope();
  ThreadCountScope(const ThreadCountScope&) = delete;
  ThreadCountScope& operator=(const ThreadCountScope&) = delete;

 private:
  int previous_;
};

}  // namespace sherd
