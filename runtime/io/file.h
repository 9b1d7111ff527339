// SPDX-License-Identifier: Apache-2.0
// Files: whole-file reads (plain or gzip), read-only mappings, writes that appear completely or not
// at all, and a log of JSON lines.
//
// Every error is a sherd::Error that names the path and what the system said. Sizes are in bytes.
// No class here may be used by two threads at once.
#pragma once

#include <sherd/runtime/api.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sherd {

// The whole file.
SHERD_API std::vector<std::uint8_t> read_file(const std::string& path);

// The whole file, decompressed if it begins with gzip's two magic bytes (RFC 1952; several members
// in a row are one stream). Throws on a truncated or corrupt stream, on bytes after it, and, before
// taking the memory, when the result would exceed max_bytes: a few kilobytes of gzip can claim
// gigabytes.
SHERD_API std::vector<std::uint8_t> read_maybe_gzip(const std::string& path,
                                                    std::uint64_t max_bytes);

// A read-only view of a file through mmap: pages are read when touched. The file must not be
// truncated while it is mapped (touching a lost page raises SIGBUS); one replaced by rename, as
// AtomicFile does, stays readable.
class SHERD_API MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const std::uint8_t> bytes() const { return {data_, size_}; }

 private:
  const std::uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
};

// Writes a file that readers see completely or not at all: the bytes go to
// `<path>.tmp-<pid>-<n>` beside it; commit() flushes them to the disk and renames. Destroyed
// without commit(), or after an error, it removes the temporary and leaves what was at `path`
// untouched. A symbolic link at `path` is replaced, not followed.
//
// within_directory: the file is part of a directory that appears as a whole: it is made at `path`
// at once, which must be free, and commit() only flushes it; its name is flushed with the
// directory.
class SHERD_API AtomicFile {
 public:
  enum class Appears { at_commit, within_directory };
  explicit AtomicFile(std::string path, Appears appears = Appears::at_commit);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::uint8_t> bytes);
  void write(std::string_view text);
  // Anywhere; what write() does goes on from where it was.
  void write_at(std::uint64_t offset, std::span<const std::uint8_t> bytes);
  void commit();  // once, last

  const std::string& temporary_path() const { return temporary_; }

 private:
  std::string path_;
  std::string temporary_;
  int descriptor_ = -1;
  bool committed_ = false;
};

SHERD_API void write_file_atomically(const std::string& path, std::span<const std::uint8_t> bytes);
SHERD_API void write_file_atomically(const std::string& path, std::string_view text,
                                     AtomicFile::Appears appears = AtomicFile::Appears::at_commit);

// Creates a file that must not be there yet: of several programs that try, one succeeds. Where it
// cannot be written it is taken away again.
SHERD_API void create_new_file(const std::string& path, std::string_view text);

// One JSON value a line. Each line reaches the system in one append, so it survives a crash of this
// process, and one that fails leaves nothing; call it once per line, with text that holds no line
// break.
class SHERD_API JsonLinesLog {
 public:
  // `append` continues a file, on a fresh line even where a killed run left half of one.
  enum class Mode { append, truncate };

  JsonLinesLog(std::string path, Mode mode);
  ~JsonLinesLog();
  JsonLinesLog(const JsonLinesLog&) = delete;
  JsonLinesLog& operator=(const JsonLinesLog&) = delete;

  void write(const std::string& json_line);

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int descriptor_ = -1;
};

}  // namespace sherd
