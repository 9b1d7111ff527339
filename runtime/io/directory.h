// SPDX-License-Identifier: Apache-2.0
// Directories that must survive a crash: what has been made, renamed or removed is on the disk when
// these functions return. Every error names the path and what the system said.
#pragma once

#include <sherd/runtime/api.h>

#include <string>

namespace sherd {

// Makes it, and those above it that are missing.
SHERD_API void make_directories(const std::string& path);
// Makes it; throws where there is something of that name.
SHERD_API void make_new_directory(const std::string& path);
// Flushes the names in it.
SHERD_API void sync_directory(const std::string& path);
// Gives a directory its name. One that has the name already is exchanged with it in one step, and
// then removed.
SHERD_API void rename_directory(const std::string& from, const std::string& to);
// With all that is in it. It is renamed to `hidden` first, so that no half of it is ever found
// under its name. Nothing where it is not there.
SHERD_API void remove_directory(const std::string& path, const std::string& hidden);
// What nobody looks for any more, a directory with all that is in it or a file. Nothing where it is
// not there.
SHERD_API void remove_tree(const std::string& path);
// Makes or replaces a symbolic link, in one step.
SHERD_API void point_link(const std::string& link, const std::string& target);

// Taken by one program at a time, on this machine and, where the file system knows locks, on
// others; the system gives it back when the program ends in whatever way.
class SHERD_API DirectoryLock {
 public:
  // Of a directory that is there, by a file `.lock` in it. Throws, naming the program that has it.
  // `doing`: what this one does there, for others to read ("written by a training run").
  DirectoryLock(const std::string& directory, const std::string& doing);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int descriptor_ = -1;
};

}  // namespace sherd
