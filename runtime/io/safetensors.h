// SPDX-License-Identifier: Apache-2.0
// safetensors files (https://github.com/huggingface/safetensors): an eight-byte little-endian
// header length, a JSON header naming every tensor's dtype, shape and byte range, then the bytes.
//
// The reader trusts nothing: a file is accepted only if its header is strict JSON in UTF-8 without
// duplicate keys, and its tensors tile the data exactly, with no hole, overlap or byte left over.
// Each failed check is an Error that names the file, the tensor and what was expected.
#pragma once

#include <sherd/runtime/api.h>
#include <sherd/runtime/dtype.h>
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/shape.h>

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sherd {

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  std::uint64_t offset = 0;  // of the first byte, from the beginning of the file; any alignment
  std::uint64_t size = 0;    // bytes
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;        // in the order of their bytes
  std::map<std::string, std::string> metadata;  // "__metadata__"
};

// Checks and reads the header of a complete file in memory; `path` only serves messages.
SHERD_API SafetensorsHeader parse_safetensors_header(std::span<const std::uint8_t> file_bytes,
                                                     const std::string& path);

// A file open for reading, mapped into memory: opening reads the header alone.
class SHERD_API SafetensorsFile {
 public:
  static SafetensorsFile open(const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }

  // nullptr if there is no such tensor.
  const SafetensorsEntry* find(std::string_view name) const;

  // The tensor's bytes, row-major and little-endian, valid while this object lives. They may start
  // at any address: copy them out, do not cast the pointer.
  std::span<const std::uint8_t> bytes(const SafetensorsEntry& entry) const;

 private:
  SafetensorsFile(std::string path, MappedFile file);

  std::string path_;
  MappedFile file_;
  SafetensorsHeader header_;
  std::map<std::string, std::size_t, std::less<>> index_;
};

// Writes a file whose tensors come one after the other, in any order, so that they need not be in
// memory together. Laid out as write_safetensors does; it appears at `path` with commit() alone.
class SHERD_API SafetensorsWriter {
 public:
  struct Item {
    std::string name;
    DType dtype = DType::f32;
    Shape shape;
  };
  SafetensorsWriter(const std::string& path, std::span<const Item> items,
                    const std::map<std::string, std::string>& metadata = {},
                    AtomicFile::Appears appears = AtomicFile::Appears::at_commit);

  // All bytes of one tensor, in one or more calls one after the other.
  void write(std::string_view name, std::span<const std::uint8_t> bytes);
  std::uint64_t offset(std::string_view name) const;  // of its first byte in the file
  // What comes before the tensors: the length and the header.
  std::span<const std::uint8_t> header() const { return header_; }
  std::uint64_t file_bytes() const { return file_bytes_; }
  void commit();  // throws where a tensor is missing

 private:
  struct Place {
    std::uint64_t offset = 0, size = 0, written = 0;
  };
  Place& place(std::string_view name);
  AtomicFile file_;
  std::string path_;
  std::vector<std::uint8_t> header_;
  std::uint64_t file_bytes_ = 0;
  std::map<std::string, Place, std::less<>> places_;
};

struct SafetensorsItem {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  std::span<const std::uint8_t> bytes;  // numel(shape) * size_of(dtype) of them
};

// Writes a file atomically (AtomicFile), the tensors straight from their spans. They are laid out
// by element size, largest first, then by name, and the header is padded so that the data starts at
// a multiple of 8: every tensor is aligned to its own element. Equal input gives equal bytes.
SHERD_API void write_safetensors(const std::string& path, std::span<const SafetensorsItem> items,
                                 const std::map<std::string, std::string>& metadata = {});

}  // namespace sherd
