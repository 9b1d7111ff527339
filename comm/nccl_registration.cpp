// SPDX-License-Identifier: Apache-2.0
// Note [Registered segments] is in nccl_registration.h.
#include <sherd/comm/nccl_registration.h>
#include <sherd/runtime/cuda/check.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace sherd {
namespace {

RegistrationFacts facts_of_this_rank() {
  RegistrationFacts facts;
  // Not the name: containers of one machine have names of their own, and share its links.
  std::string boot;
  if (std::ifstream("/proc/sys/kernel/random/boot_id") >> boot)
    facts.machine = static_cast<std::int64_t>(std::hash<std::string>()(boot) | 1);
  const char* const legacy = std::getenv("NCCL_LEGACY_CUDA_REGISTER");
  facts.legacy = legacy != nullptr && std::string_view(legacy) == "1" ? 1 : 0;
  return facts;
}

std::vector<RegistrationFacts> facts_of_all(Communicator& host) {
  const RegistrationFacts mine = facts_of_this_rank();
  std::vector<RegistrationFacts> all(static_cast<std::size_t>(host.size()));
  static_assert(sizeof(RegistrationFacts) == 2 * sizeof(std::int64_t));
  host.all_gather(&mine, all.data(), 2, DType::i64, "which memory NCCL may work on in place");
  return all;
}

}  // namespace

bool registers_segments(std::span<const RegistrationFacts> ranks) {
  if (ranks.size() < 2) return false;
  if (std::ranges::all_of(ranks, [](const auto& one) { return one.legacy == 1; })) return true;
  std::vector<std::int64_t> machines;
  for (const RegistrationFacts& one : ranks) machines.push_back(one.machine);
  std::ranges::sort(machines);
  return std::ranges::find(machines, 0) == machines.end() &&
         std::ranges::adjacent_find(machines) == machines.end();
}

NcclRegistration::NcclRegistration(NcclHandle& nccl, Communicator& host,
                                   std::shared_ptr<Allocator> allocator, Stream& stream)
    : nccl_(nccl), allocator_(std::move(allocator)), stream_(stream) {
  on_ = registers_segments(facts_of_all(host));
  if (on_)
    listener_ = allocator_->before_segment_is_freed(
        [this](std::span<std::byte> segment) { before_free(segment); });
}

NcclRegistration::~NcclRegistration() {
  for (const auto& [segment, handle] : handles_) nccl_.deregister_memory(handle);
}

void NcclRegistration::prepare(const void* address) {
  if (!on_) return;
  const std::span<std::byte> segment = allocator_->segment_of(address);
  if (segment.empty() || handles_.contains(segment.data())) return;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  SHERD_CUDA_CHECK(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream_.native()), &status));
  if (status != cudaStreamCaptureStatusNone) return;
  void* handle = nullptr;
  SHERD_NCCL_CHECK(nccl_, ncclCommRegister(comm, segment.data(), segment.size(), &handle));
  handles_.emplace(segment.data(), handle);
}

// Throws nothing: what has failed is reported by the next call, or to who waits for the stream.
void NcclRegistration::before_free(std::span<std::byte> segment) {
  const auto found = handles_.find(segment.data());
  if (found == handles_.end()) return;
  try {
    // Not synchronize(), which would keep to itself what it throws here.
    const Event last = stream_.record();
    while (!last.wait_for(std::chrono::milliseconds(2))) nccl_.look();
  } catch (const Error&) {
  }
  nccl_.deregister_memory(found->second);
  handles_.erase(found);
}

}  // namespace sherd
