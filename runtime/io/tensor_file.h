// SPDX-License-Identifier: Apache-2.0
// Named tensors in a file, whatever its format: safetensors, PyTorch's .pt, .pth and .bin (see
// torch_file.h), or the index of either split into several files (split_file.h), told apart by the
// file's first bytes.
//
//   const std::unique_ptr<TensorFile> file = open_tensor_file(path);
//   const TensorEntry* entry = file->find("cls_token");
//   std::vector<std::uint8_t> room;
//   const auto bytes = file->read(*entry, 0, entry->numel, room);
#pragma once

#include <sherd/runtime/api.h>
#include <sherd/runtime/dtype.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sherd {

struct TensorEntry {
  std::string name;
  std::string type;            // "f32"; what has no DType by the file's own name: "complex64"
  std::optional<DType> dtype;  // none: such elements cannot be read here
  std::vector<std::int64_t> dims;
  std::int64_t numel = 0;
  std::uint64_t bytes = 0;  // of its elements
};

class SHERD_API TensorFile {
 public:
  virtual ~TensorFile() = default;
  TensorFile() = default;
  TensorFile(const TensorFile&) = delete;
  TensorFile& operator=(const TensorFile&) = delete;

  const std::string& path() const { return path_; }
  std::string_view format() const { return format_; }
  const std::vector<TensorEntry>& entries() const { return entries_; }
  const TensorEntry* find(std::string_view name) const;  // nullptr if there is no such tensor
  // What the file says besides: safetensors' metadata, a checkpoint's plain values.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // With what the names of a model's weights begin: "model." in a checkpoint that keeps them under
  // "model", see TorchArchive::state_dict.
  const std::string& prefix() const { return prefix_; }

  // `count` elements of an entry of this file from the one with row-major index `first` on,
  // little-endian, at any address. The span points into the file where they lie there in that
  // order, else into `room`. Throws for elements that have no DType.
  std::span<const std::uint8_t> read(const TensorEntry& entry, std::int64_t first,
                                     std::int64_t count, std::vector<std::uint8_t>& room) const;

 protected:
  virtual std::span<const std::uint8_t> read_elements(std::size_t index, std::uint64_t first,
                                                      std::uint64_t count,
                                                      std::vector<std::uint8_t>& room) const = 0;
  void index_entries();  // once entries_ are complete

  std::string path_;
  std::string_view format_;
  std::vector<TensorEntry> entries_;
  std::map<std::string, std::string> metadata_;
  std::string prefix_;

 private:
  std::map<std::string_view, std::size_t> index_;
};

SHERD_API std::unique_ptr<TensorFile> open_tensor_file(const std::string& path);
// The same for a file that must have the tensors itself: no index.
SHERD_API std::unique_ptr<TensorFile> open_single_tensor_file(const std::string& path);

// Where files hold an optimizer's state beside weights it is called optimizer.NAME.STATE, NAME
// being that of the weight, and STATE "exp_avg" or such; this is the beginning.
constexpr std::string_view kOptimizerPrefix = "optimizer.";

}  // namespace sherd
