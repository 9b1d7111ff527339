// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/io/quote.h>
#include <sherd/runtime/io/safetensors.h>
#include <sherd/runtime/io/split_file.h>
#include <sherd/runtime/io/tensor_file.h>
#include <sherd/runtime/io/torch_file.h>

namespace sherd {

const TensorEntry* TensorFile::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &entries_[found->second];
}

void TensorFile::index_entries() {
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    SHERD_CHECK(index_.emplace(entries_[i].name, i).second,
                "'{}': two of its tensors are called {}", path_, quote(entries_[i].name));
  }
}

std::span<const std::uint8_t> TensorFile::read(const TensorEntry& entry, std::int64_t first,
                                               std::int64_t count,
                                               std::vector<std::uint8_t>& room) const {
  const auto found = index_.find(entry.name);
  SHERD_CHECK(found != index_.end(), "'{}': {} is not one of its tensors", path_,
              quote(entry.name));
  const TensorEntry& own = entries_[found->second];
  SHERD_CHECK(own.dtype.has_value(), "'{}': tensor {} has elements of type {}, which Sherd has not",
              path_, quote(own.name), own.type);
  SHERD_CHECK(first >= 0 && count >= 0 && first <= own.numel && count <= own.numel - first,
              "'{}': elements {} to {} of tensor {}, which has {}", path_, first, first + count,
              quote(own.name), own.numel);
  return read_elements(found->second, static_cast<std::uint64_t>(first),
                       static_cast<std::uint64_t>(count), room);
}

namespace {

class SafetensorsTensorFile : public TensorFile {
 public:
  explicit SafetensorsTensorFile(const std::string& path) : file_(SafetensorsFile::open(path)) {
    path_ = path;
    format_ = "safetensors";
    for (const SafetensorsEntry& entry : file_.entries()) {
      const auto dims = entry.shape.dims();
      entries_.push_back({entry.name,
                          std::string(name_of(entry.dtype)),
                          entry.dtype,
                          {dims.begin(), dims.end()},
                          entry.shape.numel(),
                          entry.size});
    }
    metadata_ = file_.metadata();
    index_entries();
  }

 protected:
  std::span<const std::uint8_t> read_elements(std::size_t index, std::uint64_t first,
                                              std::uint64_t count,
                                              std::vector<std::uint8_t>&) const override {
    const SafetensorsEntry& entry = file_.entries()[index];
    const std::uint64_t width = size_of(entry.dtype);
    return file_.bytes(entry).subspan(first * width, count * width);
  }

 private:
  SafetensorsFile file_;
};

}  // namespace

std::unique_ptr<TensorFile> open_single_tensor_file(const std::string& path) {
  const MappedFile file(path);
  // The ninth byte: a safetensors header's brace, whatever its length looks like.
  constexpr std::size_t kBrace = 8;
  const auto bytes = file.bytes();
  const bool brace = bytes.size() > kBrace && bytes[kBrace] == '{';
  if (!brace && is_torch_file(bytes, path)) return open_torch_file(path);
  return std::make_unique<SafetensorsTensorFile>(path);
}

std::unique_ptr<TensorFile> open_tensor_file(const std::string& path) {
  const MappedFile file(path);
  // JSON, or the length of a safetensors header? No header is so long that its highest byte says
  // anything.
  constexpr std::size_t kHighest = 7;
  const auto bytes = file.bytes();
  const bool json = bytes.size() > kHighest && bytes[0] == '{' && bytes[kHighest] != 0;
  return json ? open_split_file(path) : open_single_tensor_file(path);
}

}  // namespace sherd
