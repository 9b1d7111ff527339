// SPDX-License-Identifier: Apache-2.0
// Ranks meet: Note [Emulated NCCL] is in nccl.h.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>

#include "nccl.h"
#include "nccl_lock.h"
#include "nccl_reduce.h"

namespace emulator {
namespace {

double patience = 30.0;

}  // namespace

void set_nccl_patience(double seconds) {
  const std::lock_guard lock(nccl::mutex());
  patience = seconds;
}

namespace nccl {

std::mutex& mutex() {
  static auto* one = new std::mutex;
  return *one;
}
std::condition_variable& changed() {
  static auto* one = new std::condition_variable;
  return *one;
}

std::string Operation::describe() const {
  static constexpr const char* kNames[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather",
                                           "ncclBroadcast", "ncclSend",          "ncclRecv"};
  std::string text = kNames[static_cast<int>(kind)];
  text += " of " + std::to_string(count) + " of type " + std::to_string(type);
  if (kind <= Kind::reduce_scatter) text += ", operation " + std::to_string(op);
  if (kind == Kind::broadcast) text += " from " + std::to_string(peer);
  if (is_message()) text += (kind == Kind::send ? " to " : " from ") + std::to_string(peer);
  return text;
}

void Group::fail(ncclResult_t result, const std::string& why) {
  if (error != ncclSuccess) return;
  error = result;
  message = why;
  changed().notify_all();
}

std::size_t send_bytes(const Operation& operation, std::size_t ranks) {
  using Kind = Operation::Kind;
  if (operation.kind == Kind::receive) return 0;
  const std::size_t piece = operation.count * bytes_of(operation.type);
  return piece * (operation.kind == Kind::reduce_scatter ? ranks : 1);
}
std::size_t receive_bytes(const Operation& operation, std::size_t ranks) {
  using Kind = Operation::Kind;
  if (operation.kind == Kind::send) return 0;
  const std::size_t piece = operation.count * bytes_of(operation.type);
  return piece * (operation.kind == Kind::all_gather ? ranks : 1);
}

std::string mistake_in(const Operation& operation, std::size_t ranks, int device) {
  using Kind = Operation::Kind;
  if (bytes_of(operation.type) == 0) return "unknown type";
  if (operation.count == 0) return "";
  const auto check = [&](const void* address, std::size_t bytes, const char* what) -> std::string {
    const Pointer found = find_pointer(address);
    if (found.type == cudaMemoryTypeUnregistered) return std::string(what) + " is no device memory";
    if (found.type == cudaMemoryTypeDevice && found.device != device)
      return std::string(what) + " is on another device";
    if (found.bytes_after < bytes) return std::string(what) + " is too small";
    return "";
  };
  std::string mistake;
  if (operation.kind != Kind::receive)
    mistake = check(operation.send, send_bytes(operation, ranks), "the send buffer");
  if (mistake.empty() && operation.kind != Kind::send)
    mistake = check(operation.receive, receive_bytes(operation, ranks), "the receive buffer");
  return mistake;
}

namespace {

// Waits until `ready`, an error, this rank's abort, or too long.
template <typename Ready>
void wait(std::unique_lock<std::mutex>& lock, Group& group, int rank, const Ready& ready) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(patience);
  const auto over = [&] {
    return ready() || group.error != ncclSuccess ||
           group.members[static_cast<std::size_t>(rank)].aborted;
  };
  while (!over()) {
    changed().wait_for(lock, std::chrono::milliseconds(20));
    if (over() || std::chrono::steady_clock::now() < until) continue;
    std::string text = "too long a wait:";
    for (std::size_t r = 0; r < group.size(); ++r) {
      const std::string& in = group.members[r].waits_in;
      text += " rank " + std::to_string(r) + (in.empty() ? " is elsewhere;" : " is in " + in + ";");
    }
    group.fail(ncclSystemError, text);
  }
}

bool same(const Operation& a, const Operation& b) {
  return a.kind == b.kind && a.count == b.count && a.type == b.type && a.op == b.op &&
         a.peer == b.peer;
}

std::string registered_in(const Operation& operation) {
  const auto word = [](const std::shared_ptr<Registration>& range) {
    return range != nullptr ? "registered" : "not registered";
  };
  std::string text;
  if (operation.kind != Operation::Kind::receive)
    text = std::string("sends from memory ") + word(operation.send_range);
  if (operation.kind != Operation::Kind::send)
    text += (text.empty() ? "" : ", ") + std::string("receives in memory ") +
            word(operation.receive_range);
  return text;
}

// What NCCL leaves undefined: registered memory of some ranks and other memory of others.
bool registered_alike(const Operation& a, const Operation& b) {
  if (a.count == 0 || a.captured || b.captured) return true;
  if (!a.is_message())
    return (a.send_range == nullptr) == (b.send_range == nullptr) &&
           (a.receive_range == nullptr) == (b.receive_range == nullptr);
  const bool one = a.send_range != nullptr || a.receive_range != nullptr;
  return one == (b.send_range != nullptr || b.receive_range != nullptr);
}

// All ranks' memory is at hand. Inputs are copied first: outputs may lie in them.
void do_for_all(const std::vector<const Operation*>& all) {
  using Kind = Operation::Kind;
  const Operation& one = *all.front();
  const std::size_t ranks = all.size(), width = bytes_of(one.type), piece = one.count * width;
  if (piece == 0) return;
  const std::size_t whole = piece * (one.kind == Kind::reduce_scatter ? ranks : 1);
  std::vector<std::vector<char>> copies;
  std::vector<const void*> inputs;
  for (std::size_t r = 0; r < ranks; ++r) {
    copies.emplace_back(whole);
    if (one.kind != Kind::broadcast || static_cast<int>(r) == one.peer)
      std::memcpy(copies.back().data(), all[r]->send, whole);
    inputs.push_back(copies.back().data());
  }
  for (std::size_t r = 0; r < ranks; ++r) {
    auto* to = static_cast<char*>(all[r]->receive);
    switch (one.kind) {
      case Kind::all_gather:
        for (std::size_t from = 0; from < ranks; ++from)
          std::memcpy(to + from * piece, inputs[from], piece);
        break;
      case Kind::broadcast:
        std::memcpy(to, inputs[static_cast<std::size_t>(one.peer)], piece);
        break;
      case Kind::reduce_scatter:
        reduce_around(inputs, r * one.count, one.count, r + 1, one.type, one.op, to);
        break;
      case Kind::all_reduce: {
        const std::size_t most = (one.count + ranks - 1) / ranks;
        for (std::size_t part = 0, begin = 0; begin < one.count; ++part, begin += most) {
          reduce_around(inputs, begin, std::min(most, one.count - begin), part + 1, one.type,
                        one.op, to + begin * width);
        }
        break;
      }
      case Kind::send:
      case Kind::receive: break;
    }
  }
}

}  // namespace

void meet(Group& group, int rank, const Operation& operation) {
  std::unique_lock lock(mutex());
  Group::Member& me = group.members[static_cast<std::size_t>(rank)];
  if (group.error != ncclSuccess || me.aborted) return;
  const std::size_t number = me.collectives++;
  Group::Meeting& meeting = group.meetings[number];
  meeting.operations.resize(group.size());
  meeting.operations[static_cast<std::size_t>(rank)] = &operation;
  ++meeting.arrived;
  me.waits_in = operation.describe();
  me.in_collective = true;
  if (meeting.arrived == group.size()) {
    const bool equal = std::ranges::all_of(
        meeting.operations, [&](const Operation* other) { return same(*other, operation); });
    const bool alike = std::ranges::all_of(meeting.operations, [&](const Operation* other) {
      return registered_alike(*other, operation);
    });
    if (equal && alike) {
      do_for_all(meeting.operations);
      meeting.done = true;
      for (Group::Member& member : group.members) member.in_collective = false;
    } else {
      std::string text = equal ? "registered on some ranks alone:" : "calls differ:";
      for (std::size_t r = 0; r < group.size(); ++r) {
        const Operation& other = *meeting.operations[r];
        text += " rank " + std::to_string(r) + ": " + other.describe() +
                (equal ? " " + registered_in(other) : "") + ";";
      }
      group.fail(ncclInvalidUsage, text);
    }
  }
  changed().notify_all();
  wait(lock, group, rank, [&] { return meeting.done; });
  me.waits_in.clear();
  me.in_collective = false;
  if (!meeting.done) {
    --meeting.arrived;  // never complete without this rank
    return;
  }
  if (++meeting.gone == group.size()) group.meetings.erase(number);
}

void pass_messages(Group& group, int rank, const std::vector<Operation>& operations) {
  std::unique_lock lock(mutex());
  Group::Member& me = group.members[static_cast<std::size_t>(rank)];
  if (group.error != ncclSuccess || me.aborted) return;
  std::vector<Message> mine;
  for (const Operation& one : operations) mine.push_back({&one});
  const auto queue_of = [&](const Message& one, bool other) -> std::deque<Message*>& {
    const bool sends = one.operation->kind == Operation::Kind::send;
    const std::pair<int, int> pair =
        sends ? std::pair{rank, one.operation->peer} : std::pair{one.operation->peer, rank};
    return sends != other ? group.sends[pair] : group.receives[pair];
  };
  for (Message& one : mine) {
    std::deque<Message*>& theirs = queue_of(one, true);
    if (theirs.empty()) {
      queue_of(one, false).push_back(&one);
      continue;
    }
    Message& other = *theirs.front();
    theirs.pop_front();
    const bool sends = one.operation->kind == Operation::Kind::send;
    const Operation& from = sends ? *one.operation : *other.operation;
    const Operation& to = sends ? *other.operation : *one.operation;
    if (from.count != to.count || from.type != to.type) {
      group.fail(ncclInvalidUsage,
                 "messages differ: " + from.describe() + "; " + to.describe() + ";");
      break;
    }
    if (!registered_alike(from, to)) {
      group.fail(ncclInvalidUsage, "registered on some ranks alone: " + from.describe() + " " +
                                       registered_in(from) + "; " + to.describe() + " " +
                                       registered_in(to) + ";");
      break;
    }
    const std::size_t bytes = from.count * bytes_of(from.type);
    if (bytes > 0) std::memmove(to.receive, from.send, bytes);
    one.done = other.done = true;
  }
  changed().notify_all();
  me.waits_in = mine.front().operation->describe();
  wait(lock, group, rank, [&] {
    for (const Message& one : mine) {
      const auto peer = static_cast<std::size_t>(one.operation->peer);
      if (!one.done && group.members[peer].in_collective)
        group.fail(ncclInvalidUsage, "rank " + std::to_string(rank) + " waits in " +
                                         one.operation->describe() + ", and that rank in " +
                                         group.members[peer].waits_in);
    }
    return std::ranges::all_of(mine, &Message::done);
  });
  me.waits_in.clear();
  for (Message& one : mine) {
    if (!one.done) std::erase(queue_of(one, false), &one);
  }
}

}  // namespace nccl
}  // namespace emulator
