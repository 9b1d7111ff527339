// SPDX-License-Identifier: Apache-2.0
// In builds without liburing.
#include "block_file_queue.h"

namespace sherd {

std::unique_ptr<BlockBackend> make_block_uring(BlockQueue&, int, int, std::string& reason) {
  reason =
      "this Sherd was built without liburing (Debian: liburing-dev; build with -During=enabled)";
  return nullptr;
}

}  // namespace sherd
