// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/directory.h>
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/io/system_error.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <system_error>
#include <utility>

namespace sherd {
namespace {

// Closes on every way out.
struct Descriptor {
  int value;
  explicit Descriptor(int v) : value(v) {}
  ~Descriptor() { ::close(value); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
};

int open_for_reading(const std::string& path, struct stat* status) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail_on_path("open", path, errno);
  const int error = ::fstat(descriptor, status) != 0 ? errno
                    : S_ISDIR(status->st_mode)       ? EISDIR
                                                     : 0;
  if (error != 0) {
    ::close(descriptor);
    fail_on_path("read", path, error);
  }
  return descriptor;
}

void write_all(int descriptor, const std::uint8_t* data, std::size_t size,
               const std::string& path) {
  while (size > 0) {
    const ssize_t written = ::write(descriptor, data, size);
    if (written < 0) {
      if (errno == EINTR) continue;
      fail_on_path("write", path, errno);
    }
    data += written;
    size -= static_cast<std::size_t>(written);
  }
}

std::span<const std::uint8_t> as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

std::vector<std::uint8_t> read_at_most(const std::string& path, std::uint64_t max_bytes) {
  struct stat status {};
  const Descriptor file(open_for_reading(path, &status));
  const auto expected = static_cast<std::uint64_t>(status.st_size);
  SHERD_CHECK(expected <= max_bytes, "'{}' has {} bytes, more than the {} allowed here", path,
              expected, max_bytes);
  // The size is a hint (files of /proc say 0); one byte more, so that the end is seen in place.
  std::vector<std::uint8_t> bytes(expected > 0 ? expected + 1 : 65536);
  std::size_t used = 0;
  for (;;) {
    if (used == bytes.size()) bytes.resize(2 * bytes.size());
    const ssize_t count = ::read(file.value, bytes.data() + used, bytes.size() - used);
    if (count < 0) {
      if (errno == EINTR) continue;
      fail_on_path("read", path, errno);
    }
    if (count == 0) break;
    used += static_cast<std::size_t>(count);
    SHERD_CHECK(used <= max_bytes, "'{}' has more than the {} bytes allowed here", path, max_bytes);
  }
  bytes.resize(used);
  return bytes;
}

class Inflater {
 public:
  Inflater() {
    const int gzip_only = 16 + MAX_WBITS;
    SHERD_CHECK(inflateInit2(&stream_, gzip_only) == Z_OK, "zlib: not enough memory to inflate");
  }
  ~Inflater() { inflateEnd(&stream_); }
  Inflater(const Inflater&) = delete;
  Inflater& operator=(const Inflater&) = delete;

  z_stream* operator->() { return &stream_; }
  z_stream* get() { return &stream_; }

 private:
  z_stream stream_{};
};

std::vector<std::uint8_t> inflate_all(const std::vector<std::uint8_t>& packed,
                                      std::uint64_t max_bytes, const std::string& path) {
  constexpr std::size_t kPiece = std::numeric_limits<uInt>::max() / 4;  // zlib counts in 32 bits
  Inflater inflater;
  std::vector<std::uint8_t> out;
  std::size_t consumed = 0;
  std::size_t produced = 0;
  for (;;) {
    if (produced == out.size()) {
      SHERD_CHECK(produced <= max_bytes,
                  "gzip file '{}' inflates to more than the {} bytes allowed "
                  "here: it is not what was expected, or a decompression bomb",
                  path, max_bytes);
      // One byte beyond the limit tells "exactly full" from "too much".
      out.resize(std::min<std::uint64_t>(std::max<std::size_t>(65536, 2 * out.size()),
                                         max_bytes == UINT64_MAX ? max_bytes : max_bytes + 1));
    }
    const std::size_t give = std::min(packed.size() - consumed, kPiece);
    const std::size_t room = std::min(out.size() - produced, kPiece);
    inflater->next_in = const_cast<Bytef*>(packed.data() + consumed);
    inflater->avail_in = static_cast<uInt>(give);
    inflater->next_out = out.data() + produced;
    inflater->avail_out = static_cast<uInt>(room);
    const int code = inflate(inflater.get(), Z_NO_FLUSH);
    consumed += give - inflater->avail_in;
    produced += room - inflater->avail_out;
    SHERD_CHECK(produced <= max_bytes,
                "gzip file '{}' inflates to more than the {} bytes allowed "
                "here: it is not what was expected, or a decompression bomb",
                path, max_bytes);
    if (code == Z_STREAM_END) {
      if (consumed == packed.size()) break;
      const bool another =
          packed.size() - consumed >= 2 && packed[consumed] == 0x1f && packed[consumed + 1] == 0x8b;
      SHERD_CHECK(another, "gzip file '{}' has {} bytes after its end", path,
                  packed.size() - consumed);
      inflateReset(inflater.get());
      continue;
    }
    // zlib asks for more input (Z_BUF_ERROR) or has eaten all of it without reaching the end.
    const bool starved = consumed == packed.size() && inflater->avail_out > 0;
    SHERD_CHECK(
        !(starved && (code == Z_OK || code == Z_BUF_ERROR)),
        "gzip file '{}' is truncated: its {} bytes end inside the stream, after {} inflated "
        "bytes; fetch it again",
        path, packed.size(), produced);
    SHERD_CHECK(code == Z_OK || code == Z_BUF_ERROR,
                "gzip file '{}' is corrupt near byte {}: {}; fetch it again", path, consumed,
                inflater->msg != nullptr ? inflater->msg : zError(code));
  }
  out.resize(produced);
  return out;
}

}  // namespace

std::vector<std::uint8_t> read_file(const std::string& path) {
  return read_at_most(path, UINT64_MAX);
}

std::vector<std::uint8_t> read_maybe_gzip(const std::string& path, std::uint64_t max_bytes) {
  std::vector<std::uint8_t> bytes = read_at_most(path, max_bytes);
  const bool gzip = bytes.size() >= 2 && bytes[0] == 0x1f && bytes[1] == 0x8b;
  return gzip ? inflate_all(bytes, max_bytes, path) : bytes;
}

MappedFile::MappedFile(const std::string& path) {
  struct stat status {};
  const Descriptor file(open_for_reading(path, &status));
  SHERD_CHECK(S_ISREG(status.st_mode), "cannot map '{}': it is not a regular file", path);
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) return;  // mmap refuses an empty range
  void* address = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.value, 0);
  if (address == MAP_FAILED) fail_on_path("map", path, errno);
  data_ = static_cast<const std::uint8_t*>(address);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::uint8_t*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

AtomicFile::AtomicFile(std::string path, Appears appears) : path_(std::move(path)) {
  struct stat status {};
  if (::stat(path_.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) {
    fail_on_path("write", path_, EISDIR);
  }
  if (appears == Appears::within_directory) {
    temporary_ = path_;
    descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ < 0) fail_on_path("create", path_, errno);
    return;
  }
  // O_EXCL makes the name unique among threads and among leftovers of a killed process.
  for (int n = 0;; ++n) {
    temporary_ = fmt::format("{}.tmp-{}-{}", path_, ::getpid(), n);
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ >= 0) return;
    if (errno == EEXIST && n < 10000) continue;
    if (errno == EINTR) continue;
    fail_on_path("create", temporary_, errno);
  }
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!committed_) ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::span<const std::uint8_t> bytes) {
  SHERD_CHECK(descriptor_ >= 0, "'{}' was committed already: nothing more can be written", path_);
  write_all(descriptor_, bytes.data(), bytes.size(), temporary_);
}

void AtomicFile::write(std::string_view text) {
  write(as_bytes(text));
}

void AtomicFile::write_at(std::uint64_t offset, std::span<const std::uint8_t> bytes) {
  SHERD_CHECK(descriptor_ >= 0, "'{}' was committed already: nothing more can be written", path_);
  while (!bytes.empty()) {
    const ssize_t written =
        ::pwrite(descriptor_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_on_path("write", temporary_, errno);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

void AtomicFile::commit() {
  SHERD_CHECK(descriptor_ >= 0, "'{}' was committed already", path_);
  // The bytes must be on the disk before the name points at them, or a power cut may leave the new
  // name with no content.
  if (::fsync(descriptor_) != 0) fail_on_path("flush", temporary_, errno);
  if (::close(std::exchange(descriptor_, -1)) != 0) fail_on_path("close", temporary_, errno);
  if (temporary_ == path_) {
    committed_ = true;
    return;
  }
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_on_path("rename to", path_, errno);
  committed_ = true;
  sync_directory(directory_of(path_));
}

void write_file_atomically(const std::string& path, std::span<const std::uint8_t> bytes) {
  AtomicFile file(path);
  file.write(bytes);
  file.commit();
}

void write_file_atomically(const std::string& path, std::string_view text,
                           AtomicFile::Appears appears) {
  AtomicFile file(path, appears);
  file.write(text);
  file.commit();
}

void create_new_file(const std::string& path, std::string_view text) {
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) {
    SHERD_CHECK(errno != EEXIST, "'{}' is there already; choose another name, nothing was changed",
                path);
    fail_on_path("create", path, errno);
  }
  const Descriptor closing(descriptor);
  try {
    write_all(descriptor, as_bytes(text).data(), text.size(), path);
  } catch (...) {
    ::unlink(path.c_str());  // half of it would be in the way of the next who tries
    throw;
  }
}

JsonLinesLog::JsonLinesLog(std::string path, Mode mode) : path_(std::move(path)) {
  const int flags = O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC;
  descriptor_ = ::open(path_.c_str(), mode == Mode::truncate ? flags | O_TRUNC : flags, 0666);
  if (descriptor_ < 0) fail_on_path("open the log", path_, errno);
  struct stat status {};
  char last = '\n';
  if (::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode) && status.st_size > 0 &&
      ::pread(descriptor_, &last, 1, status.st_size - 1) == 1 && last != '\n') {
    try {
      write_all(descriptor_, as_bytes("\n").data(), 1, path_);
    } catch (...) {
      ::close(descriptor_);
      throw;
    }
  }
}

JsonLinesLog::~JsonLinesLog() {
  ::close(descriptor_);
}

void JsonLinesLog::write(const std::string& json_line) {
  SHERD_CHECK(!json_line.empty() && json_line.find('\n') == std::string::npos,
              "the log '{}' takes one JSON value a line: got {}", path_,
              json_line.empty() ? "an empty line" : "text with a line break");
  const std::string line = json_line + '\n';
  const off_t end = ::lseek(descriptor_, 0, SEEK_END);  // of a pipe there is none
  try {
    write_all(descriptor_, as_bytes(line).data(), line.size(), path_);
  } catch (...) {
    // Half a line would spoil the next, which may say why.
    if (end >= 0) (void)!::ftruncate(descriptor_, end);
    throw;
  }
}

}  // namespace sherd
