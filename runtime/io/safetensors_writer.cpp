// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/safetensors.h>

#include <algorithm>
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
  for (const SafetensorsItem& item : items) {
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

void check_names(std::span<const SafetensorsWriter::Item> items, const std::string& path) {
  std::set<std::string_view> names;
  for (const SafetensorsWriter::Item& item : items) {
    SHERD_CHECK(item.name != kMetadataKey && names.insert(item.name).second,
                "cannot write safetensors file '{}': the tensor name {} is {}", path,
                quote(item.name), item.name == kMetadataKey ? "reserved" : "used twice");
  }
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::span<const Item> items,
                                     const std::map<std::string, std::string>& metadata,
                                     AtomicFile::Appears appears)
    : file_(path, appears), path_(path) {
  check_names(items, path);
  std::vector<const Item*> ordered;
  ordered.reserve(items.size());
  for (const Item& item : items) ordered.push_back(&item);
  std::ranges::sort(ordered, [](const Item* a, const Item* b) {
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
  for (const Item* item : ordered) {
    const std::uint64_t size =
        static_cast<std::uint64_t>(item->shape.numel()) * size_of(item->dtype);
    begin_value(item->name);
    header += fmt::format(R"({{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                          file_dtype(item->dtype), fmt::join(item->shape.dims(), ","), position,
                          position + size);
    places_[item->name] = {position, size, 0};
    position += size;
  }
  header += header.empty() ? "{}" : "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  SHERD_CHECK(
      header.size() <= kMaxHeader,
      "cannot write safetensors file '{}': its header would have {} bytes, the most allowed "
      "is {}",
      path, header.size(), kMaxHeader);

  header_.resize(kLengthBytes);
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    header_[i] = static_cast<std::uint8_t>(header.size() >> (8 * i));
  }
  header_.insert(header_.end(), header.begin(), header.end());
  file_.write(header_);
  file_bytes_ = header_.size() + position;
  for (auto& [name, place] : places_) place.offset += header_.size();
}

SafetensorsWriter::Place& SafetensorsWriter::place(std::string_view name) {
  const auto found = places_.find(name);
  SHERD_CHECK(found != places_.end(), "safetensors file '{}': no tensor {} was announced", path_,
              quote(std::string(name)));
  return found->second;
}

std::uint64_t SafetensorsWriter::offset(std::string_view name) const {
  return const_cast<SafetensorsWriter*>(this)->place(name).offset;
}

void SafetensorsWriter::write(std::string_view name, std::span<const std::uint8_t> bytes) {
  Place& to = place(name);
  SHERD_CHECK(bytes.size() <= to.size - to.written,
              "safetensors file '{}': tensor {} has {} bytes, got {}{}", path_,
              quote(std::string(name)), to.size, bytes.size(),
              to.written > 0 ? fmt::format(" beside {}", to.written) : "");
  file_.write_at(to.offset + to.written, bytes);
  to.written += bytes.size();
}

void SafetensorsWriter::commit() {
  for (const auto& [name, place] : places_) {
    SHERD_CHECK(place.written == place.size,
                "safetensors file '{}': of the {} bytes of tensor {}, {} were written", path_,
                place.size, quote(name), place.written);
  }
  file_.commit();
}

void write_safetensors(const std::string& path, std::span<const SafetensorsItem> items,
                       const std::map<std::string, std::string>& metadata) {
  check_items(items, path);
  std::vector<SafetensorsWriter::Item> announced;
  for (const SafetensorsItem& item : items) {
    announced.push_back({item.name, item.dtype, item.shape});
  }
  SafetensorsWriter writer(path, announced, metadata);
  for (const SafetensorsItem& item : items) writer.write(item.name, item.bytes);
  writer.commit();
}

}  // namespace sherd
