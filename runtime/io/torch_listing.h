// SPDX-License-Identifier: Apache-2.0
// Finds the tensors in the tree of a PyTorch pickle and checks each against its storage. Part of
// torch_file.cpp.
#pragma once

#include <sherd/runtime/io/torch_file.h>

#include <functional>
#include <optional>

namespace sherd {

// The bytes of the storage with this key; none if there is no such storage.
using FoundStorage = std::optional<std::span<const std::uint8_t>>;
using FindStorage = std::function<FoundStorage(std::string_view key)>;

class TorchListing {
 public:
  TorchListing(const std::string& path, const PickleTree& tree, FindStorage find_storage)
      : path_(path), tree_(tree), find_storage_(std::move(find_storage)) {}

  // See TorchArchive. The pickle's size bounds the work: values that share can spell out more
  // tensors than any memory holds.
  std::vector<TorchTensor> tensors();
  std::string state_dict() const;

 private:
  template <typename... Args>
  void check(bool condition, fmt::format_string<Args...> format, Args&&... args) const;
  bool is_tensor(PickleId id) const;
  void spend(std::size_t cost);
  void walk(PickleId id, int depth);
  void walk_child(PickleId child, const std::string& key, int depth);
  void walk_dict(const PickleDict& dict, int depth);
  void add_tensor(PickleId id);
  std::vector<std::int64_t> numbers(PickleId id, const char* what) const;
  std::int64_t number(PickleId id, const char* what) const;
  void read_storage(PickleId id, std::string_view dtype, TorchTensor& tensor) const;
  void check_extent(TorchTensor& tensor) const;

  const std::string& path_;
  const PickleTree& tree_;
  const FindStorage find_storage_;
  std::size_t budget_ = 0, spent_ = 0;
  std::string name_;  // of the value at hand
  std::vector<TorchTensor> tensors_;
};

}  // namespace sherd
