// SPDX-License-Identifier: Apache-2.0
// Reading a checkpoint: any part of any tensor, whoever wrote it.
#pragma once

#include <sherd/comm/checkpoint/index.h>
#include <sherd/runtime/tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sherd {

class SHERD_API CheckpointReader {
 public:
  // Reads the index; throws unless it is valid and every file is there with its size.
  explicit CheckpointReader(std::string directory);
  ~CheckpointReader();

  const std::string& directory() const { return directory_; }
  const CheckpointIndex& index() const { return index_; }
  // The text of config.toml, compared with its checksum; empty where there is none.
  std::string config() const;

  // Elements from `first` on into contiguous floating elements of any such type. What is read is
  // compared with its checksums, in blocks: no more than one is in memory.
  void read(const CheckpointTensor& tensor, std::int64_t first, const Tensor& elements) const;
  // The same as bytes of the tensor's own type.
  void read_bytes(const CheckpointTensor& tensor, std::int64_t first,
                  std::span<std::uint8_t> bytes) const;
  // Compares everything with its checksum. progress(bytes done, of all) is called now and then.
  void verify(const std::function<void(std::uint64_t, std::uint64_t)>& progress = {}) const;

  std::uint64_t bytes_read() const { return bytes_read_; }  // of files, since it was made

 private:
  // Block by block: puts bytes into `memory`, where it is given, which has room for all; else calls
  // use(offset among the bytes asked for, bytes) with those of a buffer.
  using Use = std::function<void(std::uint64_t, std::span<const std::uint8_t>)>;
  void read_blocks(const CheckpointTensor& tensor, std::int64_t first, std::int64_t numel,
                   std::uint8_t* memory, const Use& use) const;
  std::uint64_t read_and_sum(std::size_t file, std::uint64_t offset,
                             std::span<std::uint8_t> bytes) const;
  void read_at(std::size_t file, std::uint64_t offset, std::span<std::uint8_t> bytes) const;
  std::string path_of(std::size_t file) const;

  std::string directory_;
  CheckpointIndex index_;
  mutable std::size_t open_file_ = 0;  // one at a time: there may be more than a process may open
  mutable int descriptor_ = -1;
  mutable std::vector<std::uint8_t> block_;
  mutable std::uint64_t bytes_read_ = 0;
};

}  // namespace sherd
