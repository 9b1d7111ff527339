// SPDX-License-Identifier: Apache-2.0
// NCCL's communicator, whose calls come back (blocking = 0): what they leave under way is waited
// for while the host's group goes on.
#pragma once

#include <nccl.h>
#include <sherd/comm/communicator.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <vector>

#if NCCL_VERSION_CODE < 21900
// NCCL does not know memory yet: what ncclCommRegister gives later where it is switched off.
inline ncclResult_t ncclCommRegister(ncclComm_t, void*, std::size_t, void** handle) {
  *handle = nullptr;
  return ncclSuccess;
}
inline ncclResult_t ncclCommDeregister(ncclComm_t, void*) {
  return ncclSuccess;
}
#endif

namespace sherd {

class NcclHandle {
 public:
  // All ranks of `host` together, which carries NCCL's id to them and must outlive this.
  static std::unique_ptr<NcclHandle> make(Communicator& host, int device);
  // Of the ranks with this color; `group` has the same ranks on the host.
  std::unique_ptr<NcclHandle> split(Communicator& group, int color);
  ~NcclHandle();
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  // Throws, and has NCCL aborted, where NCCL reports an error, which then ends the group, or the
  // group has ended. Any thread.
  void look() { look(false); }
  // Of work that is done only NCCL's error matters, and whether an abort has cut it short: what
  // others do later does not make it wrong.
  void look(bool done);

  // Makes a call and sees it through. `name`: of the call, for errors.
  using Call = std::function<ncclResult_t(ncclComm_t)>;
  void check(const Call& call, const char* name, const char* file, int line);

  // Ends a registration, of which no work is under way. Throws nothing: an error ends the group.
  // After an abort it waits a while for NCCL to end it.
  void deregister_memory(void* handle);

  struct Message {
    const void* send;  // or
    void* receive;
    std::int64_t count;  // none where 0
    int rank;
  };
  void exchange(const std::vector<Message>& messages, ncclDataType_t type, cudaStream_t stream);

 private:
  explicit NcclHandle(Communicator& host) : host_(host) {}
  ncclResult_t state();
  void settle(const char* name);
  void finish();
  void abort_nccl();
  bool aborted();
  void end_group(ncclResult_t result, const std::string& where);
  [[noreturn]] void fail_call(ncclResult_t result, const std::string& where);

  Communicator& host_;
  std::recursive_mutex mutex_;
  ncclComm_t comm_ = nullptr;  // null: aborted
  std::shared_future<void> aborting_;
  std::chrono::steady_clock::time_point aborted_;
};

}  // namespace sherd

// A call of NCCL's, written with `comm` in the place of the communicator, on a handle.
#define SHERD_NCCL_CHECK(handle, call) \
  (handle).check([&](ncclComm_t comm) { return (call); }, #call, __FILE__, __LINE__)
