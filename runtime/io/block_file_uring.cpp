// SPDX-License-Identifier: Apache-2.0
// One thread that keeps an io_uring filled. It alone touches the ring, so the ring needs no lock;
// callers wake it through an eventfd that the ring polls along with the disk.
#include "block_file_queue.h"

#include <liburing.h>
#include <poll.h>
#include <sherd/runtime/error.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <system_error>
#include <thread>
#include <vector>

namespace sherd {
namespace {

class BlockUring final : public BlockBackend {
 public:
  BlockUring(BlockQueue& queue, int descriptor, int depth)
      : queue_(queue), descriptor_(descriptor), works_(static_cast<std::size_t>(depth)) {
    for (std::size_t slot = works_.size(); slot-- > 0;) free_.push_back(slot);
  }
  ~BlockUring() override {
    if (thread_.joinable()) thread_.join();
    if (eventfd_ >= 0) ::close(eventfd_);
    if (ring_made_) io_uring_queue_exit(&ring_);
  }

  // 0 or an errno.
  int open() {
    eventfd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (eventfd_ < 0) return errno;
    const int error = io_uring_queue_init(static_cast<unsigned>(works_.size()) + 1, &ring_, 0);
    if (error != 0) return -error;
    ring_made_ = true;
    // Linux 5.1 to 5.5 have rings without plain reads and writes.
    io_uring_probe* probe = io_uring_get_probe_ring(&ring_);
    const bool able = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                      io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0;
    io_uring_free_probe(probe);
    if (!able) return ENOSYS;
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& failure) {
      return failure.code().value();
    }
    return 0;
  }

  void wake() override { ::eventfd_write(eventfd_, 1); }

 private:
  static constexpr std::uint64_t kWoken = UINT64_MAX;  // tag of the poll; others are slots

  void run() {
    for (;;) {
      // Looked at before the queue, and told to us by the eventfd after it is set.
      const bool closed = queue_.closed();
      if (!listening_ && !closed) listen();
      while (!free_.empty() && queue_.take(works_[free_.back()])) {
        prepare(free_.back());
        free_.pop_back();
      }
      if (closed && !listening_ && free_.size() == works_.size()) return;
      const int result = io_uring_submit_and_wait(&ring_, 1);
      // What the ring still holds was not taken, from the end of what was prepared.
      while (prepared_.size() > io_uring_sq_ready(&ring_)) prepared_.pop_front();
      reap();
      if (result >= 0 || result == -EINTR) continue;
      if (result != -EAGAIN && result != -EBUSY) return fail_all(-result);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // short of memory
    }
  }

  io_uring_sqe* next_entry(std::uint64_t tag) {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);  // as many as slots, and one to listen
    prepared_.push_back(tag);
    return entry;
  }

  void listen() {
    io_uring_sqe* entry = next_entry(kWoken);
    io_uring_prep_poll_add(entry, eventfd_, POLLIN);
    entry->user_data = kWoken;
    listening_ = true;
  }

  void prepare(std::size_t slot) {
    const BlockWork& work = works_[slot];
    io_uring_sqe* entry = next_entry(slot);
    const auto bytes = static_cast<unsigned>(work.bytes);
    if (work.write) {
      io_uring_prep_write(entry, descriptor_, work.memory, bytes, work.offset);
    } else {
      io_uring_prep_read(entry, descriptor_, work.memory, bytes, work.offset);
    }
    entry->user_data = slot;
  }

  void reap() {
    io_uring_cqe* entry = nullptr;
    while (io_uring_peek_cqe(&ring_, &entry) == 0) {
      const std::uint64_t tag = entry->user_data;
      const int result = entry->res;
      io_uring_cqe_seen(&ring_, entry);
      if (tag == kWoken) {
        eventfd_t ignored = 0;
        ::eventfd_read(eventfd_, &ignored);
        listening_ = false;
      } else if (queue_.finish(works_[tag], result) ||
                 (refused_ != 0 && queue_.finish(works_[tag], -refused_))) {
        free_.push_back(tag);
      } else {
        prepare(tag);
      }
    }
  }

  // The kernel refuses the ring: what it has taken it finishes, all else fails here.
  void fail_all(int error) {
    refused_ = error;
    for (;;) {
      for (const std::uint64_t tag : prepared_) {
        if (tag == kWoken) continue;
        queue_.finish(works_[tag], -error);
        free_.push_back(tag);
      }
      prepared_.clear();
      if (free_.size() == works_.size()) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      reap();
    }
    BlockWork work;
    while (queue_.take_or_wait(work)) queue_.finish(work, -error);
  }

  BlockQueue& queue_;
  const int descriptor_;
  int eventfd_ = -1;
  io_uring ring_{};
  bool ring_made_ = false;
  bool listening_ = false;
  int refused_ = 0;                     // an errno, once the kernel refuses the ring
  std::vector<BlockWork> works_;        // by slot
  std::vector<std::size_t> free_;       // slots
  std::deque<std::uint64_t> prepared_;  // tags of entries that the kernel has not taken yet
  std::thread thread_;
};

}  // namespace

std::unique_ptr<BlockBackend> make_block_uring(BlockQueue& queue, int descriptor, int depth,
                                               std::string& reason) {
  auto backend = std::make_unique<BlockUring>(queue, descriptor, depth);
  const int error = backend->open();
  if (error == 0) return backend;
  const bool forbidden = error == EPERM || error == EACCES || error == ENOSYS;
  reason =
      fmt::format("{}{}", std::system_category().message(error),
                  forbidden ? " (Linux 5.6 or newer has it; /proc/sys/kernel/io_uring_disabled "
                              "or a container's seccomp profile can forbid it)"
                            : "");
  return nullptr;
}

}  // namespace sherd
