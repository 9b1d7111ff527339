// SPDX-License-Identifier: Apache-2.0
// A disk's own rate: what a plain loop of pread and pwrite reaches on a file.
#pragma once

#include <sherd/runtime/io/block_file.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace sherd::cli {

// What direct I/O reads and writes: huge pages, as those of the allocator are. A disk that gets a
// request in pieces of 4 KiB can be less than half as fast.
class AlignedMemory {
 public:
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;

  explicit AlignedMemory(std::size_t bytes);
  ~AlignedMemory();
  AlignedMemory(const AlignedMemory&) = delete;
  AlignedMemory& operator=(const AlignedMemory&) = delete;
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_;
  std::byte* data_;
};

// 1 MiB at a time, one after the other, past the page cache where `file` goes past it. Sizes and
// offsets are multiples of that, buffers too. Stops early where stop_requested(), so that on that
// way out the file is removed as well.
class DiskLoop {
 public:
  static constexpr std::size_t kChunk = std::size_t{1} << 20;

  // Opens the file once more. All three must outlive the loop.
  DiskLoop(const BlockFile& file, const AlignedMemory& first, const AlignedMemory& second);
  ~DiskLoop();
  DiskLoop(const DiskLoop&) = delete;
  DiskLoop& operator=(const DiskLoop&) = delete;

  bool direct() const { return direct_; }
  void read(std::uint64_t from, std::uint64_t bytes) { move(false, from, bytes, first_); }
  void write(std::uint64_t from, std::uint64_t bytes) { move(true, from, bytes, second_); }
  // As much is read as is written, at once, each by a loop of its own.
  void both(std::uint64_t read_from, std::uint64_t write_from, std::uint64_t bytes);

 private:
  void move(bool write, std::uint64_t from, std::uint64_t bytes, const AlignedMemory& memory) const;

  const BlockFile& file_;
  const AlignedMemory &first_, &second_;
  bool direct_;
  int descriptor_;
};

// The rate to compare an update from files with: a plain loop in the same folder that moves as many
// bytes, half of them read and half written at once. Its file has no name, so nothing stays behind.
class DiskLimit {
 public:
  // bytes: moved by one measurement, up to rounding. The file is half of that, as the update's is,
  // or half of the room there is.
  DiskLimit(const std::string& folder, std::uint64_t bytes);

  bool direct() const { return loop_.direct(); }
  double measure();  // bytes/s

 private:
  std::uint64_t half_;
  std::uint64_t passes_;
  BlockFile file_;
  AlignedMemory first_{AlignedMemory::kHugePage}, second_{AlignedMemory::kHugePage};
  DiskLoop loop_;
};

}  // namespace sherd::cli
