// SPDX-License-Identifier: Apache-2.0
// The fuzzers' targets over the files that are kept for them: what once went wrong stays right.
#include <doctest/doctest.h>
#include <sherd/runtime/io/file.h>

#include <filesystem>

#include "../fuzz/targets.h"

namespace fs = std::filesystem;

TEST_CASE("fuzz: every target over its corpus") {
  using Target = void (*)(const std::uint8_t*, std::size_t);
  const std::pair<const char*, Target> targets[]{
      {"torch_file", sherd::fuzz::torch_file},
      {"torch_pickle", sherd::fuzz::torch_pickle},
      {"safetensors", sherd::fuzz::safetensors},
      {"idx", sherd::fuzz::idx},
      {"checkpoint_index", sherd::fuzz::checkpoint_index},
      {"split_index", sherd::fuzz::split_index},
      {"torch_distributed", sherd::fuzz::torch_distributed},
      {"torch_zero", sherd::fuzz::torch_zero}};
  for (const auto& [name, target] : targets) {
    int files = 0;
    for (const auto& entry :
         fs::directory_iterator(fs::path(SHERD_TEST_DATA) / "fuzz/corpus" / name)) {
      CAPTURE(entry.path().string());
      const auto bytes = sherd::read_file(entry.path().string());
      CHECK_NOTHROW(target(bytes.data(), bytes.size()));
      // Every cut of a file is a file too.
      for (std::size_t size = 0; size < bytes.size(); size += 1 + bytes.size() / 64) {
        CHECK_NOTHROW(target(bytes.data(), size));
      }
      ++files;
    }
    CHECK(files > 0);
  }
}
