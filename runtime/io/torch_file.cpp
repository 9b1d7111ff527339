// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/io/quote.h>
#include <sherd/runtime/io/torch_file.h>
#include <sherd/runtime/io/torch_legacy.h>
#include <sherd/runtime/io/torch_listing.h>
#include <sherd/runtime/io/torch_types.h>
#include <sherd/runtime/io/zip.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace sherd {
namespace {

constexpr std::string_view kPickle = "data.pkl";
constexpr std::string_view kAdvice =
    "only tensors and plain containers are read. Save model.state_dict() with torch.save, or as "
    "safetensors, instead";

// Where data.pkl lies: in the archive's one folder.
std::string find_folder(const ZipArchive& zip) {
  for (const ZipEntry& entry : zip.entries()) {
    if (!entry.name.ends_with(kPickle)) continue;
    const std::string_view folder = entry.name.substr(0, entry.name.size() - kPickle.size());
    const bool one = std::ranges::count(folder, '/') == 1 && folder.ends_with('/');
    if (!folder.empty() && !one) continue;
    SHERD_CHECK(zip.find(std::string(folder) + "constants.pkl") == nullptr,
                "'{}' is a TorchScript archive, a program with weights inside: load it with "
                "torch.jit.load and save its state_dict() with torch.save",
                zip.path());
    return std::string(folder);
  }
  fail("'{}' is a zip archive, but not one of torch.save: it has no entry NAME/data.pkl",
       zip.path());
}

std::string plain_text(const PickleValue& value) {
  constexpr std::size_t kLongest = 200;
  if (std::holds_alternative<PickleNone>(value)) return "None";
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "True" : "False";
  if (const auto* number = std::get_if<std::int64_t>(&value)) return fmt::format("{}", *number);
  if (const auto* real = std::get_if<double>(&value)) return fmt::format("{}", *real);
  const auto* text = std::get_if<std::string_view>(&value);
  return text != nullptr && text->size() <= kLongest ? quote(*text) : "";
}

}  // namespace

TorchArchive::TorchArchive(std::span<const std::uint8_t> file, const std::string& path,
                           std::span<const std::string_view> classes) {
  const auto known = torch_callables();
  std::vector<std::string_view> callable(known.begin(), known.end());
  callable.insert(callable.end(), classes.begin(), classes.end());
  const PickleNames names{
      .callable = callable, .constant = torch_constants(), .objects = classes, .advice = kAdvice};
  if (is_legacy_torch_file(file)) {
    read_legacy(file, path, names);
  } else {
    read_zip(file, path, names);
  }
}

void TorchArchive::read_zip(std::span<const std::uint8_t> file, const std::string& path,
                            const PickleNames& names) {
  const ZipArchive zip(file, path);
  const std::string folder = find_folder(zip);
  if (const ZipEntry* byteorder = zip.find(folder + "byteorder")) {
    constexpr std::uint64_t kLongestOrder = 64;
    const auto order = zip.read(*byteorder, kLongestOrder, inflated_);
    const std::string_view text(reinterpret_cast<const char*>(order.data()), order.size());
    SHERD_CHECK(text == "little",
                "'{}': its bytes are in the order {}, expected 'little'; save it again on a "
                "little-endian machine",
                path, quote(text));
  }
  const ZipEntry& entry = *zip.find(folder + std::string(kPickle));
  // PyTorch compresses nothing. What another program packed is read as long as it is not large: a
  // small file must not cost much memory.
  constexpr std::uint64_t kMaxInflated = std::uint64_t{4} << 20;
  const auto pickle = zip.read(entry, entry.deflated ? kMaxInflated : kMaxPickle, inflated_);
  tree_ = read_pickle(pickle, path, names);
  SHERD_CHECK(tree_.used == pickle.size(), "'{}': {} bytes follow its pickle's end", path,
              pickle.size() - tree_.used);
  TorchListing listing(path, tree_, [&](std::string_view key) -> FoundStorage {
    const ZipEntry* storage = zip.find(folder + "data/" + std::string(key));
    return storage == nullptr ? FoundStorage{} : zip.stored(*storage);
  });
  tensors_ = listing.tensors();
  state_dict_ = listing.state_dict();
}

void TorchArchive::read_legacy(std::span<const std::uint8_t> file, const std::string& path,
                               const PickleNames& names) {
  LegacyTorchFile parts = read_legacy_torch_file(file, path, names);
  tree_ = std::move(parts.tree);
  TorchListing listing(path, tree_, [&](std::string_view key) -> FoundStorage {
    const auto found = parts.storages.find(key);
    return found == parts.storages.end() ? FoundStorage{} : found->second;
  });
  tensors_ = listing.tensors();
  state_dict_ = listing.state_dict();
}

std::map<std::string, std::string> TorchArchive::plain_values() const {
  constexpr std::size_t kMost = 100;
  std::map<std::string, std::string> found;
  const auto* dict = tree_.get<PickleDict>(tree_.root);
  if (dict == nullptr) return found;
  for (const auto& [key, value] : dict->items) {
    const auto* name = tree_.get<std::string_view>(key);
    const std::string text = plain_text(tree_[value]);
    if (name == nullptr || text.empty() || found.size() == kMost) continue;
    const std::string quoted = quote(*name);
    found[quoted.substr(1, quoted.size() - 2)] = text;
  }
  return found;
}

bool TorchTensor::contiguous() const {
  if (numel == 0) return true;
  std::int64_t expected = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];  // at most numel, which fits
  }
  return true;
}

void copy_elements(const TorchTensor& tensor, std::uint64_t first, std::uint64_t count,
                   std::uint8_t* to) {
  if (count == 0) return;
  const std::uint64_t width = tensor.width;
  const std::size_t rank = tensor.shape.size();
  std::vector<std::uint64_t> index(rank);
  std::uint64_t from = tensor.offset;  // of the element at `index`
  for (std::size_t i = rank; i-- > 0;) {
    const auto size = static_cast<std::uint64_t>(tensor.shape[i]);
    index[i] = first % size;
    first /= size;
    from += index[i] * static_cast<std::uint64_t>(tensor.strides[i]);
  }
  for (;;) {
    // A run along the last dimension.
    const std::uint64_t row = rank == 0 ? 1 : static_cast<std::uint64_t>(tensor.shape[rank - 1]);
    const std::uint64_t step = rank == 0 ? 1 : static_cast<std::uint64_t>(tensor.strides[rank - 1]);
    const std::uint64_t run = std::min(count, row - (rank == 0 ? 0 : index[rank - 1]));
    const std::uint8_t* source = tensor.storage.data() + from * width;
    if (step == 1) {
      std::memcpy(to, source, run * width);
    } else {
      for (std::uint64_t i = 0; i < run; ++i) {
        std::memcpy(to + i * width, source + i * step * width, width);
      }
    }
    to += run * width;
    count -= run;
    if (count == 0) return;
    from -= index[rank - 1] * step;
    index[rank - 1] = 0;
    for (std::size_t i = rank - 1; i-- > 0;) {
      const auto stride = static_cast<std::uint64_t>(tensor.strides[i]);
      from += stride;
      if (++index[i] < static_cast<std::uint64_t>(tensor.shape[i])) break;
      from -= index[i] * stride;
      index[i] = 0;
    }
  }
}

bool is_torch_file(std::span<const std::uint8_t> file, const std::string& path) {
  if (is_zip(file) || is_legacy_torch_file(file)) return true;
  constexpr std::string_view kTar = "ustar";
  constexpr std::size_t kTarAt = 257;
  SHERD_CHECK(
      file.size() < kTarAt + kTar.size() ||
          std::memcmp(file.data() + kTarAt, kTar.data(), kTar.size()) != 0,
      "'{}' is a tar archive; if it comes from PyTorch, load it with torch.load and save its "
      "state_dict() again with PyTorch 1.6 or later",
      path);
  SHERD_CHECK(file.size() < 2 || file[0] != 0x80 || file[1] < 2 || file[1] > 5,
              "'{}' is a bare pickle, expected a file of torch.save or safetensors", path);
  return false;
}

namespace {

class TorchTensorFile : public TensorFile {
 public:
  explicit TorchTensorFile(const std::string& path) : file_(path), archive_(file_.bytes(), path) {
    path_ = path;
    format_ = "PyTorch";
    for (const TorchTensor& tensor : archive_.tensors()) {
      const std::string_view type = tensor.dtype ? name_of(*tensor.dtype) : tensor.type;
      entries_.push_back({tensor.name, std::string(type), tensor.dtype, tensor.shape,
                          static_cast<std::int64_t>(tensor.numel), tensor.numel * tensor.width});
    }
    metadata_ = archive_.plain_values();
    prefix_ = archive_.state_dict();
    index_entries();
  }

 protected:
  std::span<const std::uint8_t> read_elements(std::size_t index, std::uint64_t first,
                                              std::uint64_t count,
                                              std::vector<std::uint8_t>& room) const override {
    const TorchTensor& tensor = archive_.tensors()[index];
    if (count == 0) return {};
    if (tensor.contiguous()) {
      return tensor.storage.subspan((tensor.offset + first) * tensor.width, count * tensor.width);
    }
    room.resize(count * tensor.width);
    copy_elements(tensor, first, count, room.data());
    return room;
  }

 private:
  MappedFile file_;
  TorchArchive archive_;
};

}  // namespace

std::unique_ptr<TensorFile> open_torch_file(const std::string& path) {
  return std::make_unique<TorchTensorFile>(path);
}

}  // namespace sherd
