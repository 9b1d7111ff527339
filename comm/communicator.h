// SPDX-License-Identifier: Apache-2.0
// Communicator: what ranks say to each other.
//
// Every rank of a group makes the same calls in the same order. Each call carries a label (which
// unit, what for) and is compared across the ranks before data moves: ranks that disagree about the
// operation, type, count or label all get one Error that names them and what each called. A rank
// that fails calls abort(); the others, wherever they wait, then throw its reason. So a run ends
// with a message, never with a hang.
//
// Sums are taken by our own code in one fixed balanced tree over the ranks, ((0+1)+(2+3))+..., in
// fp32 for 16-bit types, so a result depends on the values and the number of ranks alone: not on
// timing, not on the backend.
//
// Calls block. A sharding engine puts them on a stream of its own to overlap them with computation.
// One communicator is used by one thread at a time; use one per stream.
#pragma once

#include <sherd/runtime/dtype.h>

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sherd {

class Schedule;

enum class ReduceOp : std::uint8_t { sum, average, max };

enum class Collective : std::uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  all_to_all,
  barrier,
  send,  // these two are between two ranks
  recv,
};
inline constexpr std::size_t kCollectives = 8;
SHERD_API std::string_view name_of(Collective collective);

// What this rank has sent since it was made, in bytes by the usual accounting: of N ranks each
// sends (N-1)/N of the whole buffer in a gather, reduce-scatter or all-to-all, twice that in an
// all-reduce; the root of a broadcast (N-1) times the data; whatever way a backend really takes. A
// recv sends nothing.
struct CommunicationCounters {
  std::int64_t calls[kCollectives] = {};
  std::int64_t bytes[kCollectives] = {};
  SHERD_API std::int64_t total_bytes() const;
};

class SHERD_API Communicator {
 public:
  virtual ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // How the ranks reach each other, for people: "shared memory".
  virtual std::string_view backend() const = 0;
  // Whether calls only count and never touch their buffers: for contexts on the meta device.
  virtual bool on_paper() const { return false; }
  const CommunicationCounters& counters() const { return counters_; }

  // data[count] := the reduction of all ranks' data.
  void all_reduce(void* data, std::int64_t count, DType dtype, ReduceOp op, std::string_view label);
  // input[size * count], output[count] := rank r gets the reduction of everybody's r-th piece.
  // output may be this rank's own piece of input.
  void reduce_scatter(const void* input, void* output, std::int64_t count, DType dtype, ReduceOp op,
                      std::string_view label);
  // The same, but the result of f16 and bf16 is f32: what each rank has rounded is summed, and the
  // sum is not rounded (nor infinite where 16 bits would be). For them output may not overlap
  // input, which is an Error.
  void reduce_scatter_wide(const void* input, void* output, std::int64_t count, DType dtype,
                           ReduceOp op, std::string_view label);
  // input[count], output[size * count] := everybody's input, by rank. input may be this rank's own
  // piece of output.
  void all_gather(const void* input, void* output, std::int64_t count, DType dtype,
                  std::string_view label);
  // data[count] := root's data.
  void broadcast(void* data, std::int64_t count, DType dtype, int root, std::string_view label);
  // input[size * count], output[size * count] := piece r goes to rank r. Not in place.
  void all_to_all(const void* input, void* output, std::int64_t count, DType dtype,
                  std::string_view label);
  void barrier(std::string_view label);
  // One message to another rank, which calls recv(): the two wait for each other, and their calls
  // are compared before data moves.
  void send(const void* data, std::int64_t count, DType dtype, int to, std::string_view label);
  void recv(void* data, std::int64_t count, DType dtype, int from, std::string_view label);

  // A new group of some ranks of this one: ascending, with this rank; the new ranks are the places
  // in that list. All ranks call it together, with the lists of a partition, which is checked. An
  // abort of this group ends the new one too.
  std::unique_ptr<Communicator> split(std::span<const int> members, std::string_view label);

  // A call as the backends get it.
  struct Call {
    Collective collective;
    DType dtype;
    ReduceOp op;
    std::int64_t count;  // elements of one rank's piece
    int root;            // of a broadcast; of a message the other rank
    std::string_view label;
    bool wide = false;            // reduce_scatter_wide
    std::int64_t sequence = 0;    // among the collectives, or the messages to or from that rank
    const Call* about = nullptr;  // of compare(): the call that is compared
    bool is_message() const { return collective >= Collective::send; }
    DType result() const { return wide && size_of(dtype) == 2 ? DType::f32 : dtype; }
    std::size_t element_bytes() const { return size_of(dtype); }
    std::size_t bytes() const { return static_cast<std::size_t>(count) * element_bytes(); }
    // "all_gather of 512 f32 for 'blocks.3 unshard'", for messages
    std::string describe() const;
    std::uint64_t fingerprint() const;  // equal where the calls agree
  };
  // For communicators that stand on this one and move the data by other means: compares a call of
  // theirs on all ranks (of a message, on the two) as if it were this one's. Counts nothing.
  void compare(const Call& call);

  // Ends the group: every rank that waits or calls from now on throws this reason; the first reason
  // stays. Any thread.
  virtual void abort(const std::string& reason) = 0;
  // Why the group has ended; empty while it has not. Any thread.
  virtual std::string end_reason() const = 0;

 protected:
  Communicator(int rank, int size);

  // Does the work. `input` and `output` as above; data is both for all_reduce and broadcast.
  virtual void run(const Call& call, const void* input, void* output) = 0;
  // Makes the group of these members, which are in order; whether all ranks agree is not known yet.
  virtual std::unique_ptr<Communicator> make_group(std::span<const int> members,
                                                   std::string_view label) = 0;
  // Compares the lists of all ranks: throws the same on every rank unless they are a partition.
  void check_partition(std::span<const int> members, std::string_view label);

 private:
  void start(Call call, const void* input, void* output);

  int rank_, size_;
  CommunicationCounters counters_;
  std::int64_t collectives_ = 0;
  std::map<std::pair<Collective, int>, std::int64_t> messages_;  // by direction and other rank
};

// The only rank of a group. Data is really copied, so that code that forgets an output is noticed.
SHERD_API std::unique_ptr<Communicator> make_self_communicator();

// The ranks of one process, a thread each. All communicators of a group are made together; element
// r goes to the thread of rank r.
SHERD_API std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size);
// How many such groups there are in this process, those made by split() too.
SHERD_API int thread_groups();

// A rank of a group of any size that exists only on paper: counts calls and bytes, moves nothing.
// Each call is work of the schedule, where one is given.
SHERD_API std::unique_ptr<Communicator> make_meta_communicator(int rank, int size,
                                                               Schedule* schedule = nullptr);

}  // namespace sherd
