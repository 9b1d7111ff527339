// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/safetensors.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

namespace sherd {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kMaxHeader = 100'000'000;  // the format's own limit
constexpr std::uint64_t kLengthBytes = 8;
constexpr const char* kMetadataKey = "__metadata__";

// The format's names are ours in capitals.
std::string file_dtype(DType dtype) {
  std::string name(name_of(dtype));
  for (char& c : name) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  return name;
}

// For messages: printable whatever the text holds.
std::string quote(const std::string& text) {
  return Json(text).dump(-1, ' ', true, Json::error_handler_t::replace);
}

std::string json_string(const std::string& text, const std::string& path) {
  try {
    return Json(text).dump();
  } catch (const Json::exception&) {  // thrown for text that is not UTF-8
    fail("cannot write safetensors file '{}': the text {} is not valid UTF-8", path, quote(text));
  }
}

void check_items(std::span<const SafetensorsItem> items, const std::string& path) {
  std::set<std::string_view> names;
  for (const SafetensorsItem& item : items) {
    SHERD_CHECK(item.name != kMetadataKey && names.insert(item.name).second,
                "cannot write safetensors file '{}': the tensor name {} is {}", path,
                quote(item.name), item.name == kMetadataKey ? "reserved" : "used twice");
    // Divided, as the product may not fit.
    const std::size_t element = size_of(item.dtype);
    const bool exact = item.bytes.size() % element == 0 &&
                       std::cmp_equal(item.bytes.size() / element, item.shape.numel());
    SHERD_CHECK(exact,
                "cannot write safetensors file '{}': tensor {} of type {} and shape {} needs {} "
                "elements of {} bytes, got {} bytes",
                path, quote(item.name), name_of(item.dtype), item.shape.to_string(),
                item.shape.numel(), element, item.bytes.size());
  }
}

}  // namespace

void write_safetensors(const std::string& path, std::span<const SafetensorsItem> items,
                       const std::map<std::string, std::string>& metadata) {
  check_items(items, path);
  std::vector<const SafetensorsItem*> ordered;
  ordered.reserve(items.size());
  for (const SafetensorsItem& item : items) ordered.push_back(&item);
  std::ranges::sort(ordered, [](const SafetensorsItem* a, const SafetensorsItem* b) {
    const std::size_t size_a = size_of(a->dtype);
    const std::size_t size_b = size_of(b->dtype);
    return size_a != size_b ? size_a > size_b : a->name < b->name;
  });

  std::string header;
  const auto begin_value = [&](const std::string& key) {
    header += header.empty() ? '{' : ',';
    header += json_string(key, path) + ':';
  };
  if (!metadata.empty()) {
    begin_value(kMetadataKey);
    char separator = '{';
    for (const auto& [key, value] : metadata) {
      header += separator + json_string(key, path) + ':' + json_string(value, path);
      separator = ',';
    }
    header += '}';
  }
  std::uint64_t position = 0;
  for (const SafetensorsItem* item : ordered) {
    begin_value(item->name);
    header += fmt::format(R"({{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                          file_dtype(item->dtype), fmt::join(item->shape.dims(), ","), position,
                          position + item->bytes.size());
    position += item->bytes.size();
  }
  header += header.empty() ? "{}" : "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  SHERD_CHECK(
      header.size() <= kMaxHeader,
      "cannot write safetensors file '{}': its header would have {} bytes, the most allowed "
      "is {}",
      path, header.size(), kMaxHeader);

  std::array<std::uint8_t, kLengthBytes> length{};
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    length[i] = static_cast<std::uint8_t>(header.size() >> (8 * i));
  }
  AtomicFile file(path);
  file.write(length);
  file.write(header);
  for (const SafetensorsItem* item : ordered) file.write(item->bytes);
  file.commit();
}

}  // namespace sherd
