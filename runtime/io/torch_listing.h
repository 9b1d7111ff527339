// SPDX-License-Identifier: Apache-2.0
// Finds the tensors in the tree of a PyTorch pickle and checks each against its storage. Part of
// torch_file.cpp.
#pragma once

#include <sherd/runtime/io/torch_file.h>

namespace sherd {

class TorchListing {
 public:
  TorchListing(const ZipArchive& zip, const std::string& folder, const PickleTree& tree)
      : zip_(zip), folder_(folder), tree_(tree) {}

  // See TorchArchive. `pickle_size` bounds the work: values that share can spell out more tensors
  // than any memory holds.
  std::vector<TorchTensor> tensors(std::size_t pickle_size);
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

  const ZipArchive& zip_;
  const std::string& folder_;
  const PickleTree& tree_;
  std::size_t budget_ = 0, spent_ = 0;
  std::string name_;  // of the value at hand
  std::vector<TorchTensor> tensors_;
};

}  // namespace sherd
