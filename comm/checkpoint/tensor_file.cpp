// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/checkpoint/tensor_file.h>

#include <fmt/format.h>

namespace sherd {

CheckpointTensorFile::CheckpointTensorFile(const std::string& directory) : reader_(directory) {
  path_ = directory;
  format_ = "sharded checkpoint";
  for (const CheckpointTensor& tensor : reader_.index().tensors) {
    const auto dims = tensor.shape.dims();
    const std::int64_t numel = tensor.shape.numel();
    entries_.push_back({tensor.key(),
                        std::string(name_of(tensor.dtype)),
                        tensor.dtype,
                        {dims.begin(), dims.end()},
                        numel,
                        static_cast<std::uint64_t>(numel) * size_of(tensor.dtype)});
  }
  metadata_ = {{"producer", reader_.index().producer},
               {"step", fmt::format("{}", reader_.index().step)}};
  index_entries();
}

std::span<const std::uint8_t> CheckpointTensorFile::read_elements(
    std::size_t index, std::uint64_t first, std::uint64_t count,
    std::vector<std::uint8_t>& room) const {
  const CheckpointTensor& tensor = reader_.index().tensors[index];
  room.resize(count * size_of(tensor.dtype));
  reader_.read_bytes(tensor, static_cast<std::int64_t>(first), room);
  return room;
}

}  // namespace sherd
