// SPDX-License-Identifier: Apache-2.0
// Directories that appear, change places and go in one step; that they outlive a kill at any
// instant is what tests/kill/run finds out.
#include <doctest/doctest.h>
#include <sherd/runtime/io/directory.h>
#include <unistd.h>

#include <optional>

#include "io_support.h"

using namespace sherd;
using namespace sherd::test;
namespace fs = std::filesystem;

TEST_CASE("directory: a name is given, also where another has it") {
  const TempDirectory folder;
  const std::string from = folder.path(".new"), to = folder.path("name");
  for (const char* content : {"first", "second"}) {
    make_new_directory(from);
    put_file(from + "/" + content, bytes_of("x"));
    rename_directory(from, to);
    CHECK_FALSE(fs::exists(from));
    CHECK(fs::exists(to + "/" + content));
  }
  CHECK_FALSE(fs::exists(to + "/first"));
  CHECK(folder.file_count() == 1);
  check_mentions(error_of([&] { make_new_directory(to); }), "make the directory '" + to,
                 "File exists");
  check_mentions(error_of([&] { rename_directory(from, to); }), to, "No such file");
  CHECK(fs::exists(to + "/second"));
}

TEST_CASE("directory: what is removed goes with all that is in it") {
  const TempDirectory folder;
  const std::string path = folder.path("a");
  make_directories(path + "/b/c");
  put_file(path + "/b/file", bytes_of("x"));
  remove_directory(path, folder.path(".removed"));
  CHECK(folder.file_count() == 0);
  remove_directory(path, folder.path(".removed"));
  remove_tree(path);
  put_file(path, bytes_of("x"));
  remove_tree(path);
  CHECK(folder.file_count() == 0);
  put_file(path, bytes_of("x"));
  check_mentions(error_of([&] { make_directories(path + "/b"); }), path + "/b", "Not a directory");
}

TEST_CASE("directory: a link is made and replaced, but nothing else is") {
  const TempDirectory folder;
  const std::string link = folder.path("last");
  for (const char* target : {"one", "two", "two"}) {
    fs::create_symlink("old", link + ".tmp");  // of a killed program
    point_link(link, target);
    CHECK(fs::read_symlink(link) == target);
    CHECK_FALSE(fs::is_symlink(link + ".tmp"));
  }
  fs::remove(link);
  fs::create_directory(link);
  check_mentions(error_of([&] { point_link(link, "one"); }), "replace the link '" + link + "'");
  CHECK(fs::is_directory(link));
  CHECK_FALSE(fs::is_symlink(link + ".tmp"));
}

TEST_CASE("directory: a lock is one program's, who it is is said, and it goes back") {
  const TempDirectory folder;
  std::optional<DirectoryLock> lock(std::in_place, folder.path(), "swept");
  char host[256]{};
  REQUIRE(gethostname(host, sizeof host - 1) == 0);
  check_mentions(error_of([&] { DirectoryLock second(folder.path(), "painted"); }),
                 "'" + folder.path() + "' is being swept (process " + std::to_string(getpid()) +
                     " on " + host + "); wait until that has ended");
  lock.reset();
  CHECK_NOTHROW(DirectoryLock(folder.path(), "painted"));
  put_file(folder.path(".lock"), {});
  CHECK_NOTHROW(DirectoryLock(folder.path(), "painted"));
  check_mentions(error_of([&] { DirectoryLock(folder.path("none"), "x"); }), "open the lock");
}
