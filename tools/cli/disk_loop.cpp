// SPDX-License-Identifier: Apache-2.0
#include "disk_loop.h"
#include "stop_signal.h"

#include <fcntl.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/ledger.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <future>
#include <system_error>

namespace sherd::cli {

AlignedMemory::AlignedMemory(std::size_t bytes) : bytes_(bytes) {
  const std::size_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  data_ = static_cast<std::byte*>(std::aligned_alloc(kHugePage, whole));
  SHERD_CHECK(data_ != nullptr, "not enough memory for a buffer of {}",
              format_bytes(static_cast<std::int64_t>(bytes)));
  ::madvise(data_, whole, MADV_HUGEPAGE);
  std::memset(data_, 1, bytes);
}

AlignedMemory::~AlignedMemory() {
  std::free(data_);
}

DiskLoop::DiskLoop(const BlockFile& file, const AlignedMemory& first, const AlignedMemory& second)
    : file_(file),
      first_(first),
      second_(second),
      direct_(file.describe().ends_with("direct")),
      descriptor_(::open(file.path().c_str(), O_RDWR | O_CLOEXEC | (direct_ ? O_DIRECT : 0))) {
  SHERD_CHECK(descriptor_ >= 0, "cannot open '{}': {}", file.path(),
              std::system_category().message(errno));
}

DiskLoop::~DiskLoop() {
  ::close(descriptor_);
}

void DiskLoop::move(bool write, std::uint64_t from, std::uint64_t bytes,
                    const AlignedMemory& memory) const {
  for (std::uint64_t at = from; at < from + bytes && !stop_requested(); at += kChunk) {
    std::byte* place = memory.data() + at % memory.bytes() / kChunk * kChunk;
    const auto offset = static_cast<off_t>(at);
    const ssize_t moved = write ? ::pwrite(descriptor_, place, kChunk, offset)
                                : ::pread(descriptor_, place, kChunk, offset);
    SHERD_CHECK(moved == ssize_t{kChunk}, "cannot {} '{}' at offset {}: {}",
                write ? "write" : "read", file_.path(), at,
                moved < 0 ? std::system_category().message(errno) : "not all bytes moved");
  }
}

void DiskLoop::both(std::uint64_t read_from, std::uint64_t write_from, std::uint64_t bytes) {
  auto reading = std::async(std::launch::async, [&] { read(read_from, bytes); });
  write(write_from, bytes);
  reading.get();
}

namespace {

std::uint64_t half_size(const std::string& folder, std::uint64_t bytes) {
  std::error_code error;
  const std::filesystem::space_info room = std::filesystem::space(folder, error);
  if (!error) bytes = std::min<std::uint64_t>(bytes, room.available);
  return std::max((bytes / 4 + DiskLoop::kChunk - 1) / DiskLoop::kChunk, std::uint64_t{1}) *
         DiskLoop::kChunk;
}

}  // namespace

DiskLimit::DiskLimit(const std::string& folder, std::uint64_t bytes)
    : half_(half_size(folder, bytes)),
      passes_(std::max((bytes + half_) / (2 * half_), std::uint64_t{1})),
      file_(fmt::format("{}/sherd-bench-{}.scratch", folder, ::getpid()), 2 * half_),
      loop_(file_, first_, second_) {
  ::unlink(file_.path().c_str());
  loop_.write(0, 2 * half_);  // a block's first write costs the file system more
}

double DiskLimit::measure() {
  const auto start = std::chrono::steady_clock::now();
  for (std::uint64_t pass = 0; pass < passes_; ++pass) {
    const bool turn = pass % 2 == 1;
    loop_.both(turn ? half_ : 0, turn ? 0 : half_, half_);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return static_cast<double>(2 * half_ * passes_) / seconds;
}

}  // namespace sherd::cli
