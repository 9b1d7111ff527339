// SPDX-License-Identifier: Apache-2.0
// Schedule: what a program asked its device, its streams and its ranks to do, as a list in the
// order in which the host asked. Recorded on meta, where nothing is done, it is what a planner
// places in time.
//
//   Schedule schedule;
//   Context context({.device = Device::meta, .schedule = &schedule});
//   ... a training step ...
//   for (const Schedule::Entry& entry : schedule.entries()) ...
//
// Used by one thread. The schedule outlives the context.
#pragma once

#include <sherd/runtime/api.h>
#include <sherd/runtime/dtype.h>
#include <sherd/runtime/ledger.h>
#include <sherd/runtime/out_of_memory.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace sherd {

// Ranks first, first + stride, ... of the world.
struct RankGroup {
  int first = 0, size = 1, stride = 1;
  bool operator==(const RankGroup&) const = default;
};

// A kernel, a collective or a copy, by what its time depends on.
struct Work {
  enum class Kind : std::uint8_t {
    kernel,      // moves `bytes`, some of them with `flops` of products inside
    product,     // [m, k] x [k, n]
    collective,  // among `group`
    copy,        // between the device and pinned memory of the host
    host,        // a kernel that the processor runs beside a GPU
    file,        // direct I/O
  };
  Kind kind = Kind::kernel;
  std::string_view name;  // "layer_norm_forward", "all_gather", "file_read": a literal
  DType dtype = DType::f32;
  // Read and written. Of a collective the whole buffer: what all-gather makes, reduce-scatter
  // takes.
  std::int64_t bytes = 0;
  std::int64_t flops = 0;                           // 2 m n k of a product; those inside attention
  std::int64_t m = 0, n = 0, k = 0;                 // of a product
  bool transposed_a = false, transposed_b = false;  // of a product, as they lie in memory
  RankGroup group{};                                // of a collective
};

class SHERD_API Schedule {
 public:
  enum class Kind : std::uint8_t {
    work,         // on `stream`: works()[index]
    wait,         // what follows on `stream` comes after what stream `index` was given before entry
                  // `value`
    host_wait,    // the host does
    scope_begin,  // on `stream`, or of the host where that is kHost: texts()[index] of category
                  // texts()[value], on track texts()[track]
    scope_end,    // of the scope that began at entry `index`
    memory,       // category `index` of `pool` now holds `value` bytes
  };
  static constexpr int kHost = -1;

  struct Entry {
    Kind kind = Kind::work;
    MemoryPool pool = MemoryPool::device;
    std::int16_t stream = 0;
    std::int32_t index = 0, track = 0;
    std::int64_t value = 0;
  };

  // Streams in the order they were made; 0 is the compute stream.
  int add_stream(const std::string& name);
  const std::vector<std::string>& streams() const { return streams_; }

  // Work is that of the stream inside whose enqueue() the host is, else of the compute stream.
  void add(const Work& work);
  void enter(int stream);  // from here on, until leave()
  void leave();
  int current_stream() const { return inside_.empty() ? 0 : inside_.back(); }

  void wait(int stream, int for_stream, std::int64_t until);
  void host_wait(int for_stream, std::int64_t until);
  // Of the next entry, counted from the start and not from the last clear().
  std::int64_t position() const { return cleared_ + static_cast<std::int64_t>(entries_.size()); }

  std::int32_t begin_scope(std::string_view name, std::string_view category,
                           std::string_view track);
  void end_scope(std::int32_t begin);
  void memory(MemoryPool pool, MemoryCategory category, std::int64_t live);

  const std::vector<Entry>& entries() const { return entries_; }
  const std::vector<Work>& works() const { return works_; }
  const std::vector<std::string>& texts() const { return texts_; }

  // Forgets the entries; streams stay, and a wait for what was forgotten is none. A scope that is
  // open must not be ended after it.
  void clear();

 private:
  std::int32_t intern(std::string_view text);

  std::int64_t cleared_ = 0;
  std::vector<std::string> streams_;
  std::vector<int> inside_;
  std::vector<Entry> entries_;
  std::vector<Work> works_;
  std::vector<std::string> texts_;
  std::map<std::string, std::int32_t, std::less<>> text_index_;
};

}  // namespace sherd
