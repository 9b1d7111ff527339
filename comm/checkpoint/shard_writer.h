// SPDX-License-Identifier: Apache-2.0
// What one rank writes of a checkpoint: a safetensors file of its pieces.
#pragma once

#include <sherd/comm/checkpoint/index.h>
#include <sherd/runtime/io/safetensors.h>

#include <map>
#include <string>
#include <vector>

namespace sherd {

// A piece to be written, of a tensor with this whole shape.
struct CheckpointItem {
  std::string parameter, state;
  DType dtype = DType::f32;
  Shape shape;
  std::int64_t first = 0, numel = 0;  // numel 0: of a tensor without elements

  std::size_t bytes() const { return static_cast<std::size_t>(numel) * size_of(dtype); }
};

class SHERD_API CheckpointShardWriter {
 public:
  // Creates the file in a checkpoint's directory.
  CheckpointShardWriter(const std::string& directory, int rank, int ranks,
                        std::vector<CheckpointItem> items,
                        const std::map<std::string, std::string>& metadata);

  // All bytes of one item.
  void write(std::size_t item, std::span<const std::uint8_t> bytes);
  // After all: the file is on the disk. Returns what the index has to say of it.
  std::string commit();

 private:
  std::vector<CheckpointItem> items_;
  std::vector<CheckpointTensor> tensors_;  // of items_
  CheckpointFile file_;
  SafetensorsWriter writer_;
};

}  // namespace sherd
