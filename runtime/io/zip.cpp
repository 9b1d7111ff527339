// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/quote.h>
#include <sherd/runtime/io/zip.h>
#include <zlib.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

namespace sherd {
namespace {

constexpr std::uint32_t kLocalHeader = 0x04034b50, kDirectoryHeader = 0x02014b50,
                        kDirectoryEnd = 0x06054b50, kDirectoryEnd64 = 0x06064b50,
                        kLocator64 = 0x07064b50;
constexpr std::uint64_t kLocalBytes = 30, kHeaderBytes = 46, kEndBytes = 22, kEnd64Bytes = 56,
                        kLocatorBytes = 20;
constexpr std::uint64_t kLongestComment = 65535;
constexpr std::uint16_t kExtra64 = 1;  // the extra field with the sizes that need 64 bits

using Span = std::span<const std::uint8_t>;

template <typename T>
T little_endian(Span bytes, std::uint64_t offset) {
  T value = 0;
  for (std::size_t i = sizeof(T); i-- > 0;) value = static_cast<T>(value << 8 | bytes[offset + i]);
  return value;
}
std::uint16_t u16(Span bytes, std::uint64_t offset) {
  return little_endian<std::uint16_t>(bytes, offset);
}
std::uint32_t u32(Span bytes, std::uint64_t offset) {
  return (std::uint32_t{u16(bytes, offset + 2)} << 16) | u16(bytes, offset);
}
std::uint64_t u64(Span bytes, std::uint64_t offset) {
  return (std::uint64_t{u32(bytes, offset + 4)} << 32) | u32(bytes, offset);
}

std::string_view text(Span bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

struct Directory {
  std::uint64_t offset = 0, size = 0, entries = 0;
};

// The end record stands last, before a comment whose length it gives: the first from the end that
// does so exactly.
std::uint64_t find_end(Span file, const std::string& path) {
  SHERD_CHECK(file.size() >= kEndBytes,
              "'{}' is not a whole zip archive: it has {} bytes, expected at least {}", path,
              file.size(), kEndBytes);
  for (std::uint64_t comment = 0;
       comment <= std::min<std::uint64_t>(kLongestComment, file.size() - kEndBytes); ++comment) {
    const std::uint64_t at = file.size() - kEndBytes - comment;
    if (u32(file, at) == kDirectoryEnd && u16(file, at + 20) == comment) return at;
  }
  fail(
      "zip archive '{}' is truncated: its directory, which stands at the end, is not there; fetch "
      "it again",
      path);
}

Directory find_directory(Span file, const std::string& path) {
  std::uint64_t end = find_end(file, path);
  const auto one_disk = [&](bool condition) {
    SHERD_CHECK(condition, "zip archive '{}' is one of several parts: join them first", path);
  };
  Directory found;
  const bool has64 =
      end >= kLocatorBytes + kEnd64Bytes && u32(file, end - kLocatorBytes) == kLocator64;
  if (has64) {
    const std::uint64_t locator = end - kLocatorBytes;
    const std::uint64_t at = u64(file, locator + 8);
    one_disk(u32(file, locator + 4) == 0 && u32(file, locator + 16) <= 1);
    SHERD_CHECK(at <= locator - kEnd64Bytes && u32(file, at) == kDirectoryEnd64,
                "zip archive '{}': expected its zip64 end record at {}, found none", path, at);
    one_disk(u32(file, at + 16) == 0 && u32(file, at + 20) == 0 &&
             u64(file, at + 24) == u64(file, at + 32));
    found = {u64(file, at + 48), u64(file, at + 40), u64(file, at + 32)};
    end = at;
  } else {
    one_disk(u16(file, end + 4) == 0 && u16(file, end + 6) == 0 &&
             u16(file, end + 8) == u16(file, end + 10));
    found = {u32(file, end + 16), u32(file, end + 12), u16(file, end + 10)};
  }
  SHERD_CHECK(found.offset <= end && found.size <= end - found.offset,
              "zip archive '{}': its directory of {} bytes at {} does not lie before {}", path,
              found.size, found.offset, end);
  SHERD_CHECK(found.entries <= found.size / kHeaderBytes,
              "zip archive '{}': {} entries do not fit its directory of {} bytes", path,
              found.entries, found.size);
  return found;
}

void check_name(std::string_view name, const std::string& path) {
  const auto bad = [&](const char* what) {
    fail("zip archive '{}': the entry name {} {}; such names are not read", path, quote(name),
         what);
  };
  if (name.empty()) bad("is empty");
  if (name.front() == '/') bad("begins with '/'");
  if (name.find('\0') != std::string_view::npos) bad("holds a NUL");
  if (name.find('\\') != std::string_view::npos) bad("holds a '\\'");
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('/', begin), name.size());
    if (name.substr(begin, end - begin) == "..") bad("holds '..'");
    begin = end + 1;
  }
}

// Fields of 32 bits that hold only ones stand in the extra field instead, in this order.
void read_extra64(Span extra, const std::string& path, std::string_view name,
                  std::initializer_list<std::uint64_t*> fields) {
  std::optional<Span> wide;
  for (std::uint64_t at = 0; at + 4 <= extra.size();) {
    const std::uint64_t size = u16(extra, at + 2);
    SHERD_CHECK(size <= extra.size() - at - 4,
                "zip archive '{}': the extra field of {} is longer than its room", path,
                quote(name));
    if (u16(extra, at) == kExtra64 && !wide) wide = extra.subspan(at + 4, size);
    at += 4 + size;
  }
  std::uint64_t at = 0;
  for (std::uint64_t* field : fields) {
    if (*field != std::numeric_limits<std::uint32_t>::max() || !wide) continue;
    SHERD_CHECK(at + 8 <= wide->size(),
                "zip archive '{}': the zip64 field of {} has {} bytes, too few", path, quote(name),
                wide->size());
    *field = u64(*wide, at);
    at += 8;
  }
}

struct Placed {
  ZipEntry entry;
  std::uint64_t header = 0;  // of the local header
};

// One header of the directory, and the local one that it points to.
Placed read_entry(Span file, std::uint64_t directory, Span header, const std::string& path) {
  const std::uint64_t name_bytes = u16(header, 28), extra_bytes = u16(header, 30);
  const std::string_view name = text(header.subspan(kHeaderBytes, name_bytes));
  check_name(name, path);
  const auto check = [&]<typename... Args>(bool condition, fmt::format_string<Args...> format,
                                           Args&&... args) {
    if (condition) return;
    fail("zip archive '{}': entry {} {}", path, quote(name),
         fmt::format(format, std::forward<Args>(args)...));
  };
  Placed placed;
  ZipEntry& entry = placed.entry;
  entry.name = name;
  const std::uint16_t flags = u16(header, 8), method = u16(header, 10);
  constexpr std::uint16_t kEncrypted = 1 | 1 << 6 | 1 << 13;
  check((flags & kEncrypted) == 0, "is encrypted: decrypt the archive first");
  check(method == 0 || method == 8, "is packed by method {}, expected 0 (stored) or 8 (deflate)",
        method);
  entry.deflated = method == 8;
  entry.crc = u32(header, 16);
  entry.packed_size = u32(header, 20);
  entry.size = u32(header, 24);
  placed.header = u32(header, 42);
  read_extra64(header.subspan(kHeaderBytes + name_bytes, extra_bytes), path, name,
               {&entry.size, &entry.packed_size, &placed.header});
  check(u16(header, 34) == 0, "lies on another disk: join the parts of the archive first");
  check(entry.deflated || entry.size == entry.packed_size,
        "is stored, but has {} bytes in the file and {} in all", entry.packed_size, entry.size);

  const std::uint64_t at = placed.header;
  check(at <= directory && directory - at >= kLocalBytes && u32(file, at) == kLocalHeader,
        "should begin at {}, where no header is", at);
  check(u16(file, at + 6) == flags && u16(file, at + 8) == method,
        "has other flags or another method in its own header than in the directory");
  const std::uint64_t local_name = u16(file, at + 26);
  const std::uint64_t before = kLocalBytes + local_name + u16(file, at + 28);
  check(before <= directory - at, "has a header that runs into the directory");
  check(text(file.subspan(at + kLocalBytes, local_name)) == name,
        "has another name in its own header than in the directory");
  entry.offset = at + before;
  check(entry.packed_size <= directory - entry.offset,
        "has {} bytes at {}, more than lie before the directory at {}", entry.packed_size,
        entry.offset, directory);
  return placed;
}

void check_overlaps(std::vector<Placed>& all, const std::string& path) {
  std::ranges::sort(all, {}, &Placed::header);
  for (std::size_t i = 1; i < all.size(); ++i) {
    const ZipEntry& before = all[i - 1].entry;
    SHERD_CHECK(before.offset + before.packed_size <= all[i].header,
                "zip archive '{}': entries {} and {} overlap", path, quote(before.name),
                quote(all[i].entry.name));
  }
}

}  // namespace

bool is_zip(Span file) {
  return file.size() >= 4 && (u32(file, 0) == kLocalHeader || u32(file, 0) == kDirectoryEnd);
}

ZipArchive::ZipArchive(Span file, std::string path) : file_(file), path_(std::move(path)) {
  const Directory directory = find_directory(file, path_);
  Span rest = file.subspan(directory.offset, directory.size);
  std::vector<Placed> placed;
  placed.reserve(directory.entries);
  for (std::uint64_t i = 0; i < directory.entries; ++i) {
    SHERD_CHECK(rest.size() >= kHeaderBytes && u32(rest, 0) == kDirectoryHeader,
                "zip archive '{}': entry {} of {} is missing from its directory", path_, i + 1,
                directory.entries);
    const std::uint64_t bytes =
        kHeaderBytes + u16(rest, 28) + std::uint64_t{u16(rest, 30)} + u16(rest, 32);
    SHERD_CHECK(bytes <= rest.size(),
                "zip archive '{}': entry {} of {} runs past the end of its directory", path_, i + 1,
                directory.entries);
    placed.push_back(read_entry(file, directory.offset, rest.first(bytes), path_));
    entries_.push_back(placed.back().entry);
    rest = rest.subspan(bytes);
    SHERD_CHECK(index_.emplace(entries_.back().name, i).second,
                "zip archive '{}': the entry {} appears twice", path_, quote(entries_.back().name));
  }
  SHERD_CHECK(rest.empty(), "zip archive '{}': {} bytes follow the last entry of its directory",
              path_, rest.size());
  check_overlaps(placed, path_);
}

const ZipEntry* ZipArchive::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &entries_[found->second];
}

Span ZipArchive::stored(const ZipEntry& entry) const {
  SHERD_CHECK(!entry.deflated,
              "zip archive '{}': entry {} is compressed, and has to be stored to be read in place",
              path_, quote(entry.name));
  return file_.subspan(entry.offset, entry.packed_size);
}

Span ZipArchive::read(const ZipEntry& entry, std::uint64_t max_bytes,
                      std::vector<std::uint8_t>& room) const {
  // So that sizes fit zlib's counters.
  max_bytes = std::min<std::uint64_t>(max_bytes, std::numeric_limits<uInt>::max() / 2);
  SHERD_CHECK(entry.size <= max_bytes && entry.packed_size <= max_bytes,
              "zip archive '{}': entry {} has {} bytes ({} in the file), more than the {} allowed "
              "here",
              path_, quote(entry.name), entry.size, entry.packed_size, max_bytes);
  Span bytes = file_.subspan(entry.offset, entry.packed_size);
  if (entry.deflated) {
    // Deflate packs at most 1032 to 1, so a size beyond that is a lie that would cost its memory.
    SHERD_CHECK(entry.size / 1032 <= entry.packed_size,
                "zip archive '{}': entry {} cannot have {} bytes in {} packed ones", path_,
                quote(entry.name), entry.size, entry.packed_size);
    room.resize(entry.size);
    z_stream stream{};
    SHERD_CHECK(inflateInit2(&stream, -MAX_WBITS) == Z_OK, "zlib: not enough memory to inflate");
    std::uint8_t nothing = 0;  // zlib wants an address even for no bytes
    stream.next_in = const_cast<Bytef*>(bytes.data());
    stream.avail_in = static_cast<uInt>(bytes.size());
    stream.next_out = room.empty() ? &nothing : room.data();
    stream.avail_out = static_cast<uInt>(room.size());
    const int code = inflate(&stream, Z_FINISH);
    const bool whole = code == Z_STREAM_END && stream.avail_out == 0 && stream.avail_in == 0;
    inflateEnd(&stream);
    SHERD_CHECK(whole,
                "zip archive '{}': entry {} does not inflate from {} to the {} bytes it claims; "
                "fetch it again",
                path_, quote(entry.name), entry.packed_size, entry.size);
    bytes = room;
  }
  const auto crc = static_cast<std::uint32_t>(
      crc32(crc32(0, nullptr, 0), bytes.data(), static_cast<uInt>(bytes.size())));
  SHERD_CHECK(crc == entry.crc,
              "zip archive '{}': entry {} is damaged: its CRC-32 is {:08x}, expected {:08x}; fetch "
              "it again",
              path_, quote(entry.name), crc, entry.crc);
  return bytes;
}

}  // namespace sherd
