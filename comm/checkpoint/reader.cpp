// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/checkpoint/reader.h>

#include <fcntl.h>
#include <sherd/comm/checkpoint/block_checksum.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/io/system_error.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

namespace sherd {
namespace {

namespace fs = std::filesystem;

}  // namespace

CheckpointReader::CheckpointReader(std::string directory) : directory_(std::move(directory)) {
  const std::string path = (fs::path(directory_) / "index.json").string();
  std::error_code error;
  SHERD_CHECK(fs::exists(path, error),
              "'{}' is not a checkpoint: it has no index.json; expected a directory such as "
              "RUN/checkpoints/step-00001000",
              directory_);
  const std::vector<std::uint8_t> text = read_file(path);
  index_ = parse_checkpoint_index({reinterpret_cast<const char*>(text.data()), text.size()}, path);
  for (std::size_t i = 0; i < index_.files.size(); ++i) {
    const std::string name = index_.files[i].name;
    const std::uintmax_t size = fs::file_size(path_of(i), error);
    SHERD_CHECK(!error, "checkpoint '{}': its file {}: {}; it is not whole, use another checkpoint",
                directory_, name, error.message());
    SHERD_CHECK(size == index_.files[i].bytes,
                "checkpoint '{}': its file {} has {} bytes, expected {}; it is not whole, use "
                "another checkpoint",
                directory_, name, size, index_.files[i].bytes);
  }
}

CheckpointReader::~CheckpointReader() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

std::string CheckpointReader::path_of(std::size_t file) const {
  return (fs::path(directory_) / index_.files[file].name).string();
}

std::string CheckpointReader::config() const {
  if (index_.config_checksum == 0) return {};
  const std::string path = (fs::path(directory_) / "config.toml").string();
  const std::vector<std::uint8_t> bytes = read_file(path);
  SHERD_CHECK(checkpoint_checksum(bytes) == index_.config_checksum,
              "checkpoint '{}': config.toml is damaged or was edited: its checksum is wrong; flags "
              "change settings of a run that goes on",
              directory_);
  return {bytes.begin(), bytes.end()};
}

void CheckpointReader::read_at(std::size_t file, std::uint64_t offset,
                               std::span<std::uint8_t> bytes) const {
  if (descriptor_ < 0 || open_file_ != file) {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = ::open(path_of(file).c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor_ < 0) fail_on_path("open", path_of(file), errno);
    open_file_ = file;
  }
  bytes_read_ += bytes.size();
  while (!bytes.empty()) {
    const ssize_t count =
        ::pread(descriptor_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    SHERD_CHECK(count > 0, "cannot read '{}' at byte {}: {}", path_of(file), offset,
                count < 0 ? std::system_category().message(errno) : "it ends there");
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    offset += static_cast<std::uint64_t>(count);
  }
}

std::uint64_t CheckpointReader::read_and_sum(std::size_t file, std::uint64_t offset,
                                             std::span<std::uint8_t> bytes) const {
  BlockChecksum checksum;
  while (!bytes.empty()) {
    const auto part = bytes.first(std::min(bytes.size(), BlockChecksum::kPart));
    read_at(file, offset, part);
    checksum.add(part);
    offset += part.size();
    bytes = bytes.subspan(part.size());
  }
  return checksum.take();
}

void CheckpointReader::read_blocks(const CheckpointTensor& tensor, std::int64_t first,
                                   std::int64_t numel, std::uint8_t* memory, const Use& use) const {
  constexpr std::uint64_t kBlock = CheckpointIndex::kBlock;
  SHERD_CHECK(first >= 0 && numel >= 0 && first <= tensor.shape.numel() - numel,
              "checkpoint '{}': elements {} to {} of {} {}", directory_, first, first + numel,
              tensor.key(), tensor.shape.to_string());
  const auto element = static_cast<std::uint64_t>(size_of(tensor.dtype));
  const std::int64_t last = first + numel;
  const auto after = std::ranges::upper_bound(tensor.pieces, first, {}, &CheckpointPiece::first);
  for (auto piece = after == tensor.pieces.begin() ? after : after - 1;
       piece != tensor.pieces.end() && piece->first < last; ++piece) {
    const std::uint64_t bytes = static_cast<std::uint64_t>(piece->numel) * element;
    // What is wanted of the piece, in its bytes; and where that is among what is asked for.
    const auto begin =
        static_cast<std::uint64_t>(std::max(first - piece->first, std::int64_t{0})) * element;
    const auto end =
        static_cast<std::uint64_t>(std::min(last - piece->first, piece->numel)) * element;
    const std::uint64_t place =
        static_cast<std::uint64_t>(std::max(piece->first - first, std::int64_t{0})) * element;
    for (std::uint64_t at = begin / kBlock * kBlock; at < end; at += kBlock) {
      const std::uint64_t size = std::min(kBlock, bytes - at);
      const std::uint64_t from = std::max(at, begin), to = std::min(at + size, end);
      const bool whole = memory != nullptr && from == at && to == at + size;
      if (!whole) block_.resize(size);
      const std::span<std::uint8_t> block =
          whole ? std::span(memory + place + (at - begin), size) : std::span(block_);
      SHERD_CHECK(
          read_and_sum(piece->file, piece->offset + at, block) == piece->checksums[at / kBlock],
          "checkpoint '{}': {} is damaged between bytes {} and {} (in tensor {}): its "
          "checksum is wrong; use another checkpoint",
          directory_, index_.files[piece->file].name, piece->offset + at, piece->offset + at + size,
          tensor.key());
      if (whole) continue;
      const auto part = block.subspan(from - at, to - from);
      if (memory != nullptr) {
        std::memcpy(memory + place + (from - begin), part.data(), part.size());
      } else {
        use(place + (from - begin), part);
      }
    }
  }
}

void CheckpointReader::read_bytes(const CheckpointTensor& tensor, std::int64_t first,
                                  std::span<std::uint8_t> bytes) const {
  const std::size_t element = size_of(tensor.dtype);
  SHERD_CHECK(bytes.size() % element == 0, "{} bytes of elements of {}", bytes.size(), element);
  read_blocks(tensor, first, static_cast<std::int64_t>(bytes.size() / element), bytes.data(), {});
}

void CheckpointReader::read(const CheckpointTensor& tensor, std::int64_t first,
                            const Tensor& elements) const {
  if (elements.context().is_meta() || elements.numel() == 0) return;
  SHERD_CHECK(is_floating(tensor.dtype), "checkpoint '{}': {} is {}, a weight must be floating",
              directory_, tensor.key(), name_of(tensor.dtype));
  const Tensor flat = elements.reshape({elements.numel()});
  if (tensor.dtype == flat.dtype() && flat.device() == Device::cpu) {
    flat.storage().mark_modified();
    return read_blocks(tensor, first, flat.numel(), static_cast<std::uint8_t*>(flat.raw_data()),
                       {});
  }
  const auto element = static_cast<std::uint64_t>(size_of(tensor.dtype));
  const auto put = [&](std::uint64_t at, std::span<const std::uint8_t> part) {
    const auto begin = static_cast<std::int64_t>(at / element);
    const auto count = static_cast<std::int64_t>(part.size() / element);
    const Tensor to = flat.slice(0, begin, begin + count);
    if (tensor.dtype == flat.dtype()) return to.copy_from_host(part.data(), part.size());
    const Tensor other =
        Tensor::empty(flat.context(), {count}, tensor.dtype, MemoryCategory::workspace);
    other.copy_from_host(part.data(), part.size());
    copy(to, cast(other, flat.dtype(), MemoryCategory::workspace));
  };
  read_blocks(tensor, first, flat.numel(), nullptr, put);
}

void CheckpointReader::verify(
    const std::function<void(std::uint64_t, std::uint64_t)>& progress) const {
  config();
  std::uint64_t all = 0, done = 0;
  for (const CheckpointFile& file : index_.files) all += file.bytes;
  const auto advance = [&](std::uint64_t bytes) {
    done += bytes;
    if (progress) progress(done, all);
  };
  for (std::size_t i = 0; i < index_.files.size(); ++i) {
    std::vector<std::uint8_t> header(index_.files[i].header_bytes);
    read_at(i, 0, header);
    SHERD_CHECK(checkpoint_checksum(header) == index_.files[i].header_checksum,
                "checkpoint '{}': {} is damaged in its header: its checksum is wrong", directory_,
                index_.files[i].name);
    advance(header.size());
  }
  for (const CheckpointTensor& tensor : index_.tensors) {
    read_blocks(tensor, 0, tensor.shape.numel(), nullptr,
                [&](std::uint64_t, std::span<const std::uint8_t> part) { advance(part.size()); });
  }
}

}  // namespace sherd
