// SPDX-License-Identifier: Apache-2.0
// Helpers of the tests that touch files: a temporary directory, gzip, and the text of an error.
#pragma once

#include <doctest/doctest.h>
#include <sherd/runtime/error.h>
#include <stdlib.h>
#include <zlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace sherd::test {

// A fresh directory, removed with all its content at the end.
class TempDirectory {
 public:
  TempDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "sherd-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = pattern;
  }
  ~TempDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;

  std::string path(std::string_view name = "") const {
    return name.empty() ? path_ : path_ + "/" + std::string(name);
  }

  // Names of what it holds now.
  std::size_t file_count() const {
    std::size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      count += entry.exists() ? 1 : 0;
    }
    return count;
  }

 private:
  std::string path_;
};

using Bytes = std::vector<std::uint8_t>;

inline Bytes bytes_of(std::string_view text) {
  return Bytes(text.begin(), text.end());
}

// Writes without any of the code under test.
inline void put_file(const std::string& path, const Bytes& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path);
}

inline Bytes gzip(const Bytes& plain) {
  z_stream stream{};
  deflateInit2(&stream, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  Bytes packed(deflateBound(&stream, plain.size()));
  stream.next_in = const_cast<Bytef*>(plain.data());
  stream.avail_in = static_cast<uInt>(plain.size());
  stream.next_out = packed.data();
  stream.avail_out = static_cast<uInt>(packed.size());
  deflate(&stream, Z_FINISH);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

// The message of the sherd::Error that `action` throws; fails the test if it throws none.
template <typename Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  FAIL_CHECK("expected a sherd::Error");
  return "";
}

// Checks that every piece occurs in the message.
template <typename... Pieces>
void check_mentions(const std::string& message, const Pieces&... pieces) {
  CAPTURE(message);
  for (const std::string& piece : {std::string(pieces)...}) {
    CAPTURE(piece);
    CHECK(message.find(piece) != std::string::npos);
  }
}

}  // namespace sherd::test
