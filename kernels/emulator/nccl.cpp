// SPDX-License-Identifier: Apache-2.0
// The calls of emulated NCCL; Note [Emulated NCCL] is in nccl.h.
#include "nccl.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <random>

#include "block.h"
#include "nccl_lock.h"
#include "nccl_reduce.h"

namespace emulator::nccl {
namespace {

thread_local std::string last_error;

}  // namespace

ncclResult_t refuse(ncclResult_t result, const std::string& why) {
  last_error = why;
  return result;
}

namespace {

// Communicators that are being made, by id.
std::map<std::string, std::shared_ptr<Group>>& groups() {
  static auto* all = new std::map<std::string, std::shared_ptr<Group>>;
  return *all;
}

// What a thread calls between ncclGroupStart and ncclGroupEnd.
struct Pending {
  ncclComm_t comm;
  cudaStream_t stream;
  Operation operation;
};
thread_local int group_depth = 0;
thread_local std::vector<Pending> pending;

void enqueue_collective(const Pending& one) {
  enqueue(one.stream, [group = one.comm->group, rank = one.comm->rank, operation = one.operation] {
    meet(*group, rank, operation);
  });
}

// All messages of a communicator go together, so that no order of them can lock.
ncclResult_t enqueue_pending() {
  std::vector<Pending> all = std::move(pending);
  pending.clear();
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].comm == nullptr) continue;
    if (!all[i].operation.is_message()) {
      enqueue_collective(all[i]);
      continue;
    }
    const Pending first = all[i];
    std::vector<Operation> together;
    for (std::size_t j = i; j < all.size(); ++j) {
      if (all[j].comm != first.comm || !all[j].operation.is_message()) continue;
      if (all[j].stream != first.stream)
        return refuse(ncclInvalidUsage, "messages of one group on two streams");
      together.push_back(all[j].operation);
      all[j].comm = nullptr;
    }
    enqueue(first.stream,
            [group = first.comm->group, rank = first.comm->rank, together = std::move(together)] {
              pass_messages(*group, rank, together);
            });
  }
  return ncclSuccess;
}

// Work that runs later holds what it works on; what a graph replays does not.
Operation with_registrations(Operation operation, ncclComm_t comm, cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) cudaGetLastError();
  operation.captured = status != cudaStreamCaptureStatusNone;
  if (operation.captured) return operation;
  const std::lock_guard lock(mutex());
  const std::size_t ranks = comm->group->size();
  operation.send_range = find_registration(comm, operation.send, send_bytes(operation, ranks));
  operation.receive_range =
      find_registration(comm, operation.receive, receive_bytes(operation, ranks));
  return operation;
}

ncclResult_t add(ncclComm_t comm, cudaStream_t stream, const Operation& operation) {
  if (comm == nullptr) return refuse(ncclInvalidArgument, "no communicator");
  {
    const std::lock_guard lock(mutex());
    if (comm->group == nullptr || !comm->group->complete())
      return refuse(ncclInvalidUsage, "the communicator is still being made");
    if (comm->group->error != ncclSuccess) return comm->group->error;
  }
  const std::size_t ranks = comm->group->size();
  const bool has_peer = operation.is_message() || operation.kind == Operation::Kind::broadcast;
  std::string mistake = mistake_in(operation, ranks, comm->device);
  if (has_peer && (operation.peer < 0 || operation.peer >= static_cast<int>(ranks)))
    mistake = "no such rank";
  if (current_device() != comm->device) mistake = "another device is current";
  if (!mistake.empty()) return refuse(ncclInvalidArgument, operation.describe() + ": " + mistake);
  pending.push_back({comm, stream, with_registrations(operation, comm, stream)});
  return group_depth == 0 ? enqueue_pending() : ncclSuccess;
}

// With the lock held; whether it had to give up.
template <typename Ready>
bool comes_true(std::unique_lock<std::mutex>& lock, const Ready& ready) {
  return changed().wait_for(lock, std::chrono::seconds(60), ready);
}

bool wants_to_block(const ncclConfig_t* config) {
  return config == nullptr || config->blocking != 0;
}

ncclResult_t join(ncclComm_t* made, const std::shared_ptr<Group>& group, int rank, bool blocking,
                  std::unique_lock<std::mutex>& lock) {
  Group::Member& me = group->members[static_cast<std::size_t>(rank)];
  for (const Group::Member& other : group->members) {
    if (other.device == current_device())
      group->fail(ncclInvalidUsage, "two ranks on device " + std::to_string(other.device));
  }
  if (me.device >= 0) group->fail(ncclInvalidUsage, "two ranks with one number");
  me.device = current_device();
  ++group->joined;
  changed().notify_all();
  *made = new ncclComm{group, nullptr, rank, me.device, blocking};
  if (!blocking) return ncclInProgress;
  if (!comes_true(lock, [&] { return group->complete() || group->error != ncclSuccess; }))
    return refuse(ncclSystemError, "not all ranks have come");
  return group->error;
}

ncclComm_t next_in(Group::Split& split, std::size_t rank, std::shared_ptr<Group> group, int place) {
  ncclComm_t comm = split.made[rank];
  group->members[static_cast<std::size_t>(place)].device = comm->device;
  ++group->joined;
  comm->rank = place;
  comm->group = std::move(group);
  return comm;
}

// All ranks have come: makes a group for each color, by key and then rank.
void finish(Group::Split& split) {
  std::map<int, std::vector<std::size_t>> colors;
  for (std::size_t r = 0; r < split.made.size(); ++r) {
    if (split.made[r] != nullptr) colors[split.color[r]].push_back(r);
  }
  for (auto& [color, ranks] : colors) {
    std::ranges::stable_sort(ranks, {}, [&](std::size_t r) { return split.key[r]; });
    auto group = std::make_shared<Group>();
    group->members.resize(ranks.size());
    for (std::size_t place = 0; place < ranks.size(); ++place)
      next_in(split, ranks[place], group, static_cast<int>(place));
  }
}

}  // namespace
}  // namespace emulator::nccl

using namespace emulator::nccl;
using Kind = Operation::Kind;

ncclResult_t ncclGetVersion(int* version) {
  if (version == nullptr) return ncclInvalidArgument;
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (id == nullptr) return ncclInvalidArgument;
  static std::atomic<unsigned> count{0};
  std::memset(id, 0, sizeof *id);
  const std::string text =
      "emulated " + std::to_string(std::random_device{}()) + " " + std::to_string(++count);
  text.copy(id->internal, sizeof id->internal - 1);
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
  }
  return "unknown result code";
}

const char* ncclGetLastError(ncclComm_t comm) {
  const std::lock_guard lock(mutex());
  if (comm != nullptr && comm->group != nullptr && !comm->group->message.empty())
    last_error = comm->group->message;
  return last_error.c_str();
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  if (comm == nullptr || ranks < 1 || rank < 0 || rank >= ranks)
    return refuse(ncclInvalidArgument,
                  "rank " + std::to_string(rank) + " of " + std::to_string(ranks));
  std::unique_lock lock(mutex());
  const std::string key(id.internal, sizeof id.internal);
  std::shared_ptr<Group>& slot = groups()[key];
  if (slot == nullptr) {
    slot = std::make_shared<Group>();
    slot->members.resize(static_cast<std::size_t>(ranks));
  }
  const std::shared_ptr<Group> group = slot;
  if (group->size() != static_cast<std::size_t>(ranks))
    return refuse(ncclInvalidUsage, "ranks name different sizes");
  const ncclResult_t result = join(comm, group, rank, wants_to_block(config), lock);
  if (group->complete()) groups().erase(key);
  return result;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made,
                           ncclConfig_t* config) {
  if (comm == nullptr || made == nullptr) return refuse(ncclInvalidArgument, "no communicator");
  std::unique_lock lock(mutex());
  Group& group = *comm->group;
  const auto rank = static_cast<std::size_t>(comm->rank);
  Group::Split& split = group.splits[group.members[rank].splits++];
  split.made.resize(group.size());
  split.color.resize(group.size());
  split.key.resize(group.size());
  *made = nullptr;
  if (color != NCCL_SPLIT_NOCOLOR)
    split.made[rank] = *made =
        new ncclComm{nullptr, comm->group, 0, comm->device, wants_to_block(config)};
  split.color[rank] = color;
  split.key[rank] = key;
  if (++split.arrived == group.size()) finish(split);
  changed().notify_all();
  if (!wants_to_block(config)) return *made == nullptr ? ncclSuccess : ncclInProgress;
  const auto ready = [&] { return split.arrived == group.size() || group.error != ncclSuccess; };
  if (!comes_true(lock, ready)) return refuse(ncclSystemError, "not all ranks have come");
  return group.error;
}

namespace {

// NCCL's manual knows no other end of a registration.
void check_deregistered(const ncclComm* comm, const char* call) {
  std::string left;
  {
    const std::lock_guard lock(mutex());
    left = describe_registrations(comm);
  }
  if (!left.empty())
    emulator::report(std::string(call) + " of rank " + std::to_string(comm->rank) +
                     ", which has registered memory:" + left + "; ncclCommDeregister it first\n");
}

}  // namespace

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (comm == nullptr) return ncclInvalidArgument;
  check_deregistered(comm, "ncclCommFinalize");
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (comm == nullptr) return ncclInvalidArgument;
  check_deregistered(comm, "ncclCommDestroy");
  {
    const std::lock_guard lock(mutex());
    if (comm->group == nullptr && comm->parent != nullptr) {
      for (auto& [number, split] : comm->parent->splits)
        std::ranges::replace(split.made, comm, nullptr);
    }
  }
  delete comm;  // what still runs keeps the group
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm == nullptr) return ncclInvalidArgument;
  {
    const std::lock_guard lock(mutex());
    if (comm->group != nullptr)
      comm->group->members[static_cast<std::size_t>(comm->rank)].aborted = true;
    drop_registrations(comm);
    changed().notify_all();
  }
  return ncclCommDestroy(comm);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  if (comm == nullptr || result == nullptr) return ncclInvalidArgument;
  const std::lock_guard lock(mutex());
  *result = comm->group == nullptr              ? ncclInProgress
            : comm->group->error != ncclSuccess ? comm->group->error
            : comm->group->complete()           ? ncclSuccess
                                                : ncclInProgress;
  return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int* ranks) {
  if (comm == nullptr || ranks == nullptr) return ncclInvalidArgument;
  *ranks = static_cast<int>(comm->group->size());
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(ncclComm_t comm, int* device) {
  if (comm == nullptr || device == nullptr) return ncclInvalidArgument;
  *device = comm->device;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  if (comm == nullptr || rank == nullptr) return ncclInvalidArgument;
  *rank = comm->rank;
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {Kind::all_reduce, send, receive, count, type, op, 0});
}
ncclResult_t ncclReduceScatter(const void* send, void* receive, std::size_t receive_count,
                               ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  return add(comm, stream, {Kind::reduce_scatter, send, receive, receive_count, type, op, 0});
}
ncclResult_t ncclAllGather(const void* send, void* receive, std::size_t send_count,
                           ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {Kind::all_gather, send, receive, send_count, type, ncclSum, 0});
}
ncclResult_t ncclBroadcast(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  // Only the root's send buffer is read.
  if (comm != nullptr && comm->rank != root) send = receive;
  return add(comm, stream, {Kind::broadcast, send, receive, count, type, ncclSum, root});
}
ncclResult_t ncclSend(const void* send, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {Kind::send, send, nullptr, count, type, ncclSum, peer});
}
ncclResult_t ncclRecv(void* receive, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {Kind::receive, nullptr, receive, count, type, ncclSum, peer});
}

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (group_depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  return --group_depth == 0 ? enqueue_pending() : ncclSuccess;
}
