// SPDX-License-Identifier: Apache-2.0
// A writer of zip archives for tests, none of the code under test in it.
#pragma once

#include <zlib.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sherd::test {

using ZipBytes = std::vector<std::uint8_t>;

inline void put_number(ZipBytes& out, std::uint64_t value, int width) {
  for (int i = 0; i < width; ++i) out.push_back(static_cast<std::uint8_t>(value >> (8 * i)));
}

struct ZipPart {
  std::string name;
  ZipBytes data;
  bool deflate = false;
};

inline ZipBytes deflated(const ZipBytes& plain) {
  z_stream stream{};
  deflateInit2(&stream, 6, Z_DEFLATED, -MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  ZipBytes packed(deflateBound(&stream, plain.size()));
  stream.next_in = const_cast<Bytef*>(plain.data());
  stream.avail_in = static_cast<uInt>(plain.size());
  stream.next_out = packed.data();
  stream.avail_out = static_cast<uInt>(packed.size());
  ::deflate(&stream, Z_FINISH);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

// zip64: sizes, offsets and counts stand in the wide fields alone, as where they need them.
inline ZipBytes make_zip(const std::vector<ZipPart>& parts, bool zip64 = false,
                         std::string_view comment = "") {
  constexpr std::uint32_t kWide = 0xffffffff;
  ZipBytes out, directory;
  for (const ZipPart& part : parts) {
    const ZipBytes packed = part.deflate ? deflated(part.data) : part.data;
    const auto crc = crc32(0, part.data.data(), static_cast<uInt>(part.data.size()));
    const std::uint64_t header = out.size();
    const auto common = [&](ZipBytes& to, bool wide) {
      put_number(to, 20, 2);  // version that is needed
      put_number(to, 0, 2);   // flags
      put_number(to, part.deflate ? 8 : 0, 2);
      put_number(to, 0, 4);  // time
      put_number(to, crc, 4);
      put_number(to, wide ? kWide : packed.size(), 4);
      put_number(to, wide ? kWide : part.data.size(), 4);
      put_number(to, part.name.size(), 2);
    };
    put_number(out, 0x04034b50, 4);
    common(out, false);
    put_number(out, 6, 2);  // an extra field, as torch.save has for alignment
    out.insert(out.end(), part.name.begin(), part.name.end());
    for (const std::uint8_t byte : ZipBytes{'F', 'B', 2, 0, 'Z', 'Z'}) out.push_back(byte);
    out.insert(out.end(), packed.begin(), packed.end());

    put_number(directory, 0x02014b50, 4);
    put_number(directory, 20, 2);
    common(directory, zip64);
    put_number(directory, zip64 ? 28 : 0, 2);
    put_number(directory, 0, 2);  // comment
    put_number(directory, 0, 2);  // disk
    put_number(directory, 0, 6);  // attributes
    put_number(directory, zip64 ? kWide : header, 4);
    directory.insert(directory.end(), part.name.begin(), part.name.end());
    if (zip64) {
      put_number(directory, 1, 2);
      put_number(directory, 24, 2);
      put_number(directory, part.data.size(), 8);
      put_number(directory, packed.size(), 8);
      put_number(directory, header, 8);
    }
  }
  const std::uint64_t at = out.size();
  out.insert(out.end(), directory.begin(), directory.end());
  if (zip64) {
    const std::uint64_t end = out.size();
    put_number(out, 0x06064b50, 4);
    put_number(out, 44, 8);
    put_number(out, 20, 2);
    put_number(out, 20, 2);
    put_number(out, 0, 8);  // disks
    put_number(out, parts.size(), 8);
    put_number(out, parts.size(), 8);
    put_number(out, directory.size(), 8);
    put_number(out, at, 8);
    put_number(out, 0x07064b50, 4);
    put_number(out, 0, 4);
    put_number(out, end, 8);
    put_number(out, 1, 4);
  }
  put_number(out, 0x06054b50, 4);
  put_number(out, 0, 4);  // disks
  put_number(out, zip64 ? 0xffff : parts.size(), 2);
  put_number(out, zip64 ? 0xffff : parts.size(), 2);
  put_number(out, zip64 ? kWide : directory.size(), 4);
  put_number(out, zip64 ? kWide : at, 4);
  put_number(out, comment.size(), 2);
  out.insert(out.end(), comment.begin(), comment.end());
  return out;
}

// An archive as torch.save lays it out.
inline ZipBytes make_torch_zip(const ZipBytes& pickle,
                               const std::vector<std::pair<std::string, ZipBytes>>& storages,
                               std::string_view byteorder = "little") {
  std::vector<ZipPart> parts{{"archive/data.pkl", pickle}};
  if (!byteorder.empty()) {
    parts.push_back({"archive/byteorder", {byteorder.begin(), byteorder.end()}});
  }
  for (const auto& [key, bytes] : storages) parts.push_back({"archive/data/" + key, bytes});
  parts.push_back({"archive/version", {'3', '\n'}});
  return make_zip(parts);
}

}  // namespace sherd::test
