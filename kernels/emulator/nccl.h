// SPDX-License-Identifier: Apache-2.0
// The ranks of emulated communicators and what they are in; nccl.cpp has the calls.
//
// Note [Emulated NCCL]
// An operation is work on an emulated stream that meets the other ranks' work. The last rank to
// come to a collective does it for all, since it sees all memory; sends and receives meet in pairs.
// One lock guards everything: this is for tests. Which operation of a communicator a piece of work
// is counts when it runs, so that a captured one is another at every replay.
#pragma once

#include <nccl.h>

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime.h"

namespace emulator::nccl {

// A range of memory that a communicator knows.
struct Registration {
  const ncclComm* comm;
  const char* address;
  std::size_t bytes;
  int references = 1;
};

struct Operation {
  enum class Kind { all_reduce, reduce_scatter, all_gather, broadcast, send, receive };
  Kind kind;
  const void* send;
  void* receive;
  std::size_t count;
  ncclDataType_t type;
  ncclRedOp_t op;
  int peer;  // or root
  // That hold the buffers; null where none does. A graph knows its memory by itself.
  std::shared_ptr<Registration> send_range = nullptr, receive_range = nullptr;
  bool captured = false;
  bool is_message() const { return kind >= Kind::send; }
  std::string describe() const;
};

// A send or receive that waits for its other half, or is done.
struct Message {
  const Operation* operation;
  bool done = false;
};

struct Group {
  struct Member {
    int device = -1;  // none: has not come yet
    bool aborted = false;
    std::size_t collectives = 0, splits = 0;  // so far
    std::string waits_in;                     // "" unless it waits
    bool in_collective = false;
  };
  struct Meeting {
    std::vector<const Operation*> operations;  // by rank
    std::size_t arrived = 0, gone = 0;
    bool done = false;
  };
  struct Split {
    std::vector<ncclComm*> made;  // by rank
    std::vector<int> color, key;
    std::size_t arrived = 0;
  };
  std::vector<Member> members;
  std::size_t joined = 0;
  std::map<std::size_t, Meeting> meetings;
  std::map<std::size_t, Split> splits;
  std::map<std::pair<int, int>, std::deque<Message*>> sends, receives;  // by sender and receiver
  ncclResult_t error = ncclSuccess;
  std::string message;

  std::size_t size() const { return members.size(); }
  bool complete() const { return joined == size(); }
  void fail(ncclResult_t result, const std::string& why);
};

// Keeps the words for ncclGetLastError of this thread; returns the result.
ncclResult_t refuse(ncclResult_t result, const std::string& why);

// Runs on a stream: until done, an error, or this rank's abort.
void meet(Group& group, int rank, const Operation& operation);
void pass_messages(Group& group, int rank, const std::vector<Operation>& operations);
// What is wrong with its memory on this device; "" if nothing.
std::string mistake_in(const Operation& operation, std::size_t ranks, int device);
// How much it reads and writes, of a group of so many ranks.
std::size_t send_bytes(const Operation& operation, std::size_t ranks);
std::size_t receive_bytes(const Operation& operation, std::size_t ranks);

// ---- nccl_registration.cpp; with the lock held.
std::shared_ptr<Registration> find_registration(const ncclComm* comm, const void* address,
                                                std::size_t bytes);
// What a communicator has left, as " [address, address)" each.
std::string describe_registrations(const ncclComm* comm);
void drop_registrations(const ncclComm* comm);

}  // namespace emulator::nccl

struct ncclComm {
  std::shared_ptr<emulator::nccl::Group> group;   // null while a split is under way
  std::shared_ptr<emulator::nccl::Group> parent;  // of a split
  int rank = 0, device = 0;
  bool blocking = true, none = false;  // none: of a split without a color
};
