// SPDX-License-Identifier: Apache-2.0
#include "block_file_queue.h"

#include <sherd/runtime/error.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace sherd {
namespace {

std::string advice(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT: return " (free some space or choose another directory)";
    case EFBIG: return " (the limit for files of this process, ulimit -f, is too low)";
    case EIO: return " (the disk failed: see the system's log)";
    default: return "";
  }
}

}  // namespace

bool BlockTransfer::done() const {
  if (!state_) return true;
  const std::lock_guard lock(state_->mutex);
  return state_->pieces_left == 0;
}

void BlockTransfer::wait() const {
  if (!state_) return;
  std::unique_lock lock(state_->mutex);
  state_->finished.wait(lock, [&] { return state_->pieces_left == 0; });
  if (!state_->error.empty()) throw Error(state_->error);
}

BlockQueue::BlockQueue(std::string path, std::size_t chunk,
                       std::function<std::int64_t(const BlockPiece&, std::int64_t)> alter_result)
    : path_(std::move(path)), chunk_(chunk), alter_result_(std::move(alter_result)) {}

void BlockQueue::push(std::shared_ptr<BlockTransferState> transfer) {
  transfer->pieces_left = (transfer->bytes + chunk_ - 1) / chunk_;
  {
    const std::lock_guard lock(mutex_);
    transfer->number = transfers_started_++;
    if (transfer->bytes == 0) return;
    auto& transfers = transfer->write ? writes_ : reads_;
    transfers.push_back(std::move(transfer));
  }
  pushed_.notify_all();
}

void BlockQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  pushed_.notify_all();
}

bool BlockQueue::closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

bool BlockQueue::cut(BlockWork& work) {
  if (reads_.empty() && writes_.empty()) return false;
  const bool write = reads_.empty() || (write_next_ && !writes_.empty());
  write_next_ = !write;
  auto& transfers = write ? writes_ : reads_;
  BlockTransferState& transfer = *transfers.front();
  work.transfer = transfer.number;
  work.write = write;
  work.offset = transfer.offset + transfer.taken;
  work.memory = transfer.memory + transfer.taken;
  work.bytes = std::min<std::uint64_t>(chunk_, transfer.bytes - transfer.taken);
  work.owner = transfers.front();
  transfer.taken += work.bytes;
  if (transfer.taken == transfer.bytes) transfers.pop_front();
  return true;
}

bool BlockQueue::take(BlockWork& work) {
  const std::lock_guard lock(mutex_);
  return cut(work);
}

bool BlockQueue::take_or_wait(BlockWork& work) {
  std::unique_lock lock(mutex_);
  pushed_.wait(lock, [&] { return closed_ || !reads_.empty() || !writes_.empty(); });
  return cut(work);
}

bool BlockQueue::finish(BlockWork& work, std::int64_t result) {
  if (alter_result_) result = alter_result_(work, result);
  if (result == -EINTR || result == -EAGAIN) return false;
  const std::size_t moved = result < 0 ? 0 : static_cast<std::size_t>(result);
  // Less than asked for is no error yet; and direct I/O goes on only from the start of a block.
  const std::size_t whole = moved / BlockFile::kAlignment * BlockFile::kAlignment;
  if (whole > 0 && whole < work.bytes) {
    work.offset += whole;
    work.memory += whole;
    work.bytes -= whole;
    return false;
  }
  const std::shared_ptr<BlockTransferState> transfer = std::move(work.owner);
  std::string error;
  if (result < 0) {
    const int code = static_cast<int>(-result);
    error = fmt::format("cannot {} {} bytes at offset {} of '{}': {}{}",
                        work.write ? "write" : "read", work.bytes, work.offset, path_,
                        std::system_category().message(code), advice(code));
  } else if (moved < work.bytes) {
    error = fmt::format(
        "'{}': expected to {} {} bytes at offset {}, got {}: {}", path_,
        work.write ? "write" : "read", transfer->bytes, transfer->offset,
        work.offset + moved - transfer->offset,
        work.write ? "the system took no more"
                   : "the file ends there, something has cut it short while it was in use");
  }
  {
    const std::lock_guard lock(transfer->mutex);
    if (!error.empty() && (transfer->error.empty() || work.offset < transfer->error_offset)) {
      transfer->error = std::move(error);
      transfer->error_offset = work.offset;
    }
    if (--transfer->pieces_left > 0) return true;
  }
  transfer->finished.notify_all();
  return true;
}

}  // namespace sherd
