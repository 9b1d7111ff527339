// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/checkpoint/index.h>
#include <sherd/runtime/io/split_file.h>
#include <sherd/runtime/io/torch_distributed.h>
#include <stdlib.h>

#include <fstream>
#include <string>

#include "targets.h"

namespace sherd::fuzz {

// Once as it is, and once with its checksum put right, which no fuzzer would find.
void checkpoint_index(const std::uint8_t* data, std::size_t size) {
  std::string text(reinterpret_cast<const char*>(data), size);
  expect_errors_only([&] { (void)parse_checkpoint_index(text, "fuzz"); });
  constexpr std::string_view kHead = "{\"xxh3\":\"";
  constexpr std::size_t kDigits = 16;
  if (!text.starts_with(kHead) || text.size() < kHead.size() + kDigits) return;
  text.replace(kHead.size(), kDigits, kDigits, '0');
  const auto sum =
      checkpoint_checksum({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
  text.replace(kHead.size(), kDigits, fmt::format("{:016x}", sum));
  expect_errors_only([&] {
    const CheckpointIndex index = parse_checkpoint_index(text, "fuzz");
    // What was read can be written, and is then read as the same.
    const std::string again = to_json(index);
    if (to_json(parse_checkpoint_index(again, "again")) != again) std::abort();
    for (const CheckpointTensor& tensor : index.tensors) {
      if (index.find(tensor.parameter, tensor.state) != &tensor) std::abort();
    }
  });
}

void split_index(const std::uint8_t* data, std::size_t size) {
  expect_errors_only([&] {
    const SplitIndex index =
        parse_split_index({reinterpret_cast<const char*>(data), size}, "fuzz.index.json");
    const SplitIndex again = parse_split_index(to_json(index), "again");
    if (again.files != index.files || again.total_size != index.total_size) std::abort();
  });
}

// A directory's .metadata, without the files that it speaks of.
void torch_distributed(const std::uint8_t* data, std::size_t size) {
  static const std::string directory = [] {
    std::string pattern = "/tmp/sherd-fuzz-XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) std::abort();
    static const std::string remembered = pattern;
    std::atexit([] {
      std::remove((remembered + "/.metadata").c_str());
      std::remove(remembered.c_str());
    });
    return pattern;
  }();
  std::ofstream(directory + "/.metadata", std::ios::binary)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  expect_errors_only([&] { (void)open_torch_distributed(directory); });
}

}  // namespace sherd::fuzz
