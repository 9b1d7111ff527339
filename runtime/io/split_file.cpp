// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/io/quote.h>
#include <sherd/runtime/io/split_file.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

namespace sherd {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// Of a file beside the index: no way to another folder.
bool is_plain_name(const std::string& name) {
  return !name.empty() && name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos &&
         name != "." && name != "..";
}

// Takes nlohmann's events instead of a tree, which keeps only the last of two equal keys. Of what
// is not needed anything may be there, at a depth that cannot exhaust the stack.
class IndexReader {
 public:
  using Events = nlohmann::json;

  explicit IndexReader(const std::string& path) : path_(path) {}

  SplitIndex index;
  bool has_map = false;

  bool start_object(std::size_t) {
    if (depth_ == 1 && key_ == kMap) {
      check(!std::exchange(has_map, true), "the key 'weight_map' appears twice");
      in_ = Part::map;
    } else if (depth_ == 1 && key_ == kMetadata) {
      in_ = Part::metadata;
    } else {
      check(depth_ == 0 || in_ != Part::map, "the file of {} is an object, expected a text",
            quote(key_));
    }
    return deeper();
  }
  bool end_object() { return shallower(); }
  bool start_array(std::size_t) {
    check(depth_ > 0, "it is a list, expected a JSON object with 'weight_map'");
    check(in_ != Part::map, "the file of {} is a list, expected a text", quote(key_));
    check(depth_ != 1 || key_ != kMap, "'weight_map' is a list, expected an object");
    return deeper();
  }
  bool end_array() { return shallower(); }
  bool key(std::string& text) {
    key_ = text;
    return true;
  }
  bool string(std::string& text) {
    scalar("a text");
    if (in_ == Part::map) {
      check(is_plain_name(text), "tensor {} is in {}, expected a file beside the index",
            quote(key_), quote(text));
      check(index.files.emplace(key_, text).second, "tensor {} appears twice", quote(key_));
    } else if (in_ == Part::metadata && depth_ == 2) {
      check(key_ != kTotal, "'total_size' is {}, expected a whole number of bytes", quote(text));
      index.metadata[key_] = text;
    }
    return true;
  }
  bool number_unsigned(std::uint64_t value) {
    other("a number");
    if (in_ == Part::metadata && depth_ == 2 && key_ == kTotal) index.total_size = value;
    return true;
  }
  bool number_integer(std::int64_t value) {
    other("a number");
    check(!is_total(), "'total_size' is {}, expected a whole number of bytes", value);
    return true;
  }
  bool number_float(double value, const std::string& text) {
    other("a number");
    if (!is_total()) return true;
    // Some programs write 4.2e9, or 4200000000.0.
    constexpr double kMost = 9007199254740992.0;  // whole numbers are exact up to it
    const bool whole = value >= 0 && value <= kMost &&
                       static_cast<double>(static_cast<std::uint64_t>(value)) == value;
    check(whole, "'total_size' is {}, expected a whole number of bytes", quote(text));
    index.total_size = static_cast<std::uint64_t>(value);
    return true;
  }
  bool boolean(bool) { return other("true or false"); }
  bool null() { return other("null"); }
  bool binary(Events::binary_t&) { return other("binary data"); }
  bool parse_error(std::size_t position, const std::string&, const Events::exception&) {
    fail_here("it is not valid JSON in UTF-8, near byte {}", position);
  }

 private:
  enum class Part { outside, map, metadata };
  static constexpr std::string_view kMap = "weight_map", kMetadata = "metadata",
                                    kTotal = "total_size";
  static constexpr int kDeepest = 32;

  template <typename... Args>
  [[noreturn]] void fail_here(fmt::format_string<Args...> format, Args&&... args) const {
    fail("index of split weights '{}': {}", path_,
         fmt::format(format, std::forward<Args>(args)...));
  }
  template <typename... Args>
  void check(bool good, fmt::format_string<Args...> format, Args&&... args) const {
    if (!good) fail_here(format, std::forward<Args>(args)...);
  }
  bool deeper() {
    check(++depth_ <= kDeepest, "it is nested more than {} deep", kDeepest);
    return true;
  }
  bool shallower() {
    if (--depth_ == 1) in_ = Part::outside;
    return true;
  }
  bool is_total() const { return in_ == Part::metadata && depth_ == 2 && key_ == kTotal; }
  void scalar(const char* what) const {
    check(depth_ > 0, "it is {}, expected a JSON object with 'weight_map'", what);
    check(depth_ != 1 || key_ != kMap, "'weight_map' is {}, expected an object", what);
  }
  bool other(const char* what) const {
    scalar(what);
    check(in_ != Part::map, "the file of {} is {}, expected a text", quote(key_), what);
    return true;
  }

  const std::string& path_;
  int depth_ = 0;
  Part in_ = Part::outside;
  std::string key_;
};

class SplitTensorFile : public TensorFile {
 public:
  explicit SplitTensorFile(const std::string& path) {
    path_ = path;
    const std::vector<std::uint8_t> text = read_file(path);
    const SplitIndex index =
        parse_split_index({reinterpret_cast<const char*>(text.data()), text.size()}, path);
    std::map<std::string, std::size_t> tensors_of;
    for (const auto& [tensor, file] : index.files) ++tensors_of[file];
    for (const auto& [name, tensors] : tensors_of) add_file(name, tensors, index);
    index_entries();
    std::uint64_t total = 0;
    for (const TensorEntry& entry : entries_) total += entry.bytes;
    metadata_ = index.metadata;
    if (!index.total_size) return;
    // Programs count differently (tensors that share bytes, types that changed), and nothing
    // depends on it.
    metadata_["total_size"] =
        *index.total_size == total
            ? fmt::format("{}", total)
            : fmt::format("{} by the index, {} in the files", *index.total_size, total);
  }

 protected:
  std::span<const std::uint8_t> read_elements(std::size_t index, std::uint64_t first,
                                              std::uint64_t count,
                                              std::vector<std::uint8_t>& room) const override {
    const auto& [file, entry] = places_[index];
    return files_[file]->read(*entry, static_cast<std::int64_t>(first),
                              static_cast<std::int64_t>(count), room);
  }

 private:
  void add_file(const std::string& name, std::size_t tensors, const SplitIndex& index) {
    const std::string path = (fs::path(path_).parent_path() / name).string();
    std::error_code error;
    SHERD_CHECK(fs::is_regular_file(path, error),
                "index of split weights '{}': its file {} is not beside it; download or copy it",
                path_, quote(name));
    files_.push_back(open_single_tensor_file(path));
    const TensorFile& file = *files_.back();
    format_ = file.format() == "PyTorch" ? "PyTorch, split" : "safetensors, split";
    for (const TensorEntry& entry : file.entries()) {
      const auto found = index.files.find(entry.name);
      SHERD_CHECK(found != index.files.end() && found->second == name,
                  "index of split weights '{}': {} has a tensor {}, which by the index it has not; "
                  "are the files those of this index?",
                  path_, quote(name), quote(entry.name));
      entries_.push_back(entry);
      places_.emplace_back(files_.size() - 1, &entry);
    }
    if (file.entries().size() == tensors) return;
    for (const auto& [tensor, in] : index.files) {
      SHERD_CHECK(in != name || file.find(tensor) != nullptr,
                  "index of split weights '{}': {} has no tensor {}, which by the index it has; "
                  "are the files those of this index?",
                  path_, quote(name), quote(tensor));
    }
  }

  std::vector<std::unique_ptr<TensorFile>> files_;
  std::vector<std::pair<std::size_t, const TensorEntry*>> places_;  // by entries_
};

}  // namespace

SplitIndex parse_split_index(std::string_view text, const std::string& path) {
  IndexReader reader(path);
  nlohmann::json::sax_parse(text, &reader);
  SHERD_CHECK(reader.has_map,
              "index of split weights '{}': it has no 'weight_map', which says what tensor is in "
              "what file",
              path);
  return std::move(reader.index);
}

std::string to_json(const SplitIndex& index) {
  Json metadata = Json::object();
  for (const auto& [key, value] : index.metadata) metadata[key] = value;
  if (index.total_size) metadata["total_size"] = *index.total_size;
  Json map = Json::object();
  for (const auto& [tensor, file] : index.files) map[tensor] = file;
  return Json{{"metadata", metadata}, {"weight_map", map}}.dump(2) + "\n";
}

std::unique_ptr<TensorFile> open_split_file(const std::string& index_path) {
  return std::make_unique<SplitTensorFile>(index_path);
}

std::string find_split_index(const std::string& directory) {
  for (const char* name : {"model.safetensors.index.json", "pytorch_model.bin.index.json"}) {
    const fs::path path = fs::path(directory) / name;
    std::error_code error;
    if (fs::exists(path, error)) return path.string();
  }
  return {};
}

}  // namespace sherd
