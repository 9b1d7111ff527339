// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/checkpoint/index.h>

#include <sherd/comm/checkpoint/block_checksum.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <set>

namespace sherd {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "sherd checkpoint";
// The index begins with its own checksum, taken with zeros in this place.
constexpr std::string_view kHead = "{\"xxh3\":\"";
constexpr std::size_t kDigits = 16;

std::string hex(std::uint64_t value) {
  return fmt::format("{:016x}", value);
}

std::string quote(const std::string& text) {
  return Json(text).dump(-1, ' ', true, Json::error_handler_t::replace);
}

std::uint64_t blocks_of(std::uint64_t bytes) {
  return (bytes + CheckpointIndex::kBlock - 1) / CheckpointIndex::kBlock;
}

std::uint64_t text_checksum(std::string text) {
  std::fill_n(text.begin() + kHead.size(), kDigits, '0');
  return BlockChecksum::of({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
}

Json to_value(const CheckpointFile& file) {
  return {{"name", file.name},
          {"bytes", file.bytes},
          {"header_bytes", file.header_bytes},
          {"header_xxh3", hex(file.header_checksum)}};
}

Json to_value(const CheckpointTensor& tensor) {
  Json value{{"parameter", tensor.parameter}};
  if (!tensor.state.empty()) value["state"] = tensor.state;
  value["dtype"] = name_of(tensor.dtype);
  value["shape"] =
      std::vector<std::int64_t>(tensor.shape.dims().begin(), tensor.shape.dims().end());
  Json& pieces = value["pieces"] = Json::array();
  for (const CheckpointPiece& piece : tensor.pieces) {
    Json checksums = Json::array();
    for (const std::uint64_t sum : piece.checksums) checksums.push_back(hex(sum));
    pieces.push_back({{"file", piece.file},
                      {"first", piece.first},
                      {"numel", piece.numel},
                      {"offset", piece.offset},
                      {"xxh3", checksums}});
  }
  return value;
}

// Reads values and says what is wrong with which.
class Reader {
 public:
  explicit Reader(std::string path) : path_(std::move(path)) {}

  template <typename... Args>
  [[noreturn]] void wrong(fmt::format_string<Args...> format, Args&&... args) const {
    fail("checkpoint index '{}': {}", path_, fmt::format(format, std::forward<Args>(args)...));
  }

  const Json& at(const Json& object, const char* key, const std::string& of) const {
    if (!object.is_object()) wrong("{} is not a JSON object", of);
    const auto found = object.find(key);
    if (found == object.end()) wrong("{} has no '{}'", of, key);
    return *found;
  }
  const Json& list(const Json& object, const char* key, const std::string& of) const {
    const Json& value = at(object, key, of);
    if (!value.is_array()) wrong("'{}' of {} is not a list", key, of);
    return value;
  }
  std::string text(const Json& object, const char* key, const std::string& of) const {
    const Json& value = at(object, key, of);
    if (!value.is_string()) wrong("'{}' of {} is not a text", key, of);
    return value.get<std::string>();
  }
  std::int64_t count(const Json& object, const char* key, const std::string& of) const {
    return as_count(at(object, key, of), key, of);
  }
  std::int64_t as_count(const Json& value, const char* key, const std::string& of) const {
    constexpr std::int64_t kMost = std::int64_t{1} << 62;
    const bool fits = value.is_number_unsigned() && value.get<std::uint64_t>() <= kMost;
    if (!fits) {
      wrong("'{}' of {}: expected a whole number of 0 or more, got {}", key, of,
            value.dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, 40));
    }
    return value.get<std::int64_t>();
  }
  std::uint64_t checksum(const Json& value, const std::string& of) const {
    std::uint64_t sum = 0;
    const std::string digits = value.is_string() ? value.get<std::string>() : std::string();
    const char* end = digits.data() + digits.size();
    const auto [rest, error] = std::from_chars(digits.data(), end, sum, 16);
    if (error != std::errc() || rest != end || digits.size() != kDigits) {
      wrong("a checksum of {} is not 16 hexadecimal digits", of);
    }
    return sum;
  }

  CheckpointFile file(const Json& value) const {
    CheckpointFile file;
    file.name = text(value, "name", "a file");
    const std::string of = "file " + quote(file.name);
    const bool plain = !file.name.empty() && file.name.find('/') == std::string::npos &&
                       file.name.find('\0') == std::string::npos && file.name != "." &&
                       file.name != "..";
    if (!plain) wrong("{} is not a file of this directory", of);
    file.bytes = static_cast<std::uint64_t>(count(value, "bytes", of));
    file.header_bytes = static_cast<std::uint64_t>(count(value, "header_bytes", of));
    file.header_checksum = checksum(at(value, "header_xxh3", of), of);
    if (file.header_bytes > file.bytes) {
      wrong("{} has {} bytes, of which {} are its header's", of, file.bytes, file.header_bytes);
    }
    return file;
  }

  CheckpointTensor tensor(const Json& value) const {
    CheckpointTensor tensor;
    tensor.parameter = text(value, "parameter", "a tensor");
    const std::string of = "tensor " + quote(tensor.parameter);
    if (value.contains("state")) tensor.state = text(value, "state", of);
    const std::string dtype = text(value, "dtype", of);
    try {
      tensor.dtype = dtype_from_name(dtype);
    } catch (const Error& error) {
      wrong("{}: {}", of, error.what());
    }
    std::vector<std::int64_t> dims;
    for (const Json& dim : list(value, "shape", of)) dims.push_back(as_count(dim, "shape", of));
    try {
      tensor.shape = Shape(std::span<const std::int64_t>(dims));
      tensor.shape.numel();  // throws where it does not fit
    } catch (const Error& error) {
      wrong("{}: {}", of, error.what());
    }
    for (const Json& entry : list(value, "pieces", of)) {
      CheckpointPiece piece;
      piece.file = static_cast<std::size_t>(count(entry, "file", of));
      piece.first = count(entry, "first", of);
      piece.numel = count(entry, "numel", of);
      piece.offset = static_cast<std::uint64_t>(count(entry, "offset", of));
      for (const Json& sum : list(entry, "xxh3", of)) piece.checksums.push_back(checksum(sum, of));
      tensor.pieces.push_back(std::move(piece));
    }
    return tensor;
  }

  void check_pieces(const CheckpointTensor& tensor,
                    const std::vector<CheckpointFile>& files) const {
    const std::string of = "tensor " + quote(tensor.key());
    const auto element = static_cast<std::uint64_t>(size_of(tensor.dtype));
    std::int64_t next = 0;
    for (const CheckpointPiece& piece : tensor.pieces) {
      if (piece.file >= files.size()) {
        wrong("{} has a piece in file number {} of {}", of, piece.file, files.size());
      }
      const CheckpointFile& file = files[piece.file];
      if (piece.first != next || piece.numel == 0 || piece.numel > tensor.shape.numel() - next) {
        wrong("{} {}: expected a piece from element {} on, got {} from {} on", of,
              tensor.shape.to_string(), next, piece.numel, piece.first);
      }
      next += piece.numel;
      // Divided, as the product may not fit.
      const bool inside =
          piece.offset >= file.header_bytes && piece.offset <= file.bytes &&
          static_cast<std::uint64_t>(piece.numel) <= (file.bytes - piece.offset) / element;
      if (!inside) {
        wrong("{} has {} elements at byte {} of {}, which has {} bytes", of, piece.numel,
              piece.offset, quote(file.name), file.bytes);
      }
      const std::uint64_t sums = blocks_of(static_cast<std::uint64_t>(piece.numel) * element);
      if (piece.checksums.size() != sums) {
        wrong("{} has a piece with {} checksums, expected {}", of, piece.checksums.size(), sums);
      }
    }
    if (next != tensor.shape.numel()) {
      wrong("{} {}: no file has the elements from {} on", of, tensor.shape.to_string(), next);
    }
  }

 private:
  std::string path_;
};

Json parse_json(std::string_view text, const Reader& reader) {
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    reader.wrong("it is damaged: {}", error.what());
  }
}

void sort_tensors(std::vector<CheckpointTensor>& tensors) {
  std::ranges::sort(tensors, [](const CheckpointTensor& a, const CheckpointTensor& b) {
    return std::tie(a.parameter, a.state) < std::tie(b.parameter, b.state);
  });
}

}  // namespace

std::string CheckpointTensor::key() const {
  return state.empty() ? parameter : "optimizer." + parameter + "." + state;
}

const CheckpointTensor* CheckpointIndex::find(std::string_view parameter,
                                              std::string_view state) const {
  const auto found = std::ranges::lower_bound(
      tensors, std::tie(parameter, state), {}, [](const CheckpointTensor& tensor) {
        return std::tuple<std::string_view, std::string_view>(tensor.parameter, tensor.state);
      });
  const bool here =
      found != tensors.end() && found->parameter == parameter && found->state == state;
  return here ? &*found : nullptr;
}

std::uint64_t checkpoint_checksum(std::span<const std::uint8_t> bytes) {
  return BlockChecksum::of(bytes);
}

std::uint64_t checkpoint_checksum(std::string_view text) {
  return BlockChecksum::of({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
}

std::string to_json(const CheckpointIndex& index) {
  Json value{{"xxh3", std::string(kDigits, '0')},
             {"format", kFormat},
             {"version", CheckpointIndex::kVersion},
             {"producer", index.producer},
             {"step", index.step},
             {"block", CheckpointIndex::kBlock},
             {"config_xxh3", hex(index.config_checksum)},
             {"run", index.run.empty() ? Json::object() : Json::parse(index.run)}};
  value["files"] = Json::array();
  for (const CheckpointFile& file : index.files) value["files"].push_back(to_value(file));
  value["tensors"] = Json::array();
  for (const CheckpointTensor& tensor : index.tensors) {
    value["tensors"].push_back(to_value(tensor));
  }
  std::string text = value.dump();
  const std::string digits = hex(text_checksum(text));
  std::copy(digits.begin(), digits.end(), text.begin() + kHead.size());
  return text;
}

CheckpointIndex parse_checkpoint_index(std::string_view text, const std::string& path) {
  const Reader reader(path);
  const Json value = parse_json(text, reader);
  const std::string whole = "the index";
  if (!value.is_object() || value.value("format", Json()) != kFormat) {
    reader.wrong("it is not the index of a Sherd checkpoint");
  }
  const std::int64_t version = reader.count(value, "version", whole);
  if (version > CheckpointIndex::kVersion) {
    reader.wrong(
        "it has format version {}, this program reads up to {}; use a newer version of "
        "Sherd",
        version, CheckpointIndex::kVersion);
  }
  if (!text.starts_with(kHead) || text.size() < kHead.size() + kDigits ||
      hex(text_checksum(std::string(text))) != text.substr(kHead.size(), kDigits)) {
    reader.wrong("its checksum is wrong, so it is damaged or was edited");
  }
  if (static_cast<std::uint64_t>(reader.count(value, "block", whole)) != CheckpointIndex::kBlock) {
    reader.wrong("checksums of blocks of {} bytes, expected {}", value["block"].dump(),
                 CheckpointIndex::kBlock);
  }
  CheckpointIndex index;
  index.producer = reader.text(value, "producer", whole);
  index.step = reader.count(value, "step", whole);
  index.config_checksum = reader.checksum(reader.at(value, "config_xxh3", whole), whole);
  index.run = reader.at(value, "run", whole).dump();
  std::set<std::string> names;
  for (const Json& entry : reader.list(value, "files", whole)) {
    index.files.push_back(reader.file(entry));
    if (!names.insert(index.files.back().name).second) {
      reader.wrong("file {} is there twice", quote(index.files.back().name));
    }
  }
  for (const Json& entry : reader.list(value, "tensors", whole)) {
    index.tensors.push_back(reader.tensor(entry));
    reader.check_pieces(index.tensors.back(), index.files);
  }
  sort_tensors(index.tensors);
  for (std::size_t i = 1; i < index.tensors.size(); ++i) {
    if (index.tensors[i].key() == index.tensors[i - 1].key()) {
      reader.wrong("tensor {} is there twice", quote(index.tensors[i].key()));
    }
  }
  return index;
}

std::string to_json(const CheckpointFile& file, std::span<const CheckpointTensor> tensors) {
  Json value{{"file", to_value(file)}};
  value["tensors"] = Json::array();
  for (const CheckpointTensor& tensor : tensors) value["tensors"].push_back(to_value(tensor));
  return value.dump();
}

CheckpointIndex merge_checkpoint_tables(std::span<const std::string> tables) {
  const Reader reader("to be");
  CheckpointIndex index;
  for (std::size_t rank = 0; rank < tables.size(); ++rank) {
    const Json value = parse_json(tables[rank], reader);
    index.files.push_back(reader.file(value["file"]));
    for (const Json& entry : value["tensors"]) {
      index.tensors.push_back(reader.tensor(entry));
      for (CheckpointPiece& piece : index.tensors.back().pieces) piece.file = rank;
    }
  }
  sort_tensors(index.tensors);
  std::vector<CheckpointTensor> merged;
  for (CheckpointTensor& tensor : index.tensors) {
    const bool same = !merged.empty() && merged.back().key() == tensor.key();
    if (!same) {
      merged.push_back(std::move(tensor));
      continue;
    }
    auto& pieces = merged.back().pieces;
    std::ranges::move(tensor.pieces, std::back_inserter(pieces));
  }
  for (CheckpointTensor& tensor : merged) {
    std::ranges::sort(tensor.pieces, {}, &CheckpointPiece::first);
    reader.check_pieces(tensor, index.files);
  }
  index.tensors = std::move(merged);
  return index;
}

}  // namespace sherd
