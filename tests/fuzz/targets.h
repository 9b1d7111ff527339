// SPDX-License-Identifier: Apache-2.0
// What fuzzers feed: each reads one file's bytes as its reader would, and all of the result. A
// sherd::Error is a good answer; anything else that is thrown or crashes is a bug.
#pragma once

#include <sherd/runtime/error.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace sherd::fuzz {

void torch_file(const std::uint8_t* data, std::size_t size);    // a zip archive of torch.save
void torch_pickle(const std::uint8_t* data, std::size_t size);  // its pickle, in a sound archive
void safetensors(const std::uint8_t* data, std::size_t size);
void idx(const std::uint8_t* data, std::size_t size);
void checkpoint_index(const std::uint8_t* data, std::size_t size);   // of a sharded checkpoint
void split_index(const std::uint8_t* data, std::size_t size);        // model.safetensors.index.json
void torch_distributed(const std::uint8_t* data, std::size_t size);  // .metadata of PyTorch's DCP
void torch_zero(const std::uint8_t* data, std::size_t size);         // of DeepSpeed's ZeRO

template <typename Action>
void expect_errors_only(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    if (std::string_view(error.what()).starts_with("internal error at ")) {
      std::fprintf(stderr, "%s\n", error.what());
      std::abort();
    }
  }
}

}  // namespace sherd::fuzz
