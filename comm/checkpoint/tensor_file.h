// SPDX-License-Identifier: Apache-2.0
// A checkpoint seen as one file of named tensors, for what reads weights from any format:
// parameters by their names, the optimizer's state as optimizer.NAME.STATE.
#pragma once

#include <sherd/comm/checkpoint/reader.h>
#include <sherd/runtime/io/tensor_file.h>

#include <memory>
#include <string>

namespace sherd {

class SHERD_API CheckpointTensorFile : public TensorFile {
 public:
  // As CheckpointReader. What is read is compared with its checksums.
  explicit CheckpointTensorFile(const std::string& directory);

  const CheckpointReader& checkpoint() const { return reader_; }

 protected:
  std::span<const std::uint8_t> read_elements(std::size_t index, std::uint64_t first,
                                              std::uint64_t count,
                                              std::vector<std::uint8_t>& room) const override;

 private:
  CheckpointReader reader_;
};

}  // namespace sherd
