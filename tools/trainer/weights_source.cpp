// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/weights_source.h>

#include <sherd/comm/checkpoint/store.h>
#include <sherd/comm/checkpoint/tensor_file.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/split_file.h>
#include <sherd/runtime/io/torch_distributed.h>
#include <sherd/runtime/io/torch_zero.h>

#include <filesystem>

namespace sherd {
namespace {

namespace fs = std::filesystem;

bool has_checkpoint(const fs::path& directory) {
  std::error_code error;
  return fs::exists(directory / "index.json", error) ||
         !find_checkpoints(directory.string()).empty() ||
         !find_checkpoints((directory / "checkpoints").string()).empty();
}

}  // namespace

std::unique_ptr<TensorFile> open_weights(const std::string& path) {
  std::error_code error;
  const fs::path directory(path);
  if (!fs::is_directory(directory, error)) return open_tensor_file(path);
  if (has_checkpoint(directory)) {
    return std::make_unique<CheckpointTensorFile>(resolve_checkpoint(path));
  }
  if (const std::string index = find_split_index(path); !index.empty()) {
    return open_split_file(index);
  }
  if (is_torch_distributed(path)) return open_torch_distributed(path);
  if (const std::string zero = find_torch_zero(path); !zero.empty()) return open_torch_zero(zero);
  for (const char* name : {"model.safetensors", "pytorch_model.bin"}) {
    if (fs::exists(directory / name, error)) return open_tensor_file((directory / name).string());
  }
  fail(
      "'{}' is a directory without weights: expected a sharded checkpoint or a run with one "
      "(index.json), split files (model.safetensors.index.json), one of "
      "torch.distributed.checkpoint "
      "(.metadata) or of DeepSpeed (latest, *_optim_states.pt), or model.safetensors",
      path);
}

}  // namespace sherd
