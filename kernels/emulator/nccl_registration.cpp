// SPDX-License-Identifier: Apache-2.0
// Memory that communicators know: ncclCommRegister and ncclMemAlloc. It changes no result here;
// what NCCL leaves undefined is an error.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "block.h"
#include "memory.h"
#include "nccl.h"
#include "nccl_lock.h"

namespace emulator {
namespace nccl {
namespace {

struct All {
  std::set<std::shared_ptr<Registration>> ranges;
  std::size_t made = 0;
};
All& all() {
  static auto* one = new All;
  return *one;
}

bool holds(const Registration& range, const char* address, std::size_t bytes) {
  return address >= range.address && address + bytes <= range.address + range.bytes;
}

std::string describe(const Registration& range) {
  char text[64];
  std::snprintf(text, sizeof text, "[%p, %p)", static_cast<const void*>(range.address),
                static_cast<const void*>(range.address + range.bytes));
  return text;
}

bool switched_off() {
  const char* const value = std::getenv("NCCL_LOCAL_REGISTER");
  return value != nullptr && std::string(value) == "0";
}

std::string problem_of_freeing(const char* address, std::size_t bytes) {
  const std::lock_guard lock(mutex());
  for (const auto& range : all().ranges) {
    if (range->address < address + bytes && address < range->address + range->bytes)
      return "cudaFree of memory that rank " + std::to_string(range->comm->rank) +
             " of a communicator has registered: " + describe(*range) +
             "; ncclCommDeregister it first\n";
  }
  return "";
}

}  // namespace

std::shared_ptr<Registration> find_registration(const ncclComm* comm, const void* address,
                                                std::size_t bytes) {
  if (address == nullptr || bytes == 0) return nullptr;
  for (const auto& range : all().ranges) {
    if (range->comm == comm && holds(*range, static_cast<const char*>(address), bytes))
      return range;
  }
  return nullptr;
}

std::string describe_registrations(const ncclComm* comm) {
  std::string text;
  for (const auto& range : all().ranges) {
    if (range->comm == comm) text += " " + describe(*range);
  }
  return text;
}

void drop_registrations(const ncclComm* comm) {
  std::erase_if(all().ranges, [&](const auto& range) { return range->comm == comm; });
}

}  // namespace nccl

NcclRegistrations nccl_registrations() {
  const std::lock_guard lock(nccl::mutex());
  std::size_t bytes = 0;
  for (const auto& range : nccl::all().ranges) bytes += range->bytes;
  return {nccl::all().ranges.size(), bytes, nccl::all().made};
}

}  // namespace emulator

using namespace emulator::nccl;

ncclResult_t ncclMemAlloc(void** address, std::size_t bytes) {
  return cudaMalloc(address, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclMemFree(void* address) {
  return cudaFree(address) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclCommRegister(ncclComm_t comm, void* address, std::size_t bytes, void** handle) {
  if (comm == nullptr || handle == nullptr || bytes == 0)
    return refuse(ncclInvalidArgument, "ncclCommRegister: no communicator, bytes or handle");
  *handle = nullptr;
  if (switched_off()) return ncclSuccess;
  const emulator::Pointer found = emulator::find_pointer(address);
  if (found.type != cudaMemoryTypeDevice || found.device != comm->device)
    return refuse(ncclInvalidArgument, "ncclCommRegister: no memory of the communicator's device");
  if (found.bytes_after < bytes)
    return refuse(ncclInvalidArgument, "ncclCommRegister: more bytes than the allocation has");
  const std::lock_guard lock(mutex());
  emulator::check_before_free(problem_of_freeing);
  std::shared_ptr<Registration> range = find_registration(comm, address, bytes);
  if (range != nullptr) {
    ++range->references;
  } else {
    range = std::make_shared<Registration>(
        Registration{comm, static_cast<const char*>(address), bytes});
    all().ranges.insert(range);
    ++all().made;
  }
  *handle = range.get();
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(ncclComm_t comm, void* handle) {
  if (comm == nullptr) return refuse(ncclInvalidArgument, "ncclCommDeregister: no communicator");
  if (handle == nullptr) return ncclSuccess;  // what a switched off ncclCommRegister gives
  const std::lock_guard lock(mutex());
  const auto found = std::ranges::find_if(all().ranges, [&](const auto& range) {
    return range.get() == handle && range->comm == comm;
  });
  if (found == all().ranges.end())
    return refuse(ncclInvalidUsage, "ncclCommDeregister: not registered, or not any more");
  if (--(*found)->references > 0) return ncclSuccess;
  if (found->use_count() > 1) {
    ++(*found)->references;
    return refuse(ncclInvalidUsage,
                  "ncclCommDeregister: work on " + describe(**found) + " has not run yet");
  }
  all().ranges.erase(found);
  return ncclSuccess;
}
