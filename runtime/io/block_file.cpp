// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/block_file.h>
#include <sherd/runtime/io/file.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <utility>

#include "block_file_queue.h"

namespace sherd {
namespace {

constexpr std::size_t kMaxChunk = std::size_t{1} << 30;  // the system moves less than 2 GiB at once
constexpr int kMaxDepth = 1024;

std::string system_message(int error) {
  return std::system_category().message(error);
}

void check_options(const std::string& path, std::uint64_t bytes, const BlockFileOptions& options) {
  constexpr std::size_t kAlignment = BlockFile::kAlignment;
  SHERD_CHECK(bytes > 0 && bytes % kAlignment == 0 && bytes <= INT64_MAX,
              "'{}': expected a size above 0 that is a multiple of {}, got {}", path, kAlignment,
              bytes);
  SHERD_CHECK(options.queue_depth >= 1 && options.queue_depth <= kMaxDepth,
              "'{}': expected a queue depth of 1 to {}, got {}", path, kMaxDepth,
              options.queue_depth);
  SHERD_CHECK(options.chunk > 0 && options.chunk % kAlignment == 0 && options.chunk <= kMaxChunk,
              "'{}': expected a chunk of {} to {} bytes that is a multiple of {}, got {}", path,
              kAlignment, kMaxChunk, kAlignment, options.chunk);
}

bool lock(int descriptor, int how) {
  int result = 0;
  do {
    result = ::flock(descriptor, how);
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

std::uint64_t allocated(const struct stat& status) {
  return static_cast<std::uint64_t>(status.st_blocks) * 512;
}

bool is_at(const std::string& path, int descriptor) {
  struct stat named {
  }, ours{};
  return ::lstat(path.c_str(), &named) == 0 && ::fstat(descriptor, &ours) == 0 &&
         named.st_dev == ours.st_dev && named.st_ino == ours.st_ino;
}

}  // namespace

std::string_view name_of(BlockEngine engine) {
  switch (engine) {
    case BlockEngine::automatic: return "automatic";
    case BlockEngine::io_uring: return "io_uring";
    case BlockEngine::threads: return "threads";
  }
  return "unknown";
}

// The file itself: made, reserved, opened; removed at the end.
class BlockFile::Scratch {
 public:
  Scratch(std::string path_to_make, std::uint64_t size, bool want_direct)
      : path(std::move(path_to_make)), bytes(size) {
    create();
    try {
      reserve();
      struct stat status {};
      solid = ::fstat(descriptor, &status) == 0 && allocated(status) >= bytes;
      if (want_direct) direct = try_direct();
    } catch (...) {
      remove();
      throw;
    }
  }
  ~Scratch() { remove(); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  enum class Found { same, nothing, other };
  Found look() const {
    struct stat named {
    }, ours{};
    if (::stat(path.c_str(), &named) != 0) return Found::nothing;
    if (::fstat(descriptor, &ours) != 0) return Found::other;
    const bool same = named.st_dev == ours.st_dev && named.st_ino == ours.st_ino;
    return same ? Found::same : Found::other;
  }

  const std::string path;
  const std::uint64_t bytes;
  int descriptor = -1;
  bool direct = false;
  bool solid = false;  // what is reserved counts as allocated here

 private:
  // Until it is locked the file looks abandoned, and another program may remove it.
  void create() {
    do {
      if (descriptor >= 0) ::close(descriptor);
      create_new_file(path, "");
      descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
      if (descriptor < 0 && errno == ENOENT) continue;
      if (descriptor >= 0 && lock(descriptor, LOCK_EX)) continue;
      const std::string reason = system_message(errno);
      const char* doing = descriptor < 0 ? "open" : "lock";
      ::unlink(path.c_str());
      if (descriptor >= 0) ::close(descriptor);
      fail("cannot {} '{}': {}; choose a directory on another file system", doing, path, reason);
    } while (!is_at(path, descriptor));
  }

  void reserve() const {
    // Asked first, so that a file far too large does not fill the disk before it fails.
    struct statvfs disk {};
    const bool known = ::fstatvfs(descriptor, &disk) == 0 && disk.f_blocks > 0;
    const std::uint64_t free = known ? std::uint64_t{disk.f_bavail} * disk.f_frsize : UINT64_MAX;
    int error = free < bytes ? ENOSPC : EINTR;
    while (error == EINTR) error = ::posix_fallocate(descriptor, 0, static_cast<off_t>(bytes));
    if (error == 0) return;
    if (error == ENOSPC || error == EDQUOT) {
      fail(
          "no room for '{}': it needs {} bytes, and its file system has {} bytes free for this "
          "user; free some space or choose another directory",
          path, bytes, known ? fmt::format("{}", free) : "an unknown number of");
    }
    fail("cannot reserve {} bytes for '{}': {}{}", bytes, path, system_message(error),
         error == EFBIG ? " (more than a file may have here: see ulimit -f)" : "");
  }

  // Some file systems refuse the flag, others only the transfer.
  bool try_direct() const {
    const int flags = ::fcntl(descriptor, F_GETFL);
    if (flags < 0 || ::fcntl(descriptor, F_SETFL, flags | O_DIRECT) != 0) return false;
    void* block = std::aligned_alloc(kAlignment, kAlignment);
    const bool read = ::pread(descriptor, block, kAlignment, 0) == ssize_t{kAlignment};
    std::free(block);
    if (!read) ::fcntl(descriptor, F_SETFL, flags);
    return read;
  }

  // Not what somebody else has put in its place.
  void remove() {
    if (is_at(path, descriptor)) ::unlink(path.c_str());
    ::close(std::exchange(descriptor, -1));
  }
};

BlockFile::BlockFile(std::string path, std::uint64_t bytes, BlockFileOptions options) {
  check_options(path, bytes, options);
  scratch_ = std::make_unique<Scratch>(std::move(path), bytes, options.direct);
  queue_ =
      std::make_unique<BlockQueue>(scratch_->path, options.chunk, std::move(options.alter_result));
  std::string reason;
  if (options.engine != BlockEngine::threads) {
    backend_ = make_block_uring(*queue_, scratch_->descriptor, options.queue_depth, reason);
    uring_ = backend_ != nullptr;
    SHERD_CHECK(uring_ || options.engine == BlockEngine::automatic,
                "'{}': io_uring is not possible here: {}; take the engine automatic or threads",
                scratch_->path, reason);
  }
  if (!backend_) {
    backend_ = make_block_threads(*queue_, scratch_->descriptor, options.queue_depth);
  }
}

BlockFile::~BlockFile() {
  queue_->close();
  backend_->wake();
  backend_.reset();
}

// What cannot be looked at, locked or removed stays.
void BlockFile::remove_abandoned(const std::string& directory, const std::string& prefix) {
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    if (!entry->path().filename().string().starts_with(prefix)) continue;
    const std::string path = entry->path().string();
    const int descriptor = ::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (descriptor < 0) continue;
    struct stat status {};
    const bool regular = ::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
    if (regular && lock(descriptor, LOCK_EX | LOCK_NB) && is_at(path, descriptor)) {
      ::unlink(path.c_str());
    }
    ::close(descriptor);
  }
}

const std::string& BlockFile::path() const {
  return scratch_->path;
}

std::uint64_t BlockFile::bytes() const {
  return scratch_->bytes;
}

std::string BlockFile::describe() const {
  return fmt::format("{}, {}", name_of(uring_ ? BlockEngine::io_uring : BlockEngine::threads),
                     scratch_->direct ? "direct" : "buffered");
}

BlockTransfer BlockFile::start_read(std::uint64_t offset, void* to, std::size_t bytes) {
  return start(false, offset, static_cast<std::byte*>(to), bytes);
}

BlockTransfer BlockFile::start_write(std::uint64_t offset, const void* from, std::size_t bytes) {
  return start(true, offset, static_cast<std::byte*>(const_cast<void*>(from)), bytes);
}

BlockTransfer BlockFile::start(bool write, std::uint64_t offset, std::byte* memory,
                               std::size_t bytes) {
  const char* name = write ? "start_write" : "start_read";
  SHERD_CHECK(offset % kAlignment == 0 && bytes % kAlignment == 0 &&
                  reinterpret_cast<std::uintptr_t>(memory) % kAlignment == 0,
              "{} on '{}': expected multiples of {}, got offset {}, {} bytes, address {}", name,
              path(), kAlignment, offset, bytes, static_cast<const void*>(memory));
  SHERD_CHECK(offset <= this->bytes() && bytes <= this->bytes() - offset,
              "{} on '{}': {} bytes at offset {} reach beyond its {} bytes", name, path(), bytes,
              offset, this->bytes());
  BlockTransfer transfer;
  transfer.state_ = std::make_shared<BlockTransferState>();
  transfer.state_->write = write;
  transfer.state_->offset = offset;
  transfer.state_->bytes = bytes;
  transfer.state_->memory = memory;
  queue_->push(transfer.state_);
  backend_->wake();
  return transfer;
}

void BlockFile::check_present() const {
  const Scratch::Found found = scratch_->look();
  SHERD_CHECK(found == Scratch::Found::same,
              "'{}' {} while this program uses it: leave it alone until the program ends, or "
              "choose a directory that nothing cleans up",
              path(), found == Scratch::Found::other ? "was replaced" : "was deleted or renamed");
  check_whole();
}

// A write beyond the new end makes the file as long as it was, with a hole where bytes are lost.
void BlockFile::check_whole() const {
  struct stat status {};
  SHERD_CHECK(::fstat(scratch_->descriptor, &status) == 0, "cannot look at '{}': {}", path(),
              system_message(errno));
  const auto now = static_cast<std::uint64_t>(status.st_size);
  SHERD_CHECK(now >= bytes(),
              "'{}' was cut short while this program uses it: expected {} bytes, it has {}", path(),
              bytes(), now);
  SHERD_CHECK(!scratch_->solid || allocated(status) >= bytes(),
              "'{}' was cut short while this program uses it: of its {} bytes the disk has {}",
              path(), bytes(), allocated(status));
}

}  // namespace sherd
