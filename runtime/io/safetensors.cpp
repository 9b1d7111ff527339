// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/quote.h>
#include <sherd/runtime/io/safetensors.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

namespace sherd {
namespace {

constexpr std::uint64_t kMaxHeader = 100'000'000;  // the format's own limit
constexpr std::uint64_t kLengthBytes = 8;
constexpr std::string_view kMetadataKey = "__metadata__";

constexpr std::array<std::pair<std::string_view, DType>, 7> kDTypes{{{"F64", DType::f64},
                                                                     {"F32", DType::f32},
                                                                     {"F16", DType::f16},
                                                                     {"BF16", DType::bf16},
                                                                     {"I64", DType::i64},
                                                                     {"I32", DType::i32},
                                                                     {"U8", DType::u8}}};
constexpr const char* kDTypeList = "F64, F32, F16, BF16, I64, I32, U8";

// Valid in the format, but not here.
constexpr std::array<std::string_view, 15> kForeignDTypes{
    "BOOL",    "I8",      "I16",         "U16",         "U32",     "U64",     "C64",    "F4",
    "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F8_E8M0"};

// A tensor as its header entry says it, before any check across entries.
struct RawEntry {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> range;
  bool has_dtype = false;
  bool has_shape = false;
  bool has_range = false;
};

// Takes nlohmann's events one by one instead of a tree, because the tree keeps only the last of two
// equal keys, and because a fixed grammar leaves nothing for deep nesting to exhaust.
class HeaderReader {
 public:
  using Json = nlohmann::json;

  explicit HeaderReader(const std::string& path) : path_(path) {}

  std::vector<RawEntry> entries;
  std::map<std::string, std::string> metadata;

  bool start_object(std::size_t) {
    if (state_ == State::outside) {
      state_ = State::root;
    } else if (state_ == State::root && key_ == kMetadataKey) {
      state_ = State::metadata;
    } else if (state_ == State::root) {
      state_ = State::tensor;
      entries.push_back({.name = key_, .dtype = {}, .shape = {}, .range = {}});
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(std::string& text) {
    key_ = text;
    if (state_ == State::root) {
      check(names_.insert(text).second, "the key {} appears twice", quote(text));
    } else if (state_ == State::metadata) {
      check(metadata.emplace(text, std::string()).second, "the metadata key {} appears twice",
            quote(text));
    } else {
      RawEntry& entry = entries.back();
      bool* const seen = text == "dtype"          ? &entry.has_dtype
                         : text == "shape"        ? &entry.has_shape
                         : text == "data_offsets" ? &entry.has_range
                                                  : nullptr;
      check(seen != nullptr,
            "tensor {} has an unknown field {}: expected dtype, shape and data_offsets",
            quote(entry.name), quote(text));
      check(!std::exchange(*seen, true), "tensor {} has the field {} twice", quote(entry.name),
            quote(text));
    }
    return true;
  }

  bool end_object() {
    if (state_ == State::tensor) {
      const RawEntry& entry = entries.back();
      const char* missing = !entry.has_dtype   ? "dtype"
                            : !entry.has_shape ? "shape"
                            : !entry.has_range ? "data_offsets"
                                               : nullptr;
      check(missing == nullptr, "tensor {} has no field '{}'", quote(entry.name),
            missing != nullptr ? missing : "");
      check(entry.range.size() == 2, "tensor {} has {} data_offsets, expected 2 (begin, end)",
            quote(entry.name), entry.range.size());
    }
    state_ = state_ == State::root ? State::outside : State::root;
    return true;
  }

  bool start_array(std::size_t) {
    if (state_ != State::tensor || key_ == "dtype") unexpected("an array");
    state_ = State::numbers;
    return true;
  }

  bool end_array() {
    state_ = State::tensor;
    return true;
  }

  bool number_unsigned(std::uint64_t value) {
    if (state_ != State::numbers) unexpected("a number");
    check(value <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()),
          "tensor {} has {} in its {}, which does not fit 63 bits", quote(entries.back().name),
          value, key_);
    RawEntry& entry = entries.back();
    std::vector<std::int64_t>& numbers = key_ == "shape" ? entry.shape : entry.range;
    const std::size_t most = key_ == "shape" ? Shape::kMaxRank : 2;
    check(numbers.size() < most, "tensor {} has more than {} numbers in its {}{}",
          quote(entry.name), most, key_,
          key_ == "shape" ? ", the most dimensions that Sherd supports" : "");
    numbers.push_back(static_cast<std::int64_t>(value));
    return true;
  }

  bool number_integer(std::int64_t value) {
    if (state_ != State::numbers) unexpected("a number");
    fail_here("tensor {} has a negative number ({}) in its {}", quote(entries.back().name),
              value == 0 ? "-0" : std::to_string(value), key_);
  }

  bool number_float(double, const std::string& text) {
    if (state_ != State::numbers) unexpected("a number");
    fail_here("tensor {} has {} in its {}: expected a whole number below 2^63",
              quote(entries.back().name), quote(text), key_);
  }

  bool string(std::string& text) {
    if (state_ == State::metadata) {
      metadata[key_] = text;
    } else if (state_ == State::tensor && key_ == "dtype") {
      entries.back().dtype = text;
    } else {
      unexpected("a string");
    }
    return true;
  }

  bool null() { unexpected("null"); }
  bool boolean(bool) { unexpected("true or false"); }
  bool binary(Json::binary_t&) { unexpected("binary data"); }

  bool parse_error(std::size_t position, const std::string&, const Json::exception& error) {
    // The rest of nlohmann's message repeats the text it read, which may be long or unprintable.
    const std::string_view text = error.what();
    const auto begin = text.find(": ");
    const std::string_view what = begin == text.npos ? text : text.substr(begin + 2);
    fail_here("its header is not valid JSON in UTF-8, near byte {} of the header: {}", position,
              quote(what.substr(0, what.find("; last read"))));
  }

 private:
  enum class State { outside, root, metadata, tensor, numbers };

  template <typename... Args>
  [[noreturn]] void fail_here(fmt::format_string<Args...> format, Args&&... args) const {
    fail("safetensors file '{}': {}", path_, fmt::format(format, std::forward<Args>(args)...));
  }

  template <typename... Args>
  void check(bool good, fmt::format_string<Args...> format, Args&&... args) const {
    if (!good) fail_here(format, std::forward<Args>(args)...);
  }

  [[noreturn]] void unexpected(const char* what) const {
    switch (state_) {
      case State::outside: fail_here("its header is {}, expected a JSON object", what);
      case State::root: fail_here("the value of {} is {}, expected an object", quote(key_), what);
      case State::metadata:
        fail_here("the metadata value of {} is {}, expected a string", quote(key_), what);
      case State::tensor:
        fail_here("tensor {} has {} as its {}, expected {}", quote(entries.back().name), what, key_,
                  key_ == "dtype" ? "a string" : "an array of numbers");
      case State::numbers:
        fail_here("tensor {} has {} inside its {}, expected whole numbers",
                  quote(entries.back().name), what, key_);
    }
    fail_here("unexpected {}", what);
  }

  const std::string& path_;
  State state_ = State::outside;
  std::string key_;
  std::set<std::string> names_;
};

DType known_dtype(const RawEntry& entry, const std::string& path) {
  for (const auto& [name, dtype] : kDTypes) {
    if (name == entry.dtype) return dtype;
  }
  const bool foreign = std::ranges::find(kForeignDTypes, entry.dtype) != kForeignDTypes.end();
  fail("safetensors file '{}': tensor {} has dtype {}, {}; expected one of {}{}", path,
       quote(entry.name), quote(entry.dtype),
       foreign ? "which the format knows but Sherd does not support" : "which is unknown",
       kDTypeList, foreign ? ": convert the tensor first" : "");
}

// One entry's own arithmetic: shape times element size is the length of its range.
SafetensorsEntry check_entry(RawEntry& raw, const std::string& path) {
  SafetensorsEntry entry;
  entry.dtype = known_dtype(raw, path);
  entry.shape = Shape(raw.shape);
  const std::int64_t begin = raw.range[0];
  const std::int64_t end = raw.range[1];
  SHERD_CHECK(begin <= end, "safetensors file '{}': tensor {} ends at {} before it begins at {}",
              path, quote(raw.name), end, begin);
  auto needed = static_cast<std::int64_t>(size_of(entry.dtype));
  for (const std::int64_t dim : raw.shape) {
    SHERD_CHECK(!__builtin_mul_overflow(needed, dim, &needed),
                "safetensors file '{}': the bytes of tensor {} with shape {} overflow 64 bits",
                path, quote(raw.name), entry.shape.to_string());
  }
  SHERD_CHECK(needed == end - begin,
              "safetensors file '{}': tensor {} of dtype {} and shape {} needs {} bytes, but its "
              "data_offsets [{}, {}] span {}",
              path, quote(raw.name), raw.dtype, entry.shape.to_string(), needed, begin, end,
              end - begin);
  entry.name = std::move(raw.name);
  entry.offset = static_cast<std::uint64_t>(begin);
  entry.size = static_cast<std::uint64_t>(needed);
  return entry;
}

// The entries in order must tile [0, data_size) exactly.
void check_tiling(const std::vector<SafetensorsEntry>& entries, std::uint64_t data_size,
                  const std::string& path) {
  std::uint64_t position = 0;
  const std::string* previous = nullptr;
  for (const SafetensorsEntry& entry : entries) {
    SHERD_CHECK(entry.offset >= position,
                "safetensors file '{}': tensor {} begins at {}, inside tensor {}, which ends at {}",
                path, quote(entry.name), entry.offset, quote(previous ? *previous : ""), position);
    SHERD_CHECK(entry.offset == position,
                "safetensors file '{}': bytes {} to {} before tensor {} belong to no tensor", path,
                position, entry.offset, quote(entry.name));
    position = entry.offset + entry.size;
    previous = &entry.name;
  }
  SHERD_CHECK(position <= data_size,
              "safetensors file '{}' is truncated: its tensors need {} bytes after the header, the "
              "file has {}; fetch it again",
              path, position, data_size);
  SHERD_CHECK(position == data_size, "safetensors file '{}' has {} bytes after its last tensor",
              path, data_size - position);
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::span<const std::uint8_t> file_bytes,
                                           const std::string& path) {
  SHERD_CHECK(file_bytes.size() >= kLengthBytes,
              "'{}' is not a safetensors file: it has {} bytes, expected at least {}", path,
              file_bytes.size(), kLengthBytes);
  std::uint64_t length = 0;
  for (std::size_t i = kLengthBytes; i-- > 0;) length = length << 8 | file_bytes[i];
  SHERD_CHECK(length <= kMaxHeader,
              "'{}' is not a safetensors file: its header would have {} bytes, the most allowed is "
              "{}",
              path, length, kMaxHeader);
  const std::uint64_t rest = file_bytes.size() - kLengthBytes;
  SHERD_CHECK(length <= rest,
              "safetensors file '{}' is truncated: its header has {} bytes, only {} follow; fetch "
              "it again",
              path, length, rest);
  const auto header = file_bytes.subspan(kLengthBytes, length);
  // nlohmann skips a byte order mark and takes a NUL for the end of its input; the format has
  // neither.
  SHERD_CHECK(length > 0 && header[0] == '{',
              "'{}' is not a safetensors file: its header is not a JSON object: expected '{{' as "
              "its first byte",
              path);
  SHERD_CHECK(std::memchr(header.data(), 0, header.size()) == nullptr,
              "safetensors file '{}': its header is not valid JSON: it contains a NUL byte", path);

  HeaderReader reader(path);
  const bool complete = nlohmann::json::sax_parse(header.begin(), header.end(), &reader);
  SHERD_INTERNAL_CHECK(complete, "the JSON parser stopped early on '{}'", path);

  SafetensorsHeader result;
  result.metadata = std::move(reader.metadata);
  result.entries.reserve(reader.entries.size());
  for (RawEntry& raw : reader.entries) result.entries.push_back(check_entry(raw, path));
  std::ranges::sort(result.entries, {}, [](const SafetensorsEntry& entry) {
    return std::tuple(entry.offset, entry.size, std::string_view(entry.name));
  });
  check_tiling(result.entries, rest - length, path);
  for (SafetensorsEntry& entry : result.entries) entry.offset += kLengthBytes + length;
  return result;
}

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  return SafetensorsFile(path, MappedFile(path));
}

SafetensorsFile::SafetensorsFile(std::string path, MappedFile file)
    : path_(std::move(path)),
      file_(std::move(file)),
      header_(parse_safetensors_header(file_.bytes(), path_)) {
  for (std::size_t i = 0; i < header_.entries.size(); ++i) {
    index_.emplace(header_.entries[i].name, i);
  }
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &header_.entries[found->second];
}

std::span<const std::uint8_t> SafetensorsFile::bytes(const SafetensorsEntry& entry) const {
  const std::uint64_t size = file_.bytes().size();
  SHERD_CHECK(entry.offset <= size && entry.size <= size - entry.offset,
              "safetensors file '{}': {} is not one of its entries", path_, quote(entry.name));
  return file_.bytes().subspan(entry.offset, entry.size);
}

}  // namespace sherd
