// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/io/torch_file.h>
#include <sherd/runtime/io/zip.h>

#include <algorithm>

#include "../unit/zip_support.h"
#include "targets.h"

namespace sherd::fuzz {
namespace {

void read_all(std::span<const std::uint8_t> file) {
  const TorchArchive archive(file, "fuzz.pt");
  (void)archive.plain_values();
  for (const TorchTensor& tensor : archive.tensors()) {
    constexpr std::uint64_t kMost = 4096;  // elements at either end
    const std::uint64_t count = std::min(tensor.numel, kMost);
    std::vector<std::uint8_t> room(count * tensor.width);
    copy_elements(tensor, 0, count, room.data());
    copy_elements(tensor, tensor.numel - count, count, room.data());
    if (tensor.numel > 0 && tensor.contiguous()) {  // where a reader takes them in place
      const auto whole =
          tensor.storage.subspan(tensor.offset * tensor.width, tensor.numel * tensor.width);
      if (whole.back() == whole.front()) (void)archive.state_dict();
    }
  }
}

}  // namespace

void torch_file(const std::uint8_t* data, std::size_t size) {
  expect_errors_only([&] { (void)is_torch_file({data, size}, "fuzz.pt"); });
  expect_errors_only([&] { read_all({data, size}); });
  // Entries that are no part of a checkpoint too.
  expect_errors_only([&] {
    const ZipArchive archive({data, size}, "fuzz.zip");
    std::vector<std::uint8_t> room;
    for (const ZipEntry& entry : archive.entries()) {
      expect_errors_only([&] { (void)archive.read(entry, std::uint64_t{1} << 20, room); });
    }
  });
}

void torch_pickle(const std::uint8_t* data, std::size_t size) {
  std::vector<std::uint8_t> storage(64);
  for (std::size_t i = 0; i < storage.size(); ++i) storage[i] = static_cast<std::uint8_t>(i);
  const auto file = test::make_torch_zip({data, data + size}, {{"0", storage}, {"1", storage}});
  expect_errors_only([&] { read_all(file); });
}

}  // namespace sherd::fuzz
