// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/directory.h>
#include <sherd/runtime/io/system_error.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

namespace sherd {
namespace {

namespace fs = std::filesystem;

void sync_parent(const std::string& path) {
  sync_directory(directory_of(path));
}

}  // namespace

void make_directories(const std::string& path) {
  std::error_code error;
  if (!fs::create_directories(path, error) && error) {
    fail_on_path("make the directory", path, error.value());
  }
  sync_parent(path);
}

void make_new_directory(const std::string& path) {
  if (::mkdir(path.c_str(), 0777) != 0) fail_on_path("make the directory", path, errno);
}

void sync_directory(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) fail_on_path("open", path, errno);
  // EINVAL: this file system has no such flush, and then needs none from us.
  const int error = ::fsync(descriptor) != 0 && errno != EINVAL ? errno : 0;
  ::close(descriptor);
  if (error != 0) fail_on_path("flush", path, error);
}

void rename_directory(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) == 0) return sync_parent(to);
  if (errno != ENOTEMPTY && errno != EEXIST) fail_on_path("rename to", to, errno);
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0) {
    // A file system without the exchange: for an instant there is none of that name, but both are
    // whole.
    const std::string old = from + ".old";
    if (::rename(to.c_str(), old.c_str()) != 0) fail_on_path("rename", to, errno);
    if (::rename(from.c_str(), to.c_str()) != 0) fail_on_path("rename to", to, errno);
    sync_parent(to);
    return remove_tree(old);
  }
  sync_parent(to);
  remove_tree(from);
}

void remove_directory(const std::string& path, const std::string& hidden) {
  if (::rename(path.c_str(), hidden.c_str()) != 0) {
    if (errno == ENOENT) return;
    fail_on_path("remove", path, errno);
  }
  sync_parent(path);
  remove_tree(hidden);
}

void remove_tree(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) fail_on_path("remove", path, error.value());
}

void point_link(const std::string& link, const std::string& target) {
  const std::string temporary = link + ".tmp";
  ::unlink(temporary.c_str());
  if (::symlink(target.c_str(), temporary.c_str()) != 0) {
    fail_on_path("make the link", temporary, errno);
  }
  if (::rename(temporary.c_str(), link.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary.c_str());
    fail_on_path("replace the link", link, error);
  }
  sync_parent(link);
}

DirectoryLock::DirectoryLock(const std::string& directory, const std::string& doing) {
  const std::string path = (fs::path(directory) / ".lock").string();
  descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor_ < 0) fail_on_path("open the lock", path, errno);
  int result = 0;
  do {
    result = ::flock(descriptor_, LOCK_EX | LOCK_NB);
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    const int error = errno;
    std::array<char, 512> text{};
    if (::pread(descriptor_, text.data(), text.size() - 1, 0) < 0) text[0] = '\0';
    ::close(std::exchange(descriptor_, -1));
    if (error != EWOULDBLOCK) fail_on_path("lock", path, error);
    fail("'{}' is being {}; wait until that has ended, or choose another directory", directory,
         text[0] != '\0' ? text.data() : "used by another program");
  }
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  const std::string text = fmt::format("{} (process {} on {})", doing, ::getpid(), host.data());
  // For people alone: whether it is written does not matter.
  if (::ftruncate(descriptor_, 0) != 0 || ::pwrite(descriptor_, text.data(), text.size(), 0) < 0) {
    return;
  }
}

DirectoryLock::~DirectoryLock() {
  ::close(descriptor_);
}

}  // namespace sherd
