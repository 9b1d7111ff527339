// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/data/idx.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "targets.h"

namespace sherd::fuzz {
namespace {

// Bytes under a path, in memory.
class MemoryFile {
 public:
  MemoryFile(const std::uint8_t* data, std::size_t size) : descriptor_(::memfd_create("idx", 0)) {
    if (descriptor_ < 0 || ::write(descriptor_, data, size) != static_cast<ssize_t>(size)) {
      std::abort();
    }
  }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

}  // namespace

// The first two bytes: how many of the rest are the images' file; then comes that of the labels.
void idx(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return;
  const std::size_t images = std::min<std::size_t>(data[0] | data[1] << 8, size - 2);
  const MemoryFile image_file(data + 2, images);
  const MemoryFile label_file(data + 2 + images, size - 2 - images);
  expect_errors_only([&] {
    const auto dataset = load_idx_dataset(image_file.path(), label_file.path());
    std::vector<std::uint8_t> pixels(static_cast<std::size_t>(dataset->pixels()));
    for (const std::int64_t i : {std::int64_t{0}, dataset->size() - 1}) {
      dataset->get(i, pixels.data());
      if (dataset->label(i) >= dataset->classes()) std::abort();
    }
  });
}

}  // namespace sherd::fuzz
