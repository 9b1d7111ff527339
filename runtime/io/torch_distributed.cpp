// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/io/quote.h>
#include <sherd/runtime/io/torch_distributed.h>
#include <sherd/runtime/io/torch_file.h>
#include <sherd/runtime/io/torch_types.h>
#include <sherd/runtime/io/unpickler.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <utility>

namespace sherd {
namespace {

namespace fs = std::filesystem;
using Indices = std::vector<std::int64_t>;

constexpr std::string_view kMetadata = ".metadata";
constexpr std::size_t kMostBoxes = 4096;  // of a tensor: they are compared pairwise

#define SHERD_DCP "torch.distributed.checkpoint.metadata."
constexpr auto kObjects = std::to_array<std::string_view>(
    {SHERD_DCP "Metadata", SHERD_DCP "MetadataIndex", SHERD_DCP "StorageMeta",
     SHERD_DCP "TensorStorageMetadata", SHERD_DCP "BytesStorageMetadata",
     SHERD_DCP "TensorProperties", SHERD_DCP "ChunkStorageMetadata",
     "torch.distributed.checkpoint.filesystem._StorageInfo"});
constexpr auto kCallables = std::to_array<std::string_view>(
    {SHERD_DCP "_MEM_FORMAT_ENCODING", "torch.serialization._get_layout", "torch.Size",
     "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.PurePosixPath",
     "pathlib._local.PosixPath", "pathlib._local.WindowsPath"});
constexpr std::string_view kAdvice =
    "only what torch.distributed.checkpoint.save itself writes is read";

struct Place {  // of a box, by .metadata
  std::string file;
  std::uint64_t offset = 0, bytes = 0;
  bool transformed = false;
};
struct Box {
  Indices offsets, sizes;
  Place place;
};
struct Described {
  std::string name;
  const TorchType* type = nullptr;
  Indices dims;
  std::vector<Box> boxes;
};

// Multiplies; none where it does not fit.
std::optional<std::int64_t> product(const Indices& sizes) {
  std::int64_t all = 1;
  for (const std::int64_t size : sizes) {
    if (__builtin_mul_overflow(all, size, &all)) return {};
  }
  return all;
}

// Reads the pickle's tree and says what is wrong with which.
class MetadataReader {
 public:
  MetadataReader(const PickleTree& tree, const std::string& path) : tree_(tree), path_(path) {}

  std::vector<Described> read() {
    const PickleDict& root = attributes(tree_.root, "Metadata", "its root");
    read_places(dict(root, "storage_data", "Metadata"));
    std::vector<Described> found;
    for (const auto& [key, value] : dict(root, "state_dict_metadata", "Metadata").items) {
      const auto* name = tree_.get<std::string_view>(key);
      check(name != nullptr, "a key of its tensors is {}, expected a text", kind_of(tree_[key]));
      const auto* call = tree_.get<PickleCall>(value);
      if (call != nullptr && tree_.global_name(call->callee) == SHERD_DCP "BytesStorageMetadata") {
        continue;  // no tensor
      }
      found.push_back(tensor(std::string(*name), value));
    }
    return found;
  }

 private:
  template <typename... Args>
  void check(bool good, fmt::format_string<Args...> format, Args&&... args) const {
    if (!good) fail("'{}': {}", path_, fmt::format(format, std::forward<Args>(args)...));
  }

  // Of an object of one of their classes.
  const PickleDict& attributes(PickleId id, std::string_view type, const std::string& what) const {
    const auto* call = tree_.get<PickleCall>(id);
    const std::string name = call != nullptr ? tree_.global_name(call->callee) : "";
    check(name.ends_with("." + std::string(type)), "{} is {}, expected a {}", what,
          name.empty() ? std::string(kind_of(tree_[id])) : quote(name), type);
    const auto* state = tree_.get<PickleDict>(call->state);
    check(state != nullptr, "{} has no attributes", what);
    return *state;
  }
  PickleId at(const PickleDict& object, std::string_view key, const std::string& what) const {
    const PickleId* id = tree_.find(object, key);
    check(id != nullptr, "{} has no '{}'", what, key);
    return *id;
  }
  const PickleDict& dict(const PickleDict& object, std::string_view key,
                         const std::string& what) const {
    const PickleId id = at(object, key, what);
    const auto* value = tree_.get<PickleDict>(id);
    check(value != nullptr, "'{}' of {} is {}, expected a dict", key, what, kind_of(tree_[id]));
    return *value;
  }
  std::int64_t count(const PickleDict& object, std::string_view key,
                     const std::string& what) const {
    const auto* value = tree_.get<std::int64_t>(at(object, key, what));
    check(value != nullptr && *value >= 0, "'{}' of {} is no whole number of 0 or more", key, what);
    return *value;
  }
  // torch.Size((2, 3))
  Indices size(PickleId id, std::string_view key, const std::string& what) const {
    const auto* call = tree_.get<PickleCall>(id);
    check(call != nullptr && tree_.global_name(call->callee) == "torch.Size",
          "'{}' of {} is {}, expected a torch.Size", key, what, kind_of(tree_[id]));
    const auto* arguments = tree_.get<PickleTuple>(call->arguments);
    const bool one = arguments != nullptr && arguments->items.size() == 1;
    const auto* tuple = one ? tree_.get<PickleTuple>(arguments->items[0]) : nullptr;
    constexpr std::size_t kMaxRank = 64;  // PyTorch's own limit
    check(tuple != nullptr && tuple->items.size() <= kMaxRank, "'{}' of {} is no size", key, what);
    Indices sizes;
    for (const PickleId item : tuple->items) {
      const auto* number = tree_.get<std::int64_t>(item);
      check(number != nullptr && *number >= 0, "'{}' of {} has something else than whole numbers",
            key, what);
      sizes.push_back(*number);
    }
    return sizes;
  }

  void read_places(const PickleDict& storage) {
    for (const auto& [key, value] : storage.items) {
      const PickleDict& index = attributes(key, "MetadataIndex", "a key of 'storage_data'");
      const auto* name = tree_.get<std::string_view>(at(index, "fqn", "a MetadataIndex"));
      check(name != nullptr, "a MetadataIndex has no text as its 'fqn'");
      const PickleId* offset = tree_.find(index, "offset");
      if (offset == nullptr || tree_.get<PickleNone>(*offset) != nullptr) continue;  // no tensor
      const std::string what = "the storage of " + quote(*name);
      const PickleDict& info = attributes(value, "_StorageInfo", what);
      Place place;
      const auto* file = tree_.get<std::string_view>(at(info, "relative_path", what));
      const bool plain = file != nullptr && !file->empty() && *file != "." && *file != ".." &&
                         file->find_first_of(std::string_view("/\\\0", 3)) == file->npos;
      check(plain, "{} is in {}, expected a file of this directory", what,
            file != nullptr ? quote(*file) : "no file");
      place.file = std::string(*file);
      place.offset = static_cast<std::uint64_t>(count(info, "offset", what));
      place.bytes = static_cast<std::uint64_t>(count(info, "length", what));
      const PickleId* transforms = tree_.find(info, "transform_descriptors");
      place.transformed = transforms != nullptr && tree_.get<PickleNone>(*transforms) == nullptr;
      const Indices at_offset = size(*offset, "offset", what);
      check(places_.emplace(std::pair(std::string(*name), at_offset), place).second,
            "{} at [{}] is there twice", what, fmt::join(at_offset, ", "));
    }
  }

  Described tensor(const std::string& name, PickleId id) const {
    const std::string what = "tensor " + quote(name);
    const PickleDict& about = attributes(id, "TensorStorageMetadata", what);
    Described found;
    found.name = name;
    found.dims = size(at(about, "size", what), "size", what);
    check(product(found.dims).has_value(), "{} has more elements than 64 bits count", what);
    const auto* properties = tree_.get<PickleCall>(at(about, "properties", what));
    const auto* state = properties != nullptr ? tree_.get<PickleTuple>(properties->state) : nullptr;
    check(state != nullptr && !state->items.empty(), "{} has no properties", what);
    const std::string type = tree_.global_name(state->items[0]);
    found.type = torch_type_of_dtype(type);
    check(found.type != nullptr, "{} has elements of type {}, which is unknown", what, quote(type));
    const auto* boxes = tree_.get<PickleList>(at(about, "chunks", what));
    check(boxes != nullptr && boxes->items.size() <= kMostBoxes,
          "{} has no list of at most {} chunks", what, kMostBoxes);
    for (const PickleId item : boxes->items) {
      const PickleDict& chunk = attributes(item, "ChunkStorageMetadata", "a chunk of " + what);
      Box box;
      box.offsets = size(at(chunk, "offsets", what), "offsets", what);
      box.sizes = size(at(chunk, "sizes", what), "sizes", what);
      const auto place = places_.find(std::pair(name, box.offsets));
      check(place != places_.end(), "{} has a chunk at [{}] which is in no file", what,
            fmt::join(box.offsets, ", "));
      box.place = place->second;
      found.boxes.push_back(std::move(box));
    }
    check_boxes(found, what);
    return found;
  }

  // They lie inside, do not overlap, and are all of it.
  void check_boxes(Described& tensor, const std::string& what) const {
    std::uint64_t all = 0;
    std::erase_if(tensor.boxes,
                  [](const Box& box) { return std::ranges::count(box.sizes, 0) > 0; });
    for (const Box& box : tensor.boxes) {
      bool inside =
          box.offsets.size() == tensor.dims.size() && box.sizes.size() == tensor.dims.size();
      for (std::size_t d = 0; inside && d < tensor.dims.size(); ++d) {
        inside =
            box.offsets[d] <= tensor.dims[d] && box.sizes[d] <= tensor.dims[d] - box.offsets[d];
      }
      check(inside, "{} [{}] has a chunk of [{}] at [{}], which is not inside", what,
            fmt::join(tensor.dims, ", "), fmt::join(box.sizes, ", "), fmt::join(box.offsets, ", "));
      all += static_cast<std::uint64_t>(*product(box.sizes));
      for (const Box* other = tensor.boxes.data(); other != &box; ++other) {
        bool apart = false;
        for (std::size_t d = 0; d < tensor.dims.size(); ++d) {
          apart = apart || box.offsets[d] + box.sizes[d] <= other->offsets[d] ||
                  other->offsets[d] + other->sizes[d] <= box.offsets[d];
        }
        check(apart, "{} has two chunks that overlap, at [{}] and [{}]", what,
              fmt::join(other->offsets, ", "), fmt::join(box.offsets, ", "));
      }
    }
    check(all == static_cast<std::uint64_t>(*product(tensor.dims)),
          "{} [{}]: its chunks have {} elements of {}", what, fmt::join(tensor.dims, ", "), all,
          *product(tensor.dims));
  }

  const PickleTree& tree_;
  const std::string& path_;
  std::map<std::pair<std::string, Indices>, Place> places_;
};

// What the optimizer's part of the names begins with, and that of the model's.
constexpr auto kOptimizers =
    std::to_array<std::string_view>({"optimizer.", "optim.", "app.optimizer.", "app.optim."});
constexpr auto kModels = std::to_array<std::string_view>(
    {"model.", "state_dict.", "model_state_dict.", "module.", "app.model."});

bool is_optimizers(std::string_view name) {
  return std::ranges::any_of(kOptimizers, [&](auto prefix) { return name.starts_with(prefix); });
}

std::string model_prefix(const std::vector<Described>& tensors) {
  std::string_view best;
  std::ptrdiff_t most = 0;
  for (const std::string_view prefix : kModels) {
    const auto count = std::ranges::count_if(
        tensors, [&](const Described& tensor) { return tensor.name.starts_with(prefix); });
    if (count > most) {
      most = count;
      best = prefix;
    }
  }
  return std::string(best);
}

class TorchDistributedFile : public TensorFile {
 public:
  explicit TorchDistributedFile(const std::string& directory) {
    path_ = directory;
    format_ = "PyTorch, distributed";
    const std::string metadata = (fs::path(directory) / kMetadata).string();
    const MappedFile file(metadata);
    const PickleTree tree = read_pickle(file.bytes(), metadata,
                                        {.callable = kCallables,
                                         .constant = torch_constants(),
                                         .objects = kObjects,
                                         .advice = kAdvice});
    std::vector<Described> tensors = MetadataReader(tree, metadata).read();
    prefix_ = model_prefix(tensors);
    rename_states(tensors);
    for (const Described& tensor : tensors) add(tensor);
    index_entries();
  }

 protected:
  std::span<const std::uint8_t> read_elements(std::size_t index, std::uint64_t first,
                                              std::uint64_t count,
                                              std::vector<std::uint8_t>& room) const override {
    const std::uint64_t width = size_of(*entries_[index].dtype);
    room.resize(count * width);
    for (const Piece& piece : pieces_[index]) {
      copy_piece(piece, entries_[index].dims, static_cast<std::int64_t>(first),
                 static_cast<std::int64_t>(count), room.data());
    }
    return room;
  }

 private:
  struct Piece {
    Indices offsets, sizes;
    std::unique_ptr<TorchArchive> archive;
    const TorchTensor& tensor() const { return archive->tensors()[0]; }
  };

  void rename_states(std::vector<Described>& tensors) const {
    std::map<std::string, Indices> dims;
    for (const Described& tensor : tensors) {
      if (tensor.name.starts_with(prefix_) && !is_optimizers(tensor.name)) {
        dims[tensor.name.substr(prefix_.size())] = tensor.dims;
      }
    }
    for (Described& tensor : tensors) {
      for (const std::string_view prefix : kOptimizers) {
        if (!tensor.name.starts_with(prefix)) continue;
        std::string rest = tensor.name.substr(prefix.size());
        const std::string_view state = "state.";
        const std::size_t dot = rest.rfind('.');
        if (rest.starts_with(state) && dot >= state.size()) {
          const auto found = dims.find(rest.substr(state.size(), dot - state.size()));
          if (found != dims.end() && found->second == tensor.dims) rest.erase(0, state.size());
        }
        tensor.name = std::string(kOptimizerPrefix) + rest;
        break;
      }
    }
  }

  void add(const Described& tensor) {
    const std::int64_t numel = *product(tensor.dims);
    const std::string_view type =
        tensor.type->dtype ? name_of(*tensor.type->dtype) : tensor.type->name;
    std::vector<Piece>& pieces = pieces_.emplace_back();
    for (const Box& box : tensor.boxes) {
      Piece piece{box.offsets, box.sizes, open(tensor, box)};
      pieces.push_back(std::move(piece));
    }
    // As each box fits its file, the product does.
    entries_.push_back({tensor.name, std::string(type), tensor.type->dtype, tensor.dims, numel,
                        static_cast<std::uint64_t>(numel) * tensor.type->bytes});
  }

  std::unique_ptr<TorchArchive> open(const Described& tensor, const Box& box) {
    const Place& place = box.place;
    const std::string path = (fs::path(path_) / place.file).string();
    std::error_code error;
    SHERD_CHECK(fs::is_regular_file(path, error),
                "checkpoint '{}': its file {} is missing; copy it too", path_, quote(place.file));
    SHERD_CHECK(!place.transformed,
                "checkpoint '{}': {} is transformed (compressed), which is not read; save it again "
                "without extensions",
                path_, quote(tensor.name));
    const auto bytes = files_.try_emplace(place.file, path).first->second.bytes();
    SHERD_CHECK(place.offset <= bytes.size() && place.bytes <= bytes.size() - place.offset,
                "'{}': tensor {} is at byte {} with {} bytes, and the file has {}; it is not whole",
                path, quote(tensor.name), place.offset, place.bytes, bytes.size());
    auto archive = std::make_unique<TorchArchive>(bytes.subspan(place.offset, place.bytes), path);
    const auto& found = archive->tensors();
    const bool fits = found.size() == 1 && found[0].shape == box.sizes &&
                      found[0].type == tensor.type->name &&
                      found[0].numel <= found[0].storage.size() / found[0].width;
    SHERD_CHECK(fits, "'{}': at byte {} there is not the part of {} that .metadata says", path,
                place.offset, quote(tensor.name));
    return archive;
  }

  // What of a box lies among `count` elements of the tensor from `first` on.
  static void copy_piece(const Piece& piece, const Indices& dims, std::int64_t first,
                         std::int64_t count, std::uint8_t* room) {
    // A run of elements that follow each other in the tensor: the last dimensions, as far as the
    // box has all of them, and its part of the one before.
    std::size_t outer = dims.size();
    std::int64_t run = 1;
    while (outer > 0) {
      --outer;
      run *= piece.sizes[outer];
      if (piece.sizes[outer] != dims[outer]) break;
    }
    const TorchTensor& tensor = piece.tensor();
    const auto runs = static_cast<std::int64_t>(tensor.numel) / run;
    for (std::int64_t i = 0; i < runs; ++i) {
      std::int64_t start = 0, step = 1, rest = i;  // of the run, in the tensor
      for (std::size_t d = dims.size(); d-- > 0;) {
        std::int64_t index = piece.offsets[d];
        if (d < outer) {
          index += rest % piece.sizes[d];
          rest /= piece.sizes[d];
        }
        start += index * step;
        step *= dims[d];
      }
      const std::int64_t from = std::max(first, start), to = std::min(first + count, start + run);
      if (from >= to) continue;
      copy_elements(tensor, static_cast<std::uint64_t>(i * run + from - start),
                    static_cast<std::uint64_t>(to - from),
                    room + static_cast<std::uint64_t>(from - first) * tensor.width);
    }
  }

  std::map<std::string, MappedFile> files_;
  std::vector<std::vector<Piece>> pieces_;  // by entries_
};

}  // namespace

bool is_torch_distributed(const std::string& directory) {
  std::error_code error;
  return fs::is_regular_file(fs::path(directory) / kMetadata, error);
}

std::unique_ptr<TensorFile> open_torch_distributed(const std::string& directory) {
  return std::make_unique<TorchDistributedFile>(directory);
}

}  // namespace sherd
