// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/nccl_handle.h>
#include <sherd/runtime/cuda/check.h>
#include <sherd/runtime/error.h>

#include <chrono>
#include <cstring>
#include <thread>

namespace sherd {
namespace {

constexpr auto kPause = std::chrono::microseconds(50);
// For the other ranks to come to their end, and for an abort where somebody waits for it.
constexpr auto kFarewell = std::chrono::seconds(5);

ncclConfig_t without_blocking() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

// "ncclSend at nccl_communicator.cpp:120", without the arguments.
std::string place_of(const char* call, const char* file, int line) {
  const std::string_view text = call, path = file;
  return fmt::format("{} at {}:{}", text.substr(0, text.find('(')),
                     path.substr(path.find_last_of('/') + 1), line);
}

}  // namespace

std::unique_ptr<NcclHandle> NcclHandle::make(Communicator& host, int device) {
  int current = -1;
  SHERD_CUDA_CHECK(cudaGetDevice(&current));
  SHERD_CHECK(current == device, "NCCL: the stream is of GPU {}, and GPU {} was asked for", current,
              device);
  ncclUniqueId id{};
  if (host.rank() == 0) {
    const ncclResult_t result = ncclGetUniqueId(&id);
    if (result != ncclSuccess)
      host.abort(fmt::format("rank 0: NCCL: {} ({}) in ncclGetUniqueId", ncclGetErrorString(result),
                             ncclGetLastError(nullptr)));
  }
  host.broadcast(&id, sizeof id, DType::u8, 0, "NCCL's id");
  std::unique_ptr<NcclHandle> made(new NcclHandle(host));
  ncclConfig_t config = without_blocking();
  const auto join = [&](ncclComm_t) {
    return ncclCommInitRankConfig(&made->comm_, host.size(), id, host.rank(), &config);
  };
  made->check(join, "ncclCommInitRankConfig", __FILE__, __LINE__);
  return made;
}

std::unique_ptr<NcclHandle> NcclHandle::split(Communicator& group, int color) {
  std::unique_ptr<NcclHandle> made(new NcclHandle(group));
  ncclConfig_t config = without_blocking();
  SHERD_NCCL_CHECK(*this, ncclCommSplit(comm, color, host_.rank(), &made->comm_, &config));
  made->settle("ncclCommSplit");
  return made;
}

NcclHandle::~NcclHandle() {
  finish();
  if (aborting_.valid()) aborting_.wait();
}

void NcclHandle::finish() {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return;
  ncclResult_t result = host_.end_reason().empty() ? ncclCommFinalize(comm_) : ncclRemoteError;
  const auto start = std::chrono::steady_clock::now();
  while (result == ncclInProgress || result == ncclSuccess) {
    result = state();
    if (result == ncclSuccess) {
      ncclCommDestroy(comm_);
      return;
    }
    if (std::chrono::steady_clock::now() - start > kFarewell) break;
    std::this_thread::sleep_for(kPause);
  }
  abort_nccl();
}

void NcclHandle::look(bool done) {
  const std::string ended = host_.end_reason();
  if (!ended.empty()) {
    if (!done) abort_nccl();
    if (!done || aborted()) fail("{}", ended);
  }
  const ncclResult_t result = state();
  if (result != ncclSuccess && result != ncclInProgress) fail_call(result, "an earlier call");
}

void NcclHandle::check(const Call& call, const char* name, const char* file, int line) {
  ncclResult_t result = ncclSuccess;
  {
    const std::lock_guard lock(mutex_);
    result = call(comm_);
  }
  const std::string place = place_of(name, file, line);
  if (result == ncclInProgress) return settle(place.c_str());
  if (result != ncclSuccess) fail_call(result, place);
}

void NcclHandle::exchange(const std::vector<Message>& messages, ncclDataType_t type,
                          cudaStream_t stream) {
  const auto all = [&](ncclComm_t comm) {
    ncclResult_t first = ncclGroupStart();
    for (const Message& one : messages) {
      if (one.count == 0) continue;
      const auto count = static_cast<std::size_t>(one.count);
      const ncclResult_t result = one.send != nullptr
                                      ? ncclSend(one.send, count, type, one.rank, comm, stream)
                                      : ncclRecv(one.receive, count, type, one.rank, comm, stream);
      if (first == ncclSuccess && result != ncclInProgress) first = result;
    }
    const ncclResult_t result = ncclGroupEnd();
    return first == ncclSuccess ? result : first;
  };
  check(all, "a group of ncclSend and ncclRecv", __FILE__, __LINE__);
}

ncclResult_t NcclHandle::state() {
  const std::lock_guard lock(mutex_);
  ncclResult_t result = ncclSuccess;
  if (comm_ == nullptr) return ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm_, &result);
  return asked == ncclSuccess ? result : asked;
}

void NcclHandle::settle(const char* name) {
  constexpr int kQuickLooks = 200;
  for (int looks = 0;; ++looks) {
    const std::string ended = host_.end_reason();
    if (!ended.empty()) {
      abort_nccl();
      fail("{}", ended);
    }
    const ncclResult_t result = state();
    if (result == ncclSuccess) return;
    if (result != ncclInProgress) fail_call(result, name);
    if (looks < kQuickLooks) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPause);
    }
  }
}

void NcclHandle::abort_nccl() {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return;
  // Not to be waited for here: it ends when all graphs that NCCL is captured in are gone, and all
  // other communicators of the device have been told to end.
  const auto abort = [comm = std::exchange(comm_, nullptr)] { ncclCommAbort(comm); };
  aborted_ = std::chrono::steady_clock::now();
  aborting_ = std::async(std::launch::async, abort).share();
}

bool NcclHandle::aborted() {
  const std::lock_guard lock(mutex_);
  return comm_ == nullptr;
}

void NcclHandle::deregister_memory(void* handle) {
  std::shared_future<void> aborting;
  {
    const std::lock_guard lock(mutex_);
    if (comm_ != nullptr && handle != nullptr) {  // null: registration is switched off
      const ncclResult_t result = ncclCommDeregister(comm_, handle);
      if (result != ncclSuccess && result != ncclInProgress)
        end_group(result, "ncclCommDeregister");
    }
    aborting = aborting_;
  }
  if (aborting.valid()) aborting.wait_until(aborted_ + kFarewell);
}

// The other ranks would wait for this one for ever.
void NcclHandle::end_group(ncclResult_t result, const std::string& where) {
  std::string reason;
  {
    const std::lock_guard lock(mutex_);
    reason = fmt::format("rank {}: NCCL: {} ({}) in {}; NCCL_DEBUG=WARN says more", host_.rank(),
                         ncclGetErrorString(result), ncclGetLastError(comm_), where);
  }
  host_.abort(reason);
  abort_nccl();
}

void NcclHandle::fail_call(ncclResult_t result, const std::string& where) {
  end_group(result, where);
  fail("{}", host_.end_reason());
}

}  // namespace sherd
