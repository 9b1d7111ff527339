// SPDX-License-Identifier: Apache-2.0
// Element types of PyTorch, and the names that its pickles use.
#pragma once

#include <sherd/runtime/dtype.h>

#include <optional>
#include <span>
#include <string_view>

namespace sherd {

struct TorchType {
  std::string_view name;       // "float32"; in a pickle "torch.float32"
  std::string_view storage;    // "torch.FloatStorage"; empty: saved with an untyped storage
  std::uint64_t bytes = 0;     // of an element
  std::optional<DType> dtype;  // none: Sherd has no such type
};

// nullptr if there is none.
const TorchType* torch_type_of_storage(std::string_view global);
const TorchType* torch_type_of_dtype(std::string_view global);

constexpr std::string_view kUntypedStorage = "torch.storage.UntypedStorage";

// For PickleNames.
std::span<const std::string_view> torch_callables();
std::span<const std::string_view> torch_constants();

}  // namespace sherd
