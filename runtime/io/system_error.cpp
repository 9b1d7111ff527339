// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/system_error.h>
#include <sys/stat.h>

#include <cerrno>
#include <system_error>

namespace sherd {

std::string directory_of(const std::string& path) {
  const auto slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

namespace {

// What the system said and, where it helps, what to do about it.
std::string reason(int error, const std::string& path) {
  const std::string text = std::system_category().message(error);
  switch (error) {
    case ENOENT: {
      const std::string directory = directory_of(path);
      struct stat status {};
      if (::stat(directory.c_str(), &status) == 0) return text;
      return fmt::format("{} (the directory '{}' does not exist: create it first)", text,
                         directory);
    }
    case EACCES:
    case EPERM:
    case EROFS: return text + " (check the permissions of the file and its directory)";
    case ENOSPC:
    case EDQUOT: return text + " (free some space or choose another directory)";
    default: return text;
  }
}

}  // namespace

void fail_on_path(const char* doing, const std::string& path, int error) {
  fail("cannot {} '{}': {}", doing, path, reason(error, path));
}

}  // namespace sherd
