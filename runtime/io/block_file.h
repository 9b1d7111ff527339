// SPDX-License-Identifier: Apache-2.0
// A scratch file of fixed size for bytes that come and go while a program runs, past the page cache
// where the file system can.
//
//   BlockFile file("/scratch/rank-0", std::uint64_t{1} << 30);
//   const BlockTransfer read = file.start_read(offset, memory, bytes);  // returns at once
//   ...                                                                 // compute
//   read.wait();                                                        // throws what went wrong
//
// Bytes never written read as zeros. Transfers that overlap, in the file or in memory, are the
// caller's affair. Errors are sherd::Error with the path, the offset and what the system said.
//
// Threads: everything but construction and destruction may be called by several threads at once.
// The disk is driven by threads of the file's own (one with io_uring, queue_depth without), which
// share one locked list of transfers with the callers; so transfers go on while callers compute.
#pragma once

#include <sherd/runtime/api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace sherd {

class BlockBackend;
class BlockQueue;
struct BlockTransferState;

enum class BlockEngine : std::uint8_t {
  automatic,  // io_uring where this build and the kernel have it, else threads
  io_uring,   // an error where it is not possible
  threads,    // pread and pwrite
};
SHERD_API std::string_view name_of(BlockEngine engine);

// What reaches the disk as one request: a part of a transfer.
struct BlockPiece {
  std::uint64_t transfer = 0;  // the how manieth started on this file, from 0
  bool write = false;
  std::uint64_t offset = 0;  // in the file
  std::byte* memory = nullptr;
  std::size_t bytes = 0;
};

struct BlockFileOptions {
  BlockEngine engine = BlockEngine::automatic;
  bool direct = true;    // past the page cache; where the file system cannot, through it
  int queue_depth = 16;  // pieces on their way at once
  std::size_t chunk = std::size_t{1} << 20;  // bytes of a piece; a multiple of kAlignment
  // For tests: sees what each piece came to (bytes moved, or minus an errno) and returns what is to
  // be believed instead. Called by the file's threads, several at once; may sleep, must not throw.
  std::function<std::int64_t(const BlockPiece&, std::int64_t)> alter_result = {};
};

// A read or write on its way. A default-made one is done. May outlive its file.
class SHERD_API BlockTransfer {
 public:
  bool done() const;  // well or not
  void wait() const;  // until done; throws what went wrong, to everyone who waits

 private:
  friend class BlockFile;
  std::shared_ptr<BlockTransferState> state_;
};

class SHERD_API BlockFile {
 public:
  // Offsets, sizes and addresses are multiples of this.
  static constexpr std::size_t kAlignment = 4096;

  // Creates a file that must not be there yet (as create_new_file) and reserves all of its bytes:
  // a disk without the room is an error here, and nothing is left behind.
  BlockFile(std::string path, std::uint64_t bytes, BlockFileOptions options = {});
  // Waits for the transfers on their way, and removes the file.
  ~BlockFile();
  // Removes the files in `directory` whose names start with `prefix` and that no BlockFile uses any
  // more, left by programs that were killed. Only for names that no other machine gives: whether a
  // file is in use is told by flock(), which need not reach beyond this one.
  static void remove_abandoned(const std::string& directory, const std::string& prefix);
  BlockFile(const BlockFile&) = delete;
  BlockFile& operator=(const BlockFile&) = delete;

  const std::string& path() const;
  std::uint64_t bytes() const;
  std::string describe() const;  // "io_uring, direct"

  // `bytes` bytes between the file at `offset` and memory that stays until the transfer is done.
  BlockTransfer start_read(std::uint64_t offset, void* to, std::size_t bytes);
  BlockTransfer start_write(std::uint64_t offset, const void* from, std::size_t bytes);

  // Throws if the file was deleted, renamed, replaced or cut short since.
  void check_present() const;
  // Throws if bytes of it were cut off since, even if writes have made it as long again: reads do
  // not tell those from zeros.
  void check_whole() const;

 private:
  class Scratch;
  BlockTransfer start(bool write, std::uint64_t offset, std::byte* memory, std::size_t bytes);

  std::unique_ptr<Scratch> scratch_;
  std::unique_ptr<BlockQueue> queue_;
  std::unique_ptr<BlockBackend> backend_;
  bool uring_ = false;
};

}  // namespace sherd
