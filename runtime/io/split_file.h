// SPDX-License-Identifier: Apache-2.0
// Weights split into several files beside a JSON index, as model hubs keep large models:
// model-00001-of-00002.safetensors, ..., model.safetensors.index.json (or pytorch_model*.bin and
// its index). The index has "weight_map", tensor's name -> file's name, and "metadata", where
// "total_size" counts the bytes of all tensors.
//
// Nothing is trusted: a file must lie beside the index, and have exactly the tensors that the index
// says. Each failed check is an Error that names the file. A wrong total size is only reported,
// among TensorFile::metadata.
#pragma once

#include <sherd/runtime/io/tensor_file.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace sherd {

struct SplitIndex {
  std::optional<std::uint64_t> total_size;      // bytes of the tensors
  std::map<std::string, std::string> metadata;  // the texts beside it
  std::map<std::string, std::string> files;     // by the tensors' names
};

// `path` only serves messages.
SHERD_API SplitIndex parse_split_index(std::string_view text, const std::string& path);
SHERD_API std::string to_json(const SplitIndex& index);

// All of its tensors as those of one file, in the files' order; every file stays mapped.
SHERD_API std::unique_ptr<TensorFile> open_split_file(const std::string& index_path);
// A directory's index of a split file; empty where there is none.
SHERD_API std::string find_split_index(const std::string& directory);

}  // namespace sherd
