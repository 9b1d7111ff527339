// SPDX-License-Identifier: Apache-2.0
// Between a BlockFile and what moves its bytes: the queue cuts transfers into pieces, hands them
// out and judges what came of them; a backend moves one piece as one request to the system.
#pragma once

#include <sherd/runtime/io/block_file.h>

#include <condition_variable>
#include <deque>
#include <mutex>

namespace sherd {

struct BlockTransferState {
  // Set when the transfer starts.
  std::uint64_t number = 0;
  bool write = false;
  std::uint64_t offset = 0, bytes = 0;
  std::byte* memory = nullptr;
  std::uint64_t taken = 0;  // bytes handed out as pieces; under the queue's lock

  std::mutex mutex;
  std::condition_variable finished;
  std::uint64_t pieces_left = 0;
  std::string error;  // of the failed piece with the lowest offset
  std::uint64_t error_offset = 0;
};

// A piece on its way.
struct BlockWork : BlockPiece {
  std::shared_ptr<BlockTransferState> owner;
};

class BlockQueue {
 public:
  BlockQueue(std::string path, std::size_t chunk,
             std::function<std::int64_t(const BlockPiece&, std::int64_t)> alter_result);

  void push(std::shared_ptr<BlockTransferState> transfer);
  void close();  // nothing is pushed any more; what is there is still handed out
  bool closed() const;

  // The next piece: reads and writes in turns, each in the order they were started. A disk may do
  // both at once, and what is read ahead does not wait for all that is written back. False if there
  // is none now; take_or_wait: if there will be none any more.
  bool take(BlockWork& work);
  bool take_or_wait(BlockWork& work);

  // `result`: bytes moved, or minus an errno. False: `work` is now what is still to do, run it.
  bool finish(BlockWork& work, std::int64_t result);

 private:
  bool cut(BlockWork& work);

  const std::string path_;
  const std::size_t chunk_;
  const std::function<std::int64_t(const BlockPiece&, std::int64_t)> alter_result_;
  mutable std::mutex mutex_;
  std::condition_variable pushed_;
  std::deque<std::shared_ptr<BlockTransferState>> reads_, writes_;
  bool write_next_ = false;
  std::uint64_t transfers_started_ = 0;
  bool closed_ = false;
};

// Destroyed after its queue was closed, once the last piece is finished.
class BlockBackend {
 public:
  virtual ~BlockBackend() = default;
  virtual void wake() {}  // after push() and close(), for those not asleep in take_or_wait()
};

std::unique_ptr<BlockBackend> make_block_threads(BlockQueue& queue, int descriptor, int depth);

// nullptr where it is not possible, with the reason.
std::unique_ptr<BlockBackend> make_block_uring(BlockQueue& queue, int descriptor, int depth,
                                               std::string& reason);

}  // namespace sherd
