// SPDX-License-Identifier: Apache-2.0
// Threads that each move one piece at a time with pread and pwrite.
#include "block_file_queue.h"

#include <sherd/runtime/error.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <thread>
#include <vector>

namespace sherd {
namespace {

class BlockThreads final : public BlockBackend {
 public:
  BlockThreads(BlockQueue& queue, int descriptor, int depth) {
    try {
      for (int i = 0; i < depth; ++i) {
        threads_.emplace_back([&queue, descriptor] { run(queue, descriptor); });
      }
    } catch (const std::system_error& error) {
      queue.close();
      join();
      fail("cannot start the {} threads that read and write a file: {}; take a lower queue depth",
           depth, error.what());
    }
  }
  ~BlockThreads() override { join(); }

 private:
  static void run(BlockQueue& queue, int descriptor) {
    BlockWork work;
    while (queue.take_or_wait(work)) {
      ssize_t moved = 0;
      do {
        const auto offset = static_cast<off_t>(work.offset);
        moved = work.write ? ::pwrite(descriptor, work.memory, work.bytes, offset)
                           : ::pread(descriptor, work.memory, work.bytes, offset);
      } while (!queue.finish(work, moved < 0 ? -errno : moved));
    }
  }
  void join() {
    for (std::thread& thread : threads_) thread.join();
  }

  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<BlockBackend> make_block_threads(BlockQueue& queue, int descriptor, int depth) {
  return std::make_unique<BlockThreads>(queue, descriptor, depth);
}

}  // namespace sherd
