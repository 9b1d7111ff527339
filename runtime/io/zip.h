// SPDX-License-Identifier: Apache-2.0
// Zip archives in memory (a mapped file), read through their central directory (PKWARE's APPNOTE,
// 4.3), zip64 included. Entries stored as they are can be looked at in place.
//
// The reader trusts nothing: entries lie inside the file before the directory, overlap nowhere, say
// the same in both of their headers, and have names that stay inside a folder. One disk, no
// encryption, methods 0 (stored) and 8 (deflate). Each failed check is an Error that names the file
// and the entry.
#pragma once

#include <sherd/runtime/api.h>

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sherd {

struct ZipEntry {
  std::string_view name;
  bool deflated = false;
  std::uint64_t offset = 0;       // of its first byte, from the beginning of the file
  std::uint64_t packed_size = 0;  // bytes in the file
  std::uint64_t size = 0;         // bytes once inflated
  std::uint32_t crc = 0;          // CRC-32 of those
};

// "PK\3\4" or, for an archive without entries, "PK\5\6".
SHERD_API bool is_zip(std::span<const std::uint8_t> file);

// The directory of an archive; `file` outlives it, `path` only serves messages.
class SHERD_API ZipArchive {
 public:
  ZipArchive(std::span<const std::uint8_t> file, std::string path);

  const std::string& path() const { return path_; }
  const std::vector<ZipEntry>& entries() const { return entries_; }  // in the directory's order
  const ZipEntry* find(std::string_view name) const;                 // nullptr if there is none

  // The bytes of a stored entry, where they lie. Their checksum is not looked at: that would read
  // all of them.
  std::span<const std::uint8_t> stored(const ZipEntry& entry) const;

  // All bytes of an entry, inflated where needed, its checksum compared. `room` keeps inflated
  // bytes, the result points into it or into the file. An entry of more than max_bytes is an error
  // before any memory is taken, and inflating stops at the size the entry gives.
  std::span<const std::uint8_t> read(const ZipEntry& entry, std::uint64_t max_bytes,
                                     std::vector<std::uint8_t>& room) const;

 private:
  std::span<const std::uint8_t> file_;
  std::string path_;
  std::vector<ZipEntry> entries_;
  std::map<std::string_view, std::size_t> index_;
};

}  // namespace sherd
