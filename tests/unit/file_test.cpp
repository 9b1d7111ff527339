// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/runtime/io/file.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include "io_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

Bytes pattern_bytes(std::size_t size) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(i * i >> 3);
  return bytes;
}

// Within its scope a file of this process may not grow beyond `bytes`: a full disk in miniature.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    old_handler_ = ::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit limit{bytes, old_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    ::signal(SIGXFSZ, old_handler_);
  }

 private:
  rlimit old_{};
  void (*old_handler_)(int) = nullptr;
};

}  // namespace

TEST_CASE("file: read_file gives every byte") {
  const TempDirectory directory;
  for (const std::size_t size : {0, 1, 65535, 65536, 65537, 300000}) {
    const Bytes bytes = pattern_bytes(size);
    put_file(directory.path("a"), bytes);
    CHECK(read_file(directory.path("a")) == bytes);
    CHECK(read_maybe_gzip(directory.path("a"), size) == bytes);
    put_file(directory.path("a.gz"), gzip(bytes));
    CHECK(read_maybe_gzip(directory.path("a.gz"), std::max<std::size_t>(size, 100)) == bytes);
    const MappedFile mapped(directory.path("a"));
    CHECK(Bytes(mapped.bytes().begin(), mapped.bytes().end()) == bytes);
  }
  CHECK_FALSE(read_file("/proc/self/status").empty());  // its size reads 0
}

TEST_CASE("file: reading what cannot be read names the path and the reason") {
  const TempDirectory directory;
  const std::string absent = directory.path("absent");
  const std::string nowhere = directory.path("no/where");
  check_mentions(error_of([&] { read_file(absent); }), absent, "No such file");
  check_mentions(error_of([&] { read_maybe_gzip(absent, 10); }), absent, "No such file");
  check_mentions(error_of([&] { MappedFile file(absent); }), absent, "No such file");
  check_mentions(error_of([&] { read_file(nowhere); }), nowhere, "directory", "does not exist");
  check_mentions(error_of([&] { read_file(directory.path()); }), directory.path(),
                 "Is a directory");
  check_mentions(error_of([&] { MappedFile file("/dev/null"); }), "/dev/null",
                 "not a regular file");
}

TEST_CASE("file: MappedFile moves") {
  const TempDirectory directory;
  put_file(directory.path("a"), bytes_of("first"));
  put_file(directory.path("b"), bytes_of("second"));
  MappedFile a(directory.path("a"));
  MappedFile b(std::move(a));
  CHECK(b.bytes().size() == 5);
  b = MappedFile(directory.path("b"));
  CHECK(b.bytes()[0] == 's');
}

TEST_CASE("file: a gzip stream of several members is one file") {
  const TempDirectory directory;
  Bytes packed = gzip(bytes_of("one "));
  const Bytes second = gzip(bytes_of("two"));
  packed.insert(packed.end(), second.begin(), second.end());
  put_file(directory.path("a.gz"), packed);
  CHECK(read_maybe_gzip(directory.path("a.gz"), 100) == bytes_of("one two"));
}

TEST_CASE("file: a gzip stream cut anywhere is called truncated") {
  const TempDirectory directory;
  const std::string path = directory.path("a.gz");
  const Bytes packed = gzip(pattern_bytes(500));
  for (std::size_t size = 2; size < packed.size(); ++size) {
    CAPTURE(size);
    put_file(path, Bytes(packed.begin(), packed.begin() + static_cast<std::ptrdiff_t>(size)));
    check_mentions(error_of([&] { read_maybe_gzip(path, 1000); }), path, "truncated");
  }
}

TEST_CASE("file: a damaged gzip stream") {
  const TempDirectory directory;
  const std::string path = directory.path("a.gz");
  Bytes packed = gzip(pattern_bytes(500));
  packed[packed.size() - 6] ^= 1u;  // the checksum
  put_file(path, packed);
  check_mentions(error_of([&] { read_maybe_gzip(path, 1000); }), path, "corrupt", "data check");
  packed[packed.size() - 6] ^= 1u;
  packed.push_back(0);
  put_file(path, packed);
  check_mentions(error_of([&] { read_maybe_gzip(path, 1000); }), path, "1 bytes after its end");
}

TEST_CASE("file: the limit holds to the byte, and for a decompression bomb") {
  const TempDirectory directory;
  const std::string path = directory.path("bomb.gz");
  const Bytes packed = gzip(Bytes(10'000'000, 0));
  REQUIRE(packed.size() < 20'000);
  put_file(path, packed);
  CHECK(read_maybe_gzip(path, 10'000'000).size() == 10'000'000);
  for (const std::uint64_t limit : {9'999'999, 65536, 65535, 20'000}) {
    check_mentions(error_of([&] { read_maybe_gzip(path, limit); }), path, "more than",
                   std::to_string(limit));
  }
  put_file(path, Bytes(100, 7));
  CHECK(read_maybe_gzip(path, 100).size() == 100);
  check_mentions(error_of([&] { read_maybe_gzip(path, 99); }), path, "100 bytes", "99");
  check_mentions(error_of([&] { read_maybe_gzip("/proc/self/status", 5); }), "more than", "5");
}

TEST_CASE("file: AtomicFile shows nothing before commit and everything after") {
  const TempDirectory directory;
  const std::string path = directory.path("result");
  put_file(path, bytes_of("old"));
  {
    AtomicFile file(path);
    file.write("new ");
    file.write(bytes_of("bytes"));
    CHECK(file.temporary_path().starts_with(path + ".tmp-" + std::to_string(::getpid())));
    CHECK(read_file(path) == bytes_of("old"));
    CHECK(read_file(file.temporary_path()) == bytes_of("new bytes"));
    file.commit();
    CHECK(read_file(path) == bytes_of("new bytes"));
    check_mentions(error_of([&] { file.commit(); }), path, "already");
    check_mentions(error_of([&] { file.write("more"); }), path, "already");
  }
  CHECK(directory.file_count() == 1);
}

TEST_CASE("file: AtomicFile without commit leaves no trace") {
  const TempDirectory directory;
  const std::string path = directory.path("result");
  put_file(path, bytes_of("old"));
  {
    AtomicFile one(path);
    AtomicFile two(path);  // at the same time: its own temporary
    CHECK(one.temporary_path() != two.temporary_path());
    one.write("half");
    CHECK(directory.file_count() == 3);
  }
  CHECK(directory.file_count() == 1);
  CHECK(read_file(path) == bytes_of("old"));
}

TEST_CASE("file: writing where one cannot") {
  const TempDirectory directory;
  const std::string nowhere = directory.path("no/where");
  check_mentions(error_of([&] { write_file_atomically(nowhere, "x"); }), nowhere,
                 directory.path("no") + "' does not exist", "create it");
  check_mentions(error_of([&] { write_file_atomically(directory.path(), "x"); }), directory.path(),
                 "Is a directory");
  put_file(directory.path("file"), bytes_of("x"));
  const std::string below = directory.path("file/below");
  check_mentions(error_of([&] { write_file_atomically(below, "x"); }), below, "Not a directory");
  // Not writable even for root.
  check_mentions(error_of([&] { write_file_atomically("/proc/sherd", "x"); }), "/proc/sherd");
}

TEST_CASE("file: a write that does not fit keeps the old file and removes the temporary") {
  const TempDirectory directory;
  const std::string path = directory.path("result");
  put_file(path, bytes_of("old"));
  std::string message;
  {
    const FileSizeLimit limit(1000);
    message = error_of([&] { write_file_atomically(path, Bytes(5000, 1)); });
  }
  check_mentions(message, "cannot write", path, "File too large");
  CHECK(directory.file_count() == 1);
  CHECK(read_file(path) == bytes_of("old"));
}

TEST_CASE("file: the log appends whole lines, each visible at once") {
  const TempDirectory directory;
  const std::string path = directory.path("log.jsonl");
  {
    JsonLinesLog log(path, JsonLinesLog::Mode::truncate);
    log.write(R"({"step":1})");
    CHECK(read_file(path) == bytes_of("{\"step\":1}\n"));
    log.write(R"({"step":2})");
    check_mentions(error_of([&] { log.write("{\n}"); }), path, "line break");
    check_mentions(error_of([&] { log.write(""); }), path, "empty");
  }
  {
    JsonLinesLog log(path, JsonLinesLog::Mode::append);
    log.write("3");
  }
  CHECK(read_file(path) == bytes_of("{\"step\":1}\n{\"step\":2}\n3\n"));
  JsonLinesLog log(path, JsonLinesLog::Mode::truncate);
  CHECK(read_file(path).empty());
}

TEST_CASE("file: the log starts a fresh line after a torn one") {
  const TempDirectory directory;
  const std::string path = directory.path("log.jsonl");
  put_file(path, bytes_of("{\"step\":1}\n{\"st"));
  JsonLinesLog log(path, JsonLinesLog::Mode::append);
  log.write("2");
  CHECK(read_file(path) == bytes_of("{\"step\":1}\n{\"st\n2\n"));
}

TEST_CASE("file: the log's errors name the path and the reason") {
  const TempDirectory directory;
  const std::string nowhere = directory.path("no/log.jsonl");
  check_mentions(error_of([&] { JsonLinesLog log(nowhere, JsonLinesLog::Mode::append); }), nowhere,
                 "does not exist");
  JsonLinesLog full("/dev/full", JsonLinesLog::Mode::append);
  check_mentions(error_of([&] { full.write("1"); }), "/dev/full", "No space left", "free some");
}

TEST_CASE("create_new_file: makes a file that was not there, whole or not at all") {
  const TempDirectory folder;
  const std::string path = folder.path("new");
  create_new_file(path, "content");
  CHECK(read_file(path) == bytes_of("content"));
  check_mentions(error_of([&] { create_new_file(path, "other"); }), path, "is there already");
  CHECK(read_file(path) == bytes_of("content"));
  const std::string cut = folder.path("cut");
  {
    const FileSizeLimit limit(3);
    check_mentions(error_of([&] { create_new_file(cut, "content"); }), "cannot write '" + cut);
  }
  CHECK_FALSE(std::filesystem::exists(cut));
  CHECK_NOTHROW(create_new_file(cut, "content"));
}

TEST_CASE("JsonLinesLog: a line that does not fit leaves nothing of it") {
  const TempDirectory folder;
  const std::string path = folder.path("log.jsonl");
  JsonLinesLog log(path, JsonLinesLog::Mode::append);
  log.write("{\"a\":1}");
  {
    const FileSizeLimit limit(12);
    check_mentions(error_of([&] { log.write("{\"b\":2}"); }), "cannot write '" + path);
    log.write("{}");
  }
  log.write("{\"c\":3}");
  CHECK(read_file(path) == bytes_of("{\"a\":1}\n{}\n{\"c\":3}\n"));
}
