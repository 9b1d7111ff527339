// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/checkpoint/shard_writer.h>

#include <sherd/comm/checkpoint/block_checksum.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <filesystem>

namespace sherd {
namespace {

CheckpointTensor tensor_of(const CheckpointItem& item) {
  return {item.parameter, item.state, item.dtype, item.shape, {}};
}

// Whole tensors keep their shape, so that the file of a single rank is an ordinary one.
std::vector<SafetensorsWriter::Item> announced(const std::vector<CheckpointItem>& items) {
  std::vector<SafetensorsWriter::Item> all;
  for (const CheckpointItem& item : items) {
    const bool whole = item.numel == item.shape.numel();
    all.push_back({tensor_of(item).key(), item.dtype, whole ? item.shape : Shape{item.numel}});
  }
  return all;
}

}  // namespace

CheckpointShardWriter::CheckpointShardWriter(const std::string& directory, int rank, int ranks,
                                             std::vector<CheckpointItem> items,
                                             const std::map<std::string, std::string>& metadata)
    : items_(std::move(items)),
      file_{fmt::format("rank-{:05}-of-{:05}.safetensors", rank, ranks), 0, 0, 0},
      writer_((std::filesystem::path(directory) / file_.name).string(), announced(items_), metadata,
              AtomicFile::Appears::within_directory) {
  file_.bytes = writer_.file_bytes();
  file_.header_bytes = writer_.header().size();
  file_.header_checksum = checkpoint_checksum(writer_.header());
  for (const CheckpointItem& item : items_) {
    CheckpointTensor& tensor = tensors_.emplace_back(tensor_of(item));
    if (item.numel == 0) continue;
    tensor.pieces.push_back({0, item.first, item.numel, writer_.offset(tensor.key()), {}});
  }
}

void CheckpointShardWriter::write(std::size_t item, std::span<const std::uint8_t> bytes) {
  SHERD_INTERNAL_CHECK(bytes.size() == items_.at(item).bytes(), "{} bytes of {}, expected {}",
                       bytes.size(), tensors_[item].key(), items_[item].bytes());
  const std::string key = tensors_[item].key();
  BlockChecksum checksum;
  while (!bytes.empty()) {
    const auto part = bytes.first(std::min(bytes.size(), BlockChecksum::kPart));
    checksum.add(part);
    writer_.write(key, part);
    bytes = bytes.subspan(part.size());
    if (checksum.bytes() == CheckpointIndex::kBlock || bytes.empty()) {
      tensors_[item].pieces.front().checksums.push_back(checksum.take());
    }
  }
}

std::string CheckpointShardWriter::commit() {
  writer_.commit();
  return to_json(file_, tensors_);
}

}  // namespace sherd
