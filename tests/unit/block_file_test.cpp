// SPDX-License-Identifier: Apache-2.0
// Scratch files, by each engine, past the page cache and through it.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sherd/runtime/io/block_file.h>
#include <sherd/runtime/io/block_file_queue.h>
#include <sherd/runtime/io/file.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>
#include <thread>

#include "io_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr std::size_t kBlock = BlockFile::kAlignment;
constexpr std::size_t kMiB = std::size_t{1} << 20;

class Blocks {
 public:
  explicit Blocks(std::size_t bytes)
      : data_(static_cast<std::byte*>(std::aligned_alloc(kBlock, bytes))), bytes_(bytes) {
    std::memset(data_, 0xee, bytes);
  }
  ~Blocks() { std::free(data_); }
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;

  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }
  void fill(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (std::size_t i = 0; i < bytes_; i += 8) {
      const std::uint64_t value = random();
      std::memcpy(data_ + i, &value, 8);
    }
  }
  bool operator==(const Blocks& other) const {
    return bytes_ == other.bytes_ && std::memcmp(data_, other.data_, bytes_) == 0;
  }

 private:
  std::byte* data_;
  std::size_t bytes_;
};

bool equal(const Bytes& bytes, std::size_t offset, const std::byte* data, std::size_t count) {
  return offset + count <= bytes.size() && std::memcmp(bytes.data() + offset, data, count) == 0;
}

// Whether this build and kernel have io_uring; says so where they do not.
bool uring_possible() {
  static const std::string reason = [] {
    const TempDirectory directory;
    try {
      const BlockFile file(directory.path("probe"), kBlock, {.engine = BlockEngine::io_uring});
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  }();
  if (!reason.empty()) MESSAGE("io_uring is not tested: " << reason);
  return reason.empty();
}

template <typename Check>
void with_each_engine(const Check& check) {
  for (const BlockEngine engine : {BlockEngine::threads, BlockEngine::io_uring}) {
    if (engine == BlockEngine::io_uring && !uring_possible()) continue;
    CAPTURE(name_of(engine));
    BlockFileOptions options;
    options.engine = engine;
    check(options);
  }
}

class Limit {
 public:
  Limit(__rlimit_resource what, rlim_t value) : what_(what) {
    old_handler_ = ::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(what, &old_);
    const rlimit limit{value, old_.rlim_max};
    ::setrlimit(what, &limit);
  }
  ~Limit() {
    ::setrlimit(what_, &old_);
    ::signal(SIGXFSZ, old_handler_);
  }

 private:
  __rlimit_resource what_;
  rlimit old_{};
  void (*old_handler_)(int) = nullptr;
};

// Writes the whole file in parts of random sizes and order, all in flight, and reads it so.
void check_round_trip(const std::string& path, std::size_t bytes, const BlockFileOptions& options) {
  BlockFile file(path, bytes, options);
  Blocks out(bytes), in(bytes);
  out.fill(bytes);
  std::mt19937 random(7);
  const auto in_random_parts = [&](const auto& start) {
    std::vector<std::pair<std::size_t, std::size_t>> parts;
    for (std::size_t at = 0; at < bytes;) {
      // Mostly small, some of many pieces.
      const std::size_t most = random() % 4 == 0 ? bytes / kBlock / 4 : 5;
      const std::size_t size =
          std::min(bytes - at, (1 + random() % std::max<std::size_t>(most, 1)) * kBlock);
      parts.emplace_back(at, size);
      at += size;
    }
    std::shuffle(parts.begin(), parts.end(), random);
    std::vector<BlockTransfer> transfers;
    for (const auto& part : parts) transfers.push_back(start(part.first, part.second));
    std::shuffle(transfers.begin(), transfers.end(), random);
    for (const BlockTransfer& transfer : transfers) {
      transfer.wait();
      CHECK(transfer.done());
    }
  };
  in_random_parts([&](std::size_t at, std::size_t size) {
    return file.start_write(at, out.data() + at, size);
  });
  const Bytes seen = read_file(path);  // by other means
  CHECK(seen.size() == bytes);
  CHECK(equal(seen, 0, out.data(), bytes));
  in_random_parts(
      [&](std::size_t at, std::size_t size) { return file.start_read(at, in.data() + at, size); });
  CHECK(in == out);
  file.check_present();
}

}  // namespace

TEST_CASE("block file: what is written is read, in any order, whatever is in flight") {
  with_each_engine([](BlockFileOptions options) {
    const TempDirectory directory;
    for (const bool direct : {true, false}) {
      const std::vector<std::pair<int, std::size_t>> ways{
          {1, kBlock}, {3, 5 * kBlock}, {16, kMiB}, {64, kBlock}};
      for (const auto& way : ways) {
        options.direct = direct;
        options.queue_depth = way.first;
        options.chunk = way.second;
        CAPTURE(options.direct);
        CAPTURE(options.queue_depth);
        CAPTURE(options.chunk);
        const std::size_t bytes = options.chunk < kMiB ? 2 * kMiB : 64 * kMiB;
        check_round_trip(directory.path("scratch"), bytes, options);
        check_round_trip(directory.path("scratch"), kBlock, options);
        CHECK(directory.file_count() == 0);
      }
    }
  });
}

TEST_CASE("block file: memory as a file system") {
  if (!std::filesystem::is_directory("/dev/shm")) return;
  with_each_engine([](const BlockFileOptions& options) {
    const std::string path = "/dev/shm/sherd-test-" + std::to_string(::getpid());
    check_round_trip(path, kMiB, options);
    CHECK_FALSE(std::filesystem::exists(path));
  });
}

TEST_CASE("block file: bytes never written are zeros, and nothing is a transfer too") {
  with_each_engine([](const BlockFileOptions& options) {
    const TempDirectory directory;
    BlockFile file(directory.path("a"), 4 * kMiB, options);
    CHECK(std::filesystem::file_size(file.path()) == 4 * kMiB);
    CHECK(file.bytes() == 4 * kMiB);
    Blocks in(2 * kMiB);
    file.start_read(kMiB, in.data(), in.size()).wait();
    CHECK(std::all_of(in.data(), in.data() + in.size(),
                      [](std::byte b) { return b == std::byte{0}; }));
    const BlockTransfer none = file.start_write(4 * kMiB, nullptr, 0);
    CHECK(none.done());
    none.wait();
    CHECK(BlockTransfer().done());
    BlockTransfer().wait();
  });
}

TEST_CASE("block file: two threads at once") {
  with_each_engine([](BlockFileOptions options) {
    const TempDirectory directory;
    options.chunk = 64 * 1024;
    options.queue_depth = 4;
    BlockFile file(directory.path("a"), 16 * kMiB, options);
    std::atomic<int> wrong{0};
    const auto body = [&](std::size_t from, std::uint64_t seed) {
      Blocks out(kMiB), in(kMiB);
      for (std::size_t round = 0; round < 24; ++round) {
        const std::size_t at = from + round % 8 * kMiB;
        out.fill(seed + round);
        file.start_write(at, out.data(), out.size()).wait();
        const BlockTransfer half = file.start_read(at, in.data(), in.size() / 2);
        const BlockTransfer rest =
            file.start_read(at + kMiB / 2, in.data() + kMiB / 2, in.size() / 2);
        rest.wait();
        half.wait();
        if (!(in == out)) ++wrong;
      }
    };
    std::thread other([&] { body(8 * kMiB, 1000); });
    body(0, 1);
    other.join();
    CHECK(wrong == 0);
    // One starts, the other waits.
    Blocks out(4 * kMiB);
    const BlockTransfer shared = file.start_write(0, out.data(), out.size());
    std::thread waiting([&] { shared.wait(); });
    shared.wait();
    waiting.join();
    CHECK(shared.done());
  });
}

TEST_CASE("block file: a name that is taken, a folder that is not there") {
  const TempDirectory directory;
  put_file(directory.path("a"), bytes_of("mine"));
  check_mentions(error_of([&] { BlockFile file(directory.path("a"), kBlock); }),
                 directory.path("a"), "there already");
  CHECK(read_file(directory.path("a")) == bytes_of("mine"));
  check_mentions(error_of([&] { BlockFile file(directory.path("no/a"), kBlock); }),
                 directory.path("no/a"), "does not exist", "create it");
  CHECK(directory.file_count() == 1);
}

TEST_CASE("block file: what killed programs left is removed, what is in use or else's stays") {
  const TempDirectory folder;
  const auto write = [&](const std::string& name) { std::ofstream(folder.path(name)) << "left"; };
  write("mine-1");
  write("mine-2");
  write("other-1");
  std::filesystem::create_directory(folder.path("mine-folder"));
  std::filesystem::create_symlink(folder.path("other-1"), folder.path("mine-link"));
  {
    const BlockFile living(folder.path("mine-living"), kBlock);
    BlockFile::remove_abandoned(folder.path(""), "mine-");
    CHECK_NOTHROW(living.check_present());
    CHECK_FALSE(std::filesystem::exists(folder.path("mine-1")));
    CHECK_FALSE(std::filesystem::exists(folder.path("mine-2")));
    CHECK(std::filesystem::exists(folder.path("other-1")));
    CHECK(std::filesystem::exists(folder.path("mine-folder")));
    CHECK(std::filesystem::is_symlink(folder.path("mine-link")));
  }
  CHECK_FALSE(std::filesystem::exists(folder.path("mine-living")));
  CHECK_NOTHROW(BlockFile::remove_abandoned(folder.path("nowhere"), "mine-"));
}

// Programs that start at once in one folder.
TEST_CASE("block file: one that is being made is not taken for abandoned") {
  const TempDirectory folder;
  std::atomic<bool> stop = false;
  std::thread cleaner([&] {
    while (!stop) BlockFile::remove_abandoned(folder.path(""), "mine-");
  });
  for (int i = 0; i < 300; ++i) {
    const BlockFile file(folder.path("mine-" + std::to_string(i)), kBlock,
                         {.engine = BlockEngine::threads, .queue_depth = 1});
    CHECK_NOTHROW(file.check_present());
  }
  stop = true;
  cleaner.join();
}

TEST_CASE("block file: one that was cut short and is as long again is missed") {
  const TempDirectory folder;
  BlockFile file(folder.path("file"), 64 * kBlock);
  Blocks blocks(kBlock);
  CHECK_NOTHROW(file.check_whole());
  std::filesystem::resize_file(file.path(), 4 * kBlock);
  CHECK_THROWS_WITH_AS(file.check_whole(), doctest::Contains("expected 262144 bytes, it has 16384"),
                       Error);
  file.start_write(63 * kBlock, blocks.data(), kBlock).wait();
  CHECK(std::filesystem::file_size(file.path()) == 64 * kBlock);
  CHECK_THROWS_WITH_AS(file.check_present(),
                       doctest::Contains("was cut short while this program uses it: of its"),
                       Error);
}

TEST_CASE("block file: no room is found at the start") {
  const TempDirectory directory;
  const std::string path = directory.path("a");
  const std::string huge = std::to_string(std::uint64_t{1} << 60);
  check_mentions(error_of([&] { BlockFile file(path, std::uint64_t{1} << 60); }), "no room for",
                 path, huge + " bytes", "bytes free",
                 "free some space or choose another directory");
  CHECK(directory.file_count() == 0);
  std::string message;
  {
    const Limit limit(RLIMIT_FSIZE, kMiB);
    message = error_of([&] { BlockFile file(path, 2 * kMiB); });
  }
  check_mentions(message, "cannot reserve 2097152 bytes", path, "File too large", "ulimit -f");
  CHECK(directory.file_count() == 0);
}

TEST_CASE("block file: sizes, places and options that cannot be") {
  const TempDirectory directory;
  const std::string path = directory.path("a");
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{5000}, UINT64_MAX - 4095}) {
    check_mentions(error_of([&] { BlockFile file(path, bytes); }), path, "multiple of 4096",
                   std::to_string(bytes));
  }
  for (const int depth : {0, -1, 1025}) {
    check_mentions(error_of([&] { BlockFile file(path, kBlock, {.queue_depth = depth}); }), path,
                   "queue depth of 1 to 1024", std::to_string(depth));
  }
  for (const std::size_t chunk : {std::size_t{0}, std::size_t{100}, std::size_t{1} << 31}) {
    check_mentions(error_of([&] { BlockFile file(path, kBlock, {.chunk = chunk}); }), path,
                   "a chunk of", std::to_string(chunk));
  }
  CHECK(directory.file_count() == 0);

  BlockFile file(path, 4 * kBlock);
  Blocks memory(8 * kBlock);
  const auto refuses = [&](std::uint64_t offset, std::size_t shift, std::size_t bytes,
                           const std::string& what) {
    CAPTURE(offset);
    CAPTURE(bytes);
    for (const bool write : {false, true}) {
      const std::string message = error_of([&] {
        if (write) file.start_write(offset, memory.data() + shift, bytes);
        if (!write) file.start_read(offset, memory.data() + shift, bytes);
      });
      check_mentions(message, write ? "start_write" : "start_read", path, what,
                     std::to_string(offset));
    }
  };
  refuses(512, 0, kBlock, "multiples of 4096");
  refuses(0, 512, kBlock, "multiples of 4096");
  refuses(0, 0, 512, "multiples of 4096");
  refuses(0, 0, 5 * kBlock, "beyond its 16384 bytes");
  refuses(4 * kBlock, 0, kBlock, "beyond");
  refuses(5 * kBlock, 0, 0, "beyond");
  refuses(UINT64_MAX - 4095, 0, kBlock, "beyond");  // their sum is 0
}

TEST_CASE("block file: automatic takes threads where no ring can be had, io_uring is an error") {
  const TempDirectory directory;
  const std::string path = directory.path("a");
  std::string taken, message;
  {
    // One more descriptor: the file.
    const int next = ::dup(0);
    ::close(next);
    const Limit limit(RLIMIT_NOFILE, static_cast<rlim_t>(next) + 1);
    taken = BlockFile(path, kBlock).describe();
    message = error_of([&] { BlockFile file(path, kBlock, {.engine = BlockEngine::io_uring}); });
  }
  CHECK(taken.starts_with("threads, "));
  check_mentions(message, path, "io_uring is not possible here", "automatic or threads");
  CHECK(directory.file_count() == 0);
  if (!uring_possible()) return;
  check_mentions(message, "Too many open files");
  CHECK(BlockFile(path, kBlock).describe().starts_with("io_uring, "));
  CHECK(BlockFile(path, kBlock, {.direct = false}).describe() == "io_uring, buffered");
  CHECK(BlockFile(path, kBlock, {.engine = BlockEngine::threads, .direct = false}).describe() ==
        "threads, buffered");
}

TEST_CASE("block file: one that is cut short under way says what is missing") {
  with_each_engine([](BlockFileOptions options) {
    const TempDirectory directory;
    for (const bool direct : {true, false}) {
      options.direct = direct;
      options.chunk = 4 * kBlock;
      const std::string path = directory.path("a");
      BlockFile file(path, 64 * kBlock, options);
      Blocks out(64 * kBlock), in(64 * kBlock);
      out.fill(3);
      file.start_write(0, out.data(), out.size()).wait();
      file.check_present();
      // Inside a piece and a block.
      REQUIRE(::truncate(path.c_str(), 22 * kBlock + 1000) == 0);
      const BlockTransfer before = file.start_read(0, in.data(), 20 * kBlock);
      const BlockTransfer across =
          file.start_read(20 * kBlock, in.data() + 20 * kBlock, 16 * kBlock);
      const BlockTransfer behind = file.start_read(40 * kBlock, in.data() + 40 * kBlock, kBlock);
      for (int twice = 0; twice < 2; ++twice) {
        check_mentions(error_of([&] { across.wait(); }), path,
                       "expected to read 65536 bytes at offset 81920, got 9192", "cut it short");
      }
      check_mentions(error_of([&] { behind.wait(); }), path,
                     "expected to read 4096 bytes at offset 163840, got 0");
      before.wait();
      CHECK(std::memcmp(in.data(), out.data(), 20 * kBlock) == 0);
      check_mentions(error_of([&] { file.check_present(); }), path, "cut short",
                     "expected 262144 bytes", "it has 91112");
    }
  });
}

TEST_CASE("block file: one that is deleted, renamed or replaced is missed") {
  with_each_engine([](const BlockFileOptions& options) {
    const TempDirectory directory;
    const std::string path = directory.path("a");
    {
      BlockFile file(path, kBlock, options);
      REQUIRE(::unlink(path.c_str()) == 0);
      check_mentions(error_of([&] { file.check_present(); }), path, "was deleted or renamed");
    }
    {
      BlockFile file(path, kBlock, options);
      std::filesystem::rename(path, directory.path("b"));
      check_mentions(error_of([&] { file.check_present(); }), path, "was deleted or renamed");
      put_file(path, bytes_of("another's"));
      check_mentions(error_of([&] { file.check_present(); }), path, "was replaced");
    }
    CHECK(read_file(path) == bytes_of("another's"));  // not ours to remove
    std::filesystem::remove(path);
    std::filesystem::remove(directory.path("b"));
  });
}

TEST_CASE("block file: a write the system refuses is one error, the others are done") {
  with_each_engine([](BlockFileOptions options) {
    const TempDirectory directory;
    const std::string path = directory.path("a");
    options.chunk = 4 * kBlock;
    BlockFile file(path, 64 * kBlock, options);
    Blocks out(64 * kBlock), in(64 * kBlock);
    out.fill(5);
    std::string message;
    {
      const Limit limit(RLIMIT_FSIZE, 34 * kBlock);
      const BlockTransfer fits = file.start_write(0, out.data(), 32 * kBlock);
      const BlockTransfer not_all =
          file.start_write(32 * kBlock, out.data() + 32 * kBlock, 32 * kBlock);
      message = error_of([&] { not_all.wait(); });
      fits.wait();
    }
    check_mentions(message, "cannot write 8192 bytes at offset 139264", path, "File too large",
                   "ulimit -f");
    file.start_read(0, in.data(), 34 * kBlock).wait();
    CHECK(std::memcmp(in.data(), out.data(), 34 * kBlock) == 0);
    file.start_write(32 * kBlock, out.data() + 32 * kBlock, 32 * kBlock).wait();
    file.start_read(0, in.data(), in.size()).wait();
    CHECK(in == out);
  });
}

TEST_CASE("block file: faults put in by hand") {
  with_each_engine([](BlockFileOptions options) {
    const TempDirectory directory;
    const std::string path = directory.path("a");
    options.chunk = 4 * kBlock;
    options.queue_depth = 4;
    SUBCASE("one transfer of many fails, with the reason of its first bad piece") {
      options.alter_result = [](const BlockPiece& piece, std::int64_t result) -> std::int64_t {
        if (piece.transfer != 5) return result;
        // The later piece first.
        if (piece.offset == (5 * 16 + 4) * kBlock) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          return -EIO;
        }
        return piece.offset == (5 * 16 + 12) * kBlock ? -ENOSPC : result;
      };
      BlockFile file(path, 160 * kBlock, options);
      Blocks out(160 * kBlock);
      std::vector<BlockTransfer> transfers;
      for (std::size_t i = 0; i < 10; ++i) {
        transfers.push_back(
            file.start_write(i * 16 * kBlock, out.data() + i * 16 * kBlock, 16 * kBlock));
      }
      for (std::size_t i = 0; i < 10; ++i) {
        if (i != 5) transfers[i].wait();
      }
      check_mentions(error_of([&] { transfers[5].wait(); }), "cannot write 16384 bytes", path,
                     "at offset " + std::to_string((5 * 16 + 4) * kBlock), "Input/output error",
                     "system's log");
      CHECK(transfers[5].done());
    }
    SUBCASE("a full disk") {
      options.alter_result = [](const BlockPiece&, std::int64_t) { return -ENOSPC; };
      BlockFile file(path, kBlock, options);
      Blocks out(kBlock);
      check_mentions(error_of([&] { file.start_write(0, out.data(), kBlock).wait(); }), path,
                     "No space left", "free some space");
    }
    SUBCASE("less than asked for, and interruptions, are gone on from") {
      std::atomic<int> altered{0};
      options.alter_result = [&](const BlockPiece& piece, std::int64_t result) -> std::int64_t {
        const int turn = altered++ % 4;
        if (turn == 0) return -EINTR;
        if (turn == 1) return std::min<std::int64_t>(result, kBlock);
        if (turn == 2 && piece.bytes > 2 * kBlock) return kBlock + 17;
        return result;
      };
      BlockFile file(path, 256 * kBlock, options);
      Blocks out(256 * kBlock), in(256 * kBlock);
      out.fill(9);
      file.start_write(0, out.data(), out.size()).wait();
      file.start_read(0, in.data(), in.size()).wait();
      CHECK(in == out);
      CHECK(equal(read_file(path), 0, out.data(), out.size()));
      CHECK(altered > 128);
    }
    SUBCASE("a write of nothing") {
      options.alter_result = [](const BlockPiece&, std::int64_t) { return 0; };
      BlockFile file(path, 2 * kBlock, options);
      Blocks out(kBlock);
      check_mentions(error_of([&] { file.start_write(kBlock, out.data(), kBlock).wait(); }), path,
                     "expected to write 4096 bytes at offset 4096, got 0");
    }
  });
}

TEST_CASE("block file: its end waits for what is on its way") {
  with_each_engine([](BlockFileOptions options) {
    const TempDirectory directory;
    options.chunk = 4 * kBlock;
    options.queue_depth = 2;
    std::atomic<bool> slow{false};
    options.alter_result = [&](const BlockPiece& piece, std::int64_t result) -> std::int64_t {
      if (slow) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      return piece.transfer == 2 ? -EIO : result;
    };
    Blocks out(64 * kBlock), in(64 * kBlock);
    out.fill(11);
    std::vector<BlockTransfer> transfers;
    {
      BlockFile file(directory.path("a"), 64 * kBlock, options);
      file.start_write(0, out.data(), out.size()).wait();
      slow = true;
      for (std::size_t i = 0; i < 8; ++i) {
        transfers.push_back(
            file.start_read(i * 8 * kBlock, in.data() + i * 8 * kBlock, 8 * kBlock));
      }
      CHECK_FALSE(transfers.back().done());
    }
    CHECK(directory.file_count() == 0);
    for (const BlockTransfer& transfer : transfers) CHECK(transfer.done());
    CHECK(in == out);
    check_mentions(error_of([&] { transfers[1].wait(); }), "Input/output error");
  });
}

TEST_CASE("block file: a ring that the kernel refuses later fails all transfers, and none hangs") {
  if (!uring_possible()) return;
  const TempDirectory directory;
  BlockFile file(directory.path("a"), 64 * kBlock, {.engine = BlockEngine::io_uring});
  Blocks memory(64 * kBlock);
  file.start_write(0, memory.data(), memory.size()).wait();
  // Its descriptor becomes another file's.
  int rings = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    const std::string target = std::filesystem::read_symlink(entry.path(), ignored).string();
    if (target.find("io_uring") == std::string::npos) continue;
    const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    REQUIRE(::dup2(null, std::stoi(entry.path().filename().string())) >= 0);
    ::close(null);
    ++rings;
  }
  REQUIRE(rings == 1);
  std::vector<BlockTransfer> transfers;
  for (int i = 0; i < 3; ++i) {
    transfers.push_back(file.start_read(0, memory.data(), memory.size()));
  }
  int failed = 0;
  for (const BlockTransfer& transfer : transfers) {
    try {
      transfer.wait();
    } catch (const Error& error) {
      check_mentions(error.what(), "cannot read", file.path());
      ++failed;
    }
  }
  CHECK(failed >= 2);  // the thread may sleep in the kernel, with the true ring, once more
}

TEST_CASE("block file: pieces of offsets and sizes beyond 32 bits") {
  constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
  BlockQueue queue("a", kGiB, nullptr);
  const auto transfer = std::make_shared<BlockTransferState>();
  transfer->offset = 5 * kGiB + kBlock;
  transfer->bytes = 6 * kGiB + 3 * kBlock;
  transfer->memory = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40);
  queue.push(transfer);
  std::vector<BlockWork> works;
  for (BlockWork work; queue.take(work);) works.push_back(work);
  REQUIRE(works.size() == 7);
  for (std::size_t i = 0; i < works.size(); ++i) {
    CHECK(works[i].offset == 5 * kGiB + kBlock + i * kGiB);
    CHECK(reinterpret_cast<std::uintptr_t>(works[i].memory) ==
          (std::uintptr_t{1} << 40) + i * kGiB);
    CHECK(works[i].bytes == (i < 6 ? kGiB : 3 * kBlock));
    CHECK(queue.finish(works[i], static_cast<std::int64_t>(works[i].bytes)));
    CHECK((transfer->pieces_left == 0) == (i == 6));
  }
  CHECK(transfer->error.empty());
}

TEST_CASE("block file: reads and writes take turns") {
  BlockQueue queue("a", kBlock, nullptr);
  const auto push = [&](bool write, std::uint64_t offset, std::uint64_t blocks) {
    const auto transfer = std::make_shared<BlockTransferState>();
    transfer->write = write;
    transfer->offset = offset * kBlock;
    transfer->bytes = blocks * kBlock;
    queue.push(transfer);
  };
  push(true, 100, 3);
  push(true, 200, 2);
  push(false, 0, 2);
  push(false, 10, 1);
  std::string order;
  for (BlockWork work; queue.take(work);) {
    order += (work.write ? " w" : " r") + std::to_string(work.offset / kBlock);
  }
  CHECK(order == " r0 w100 r1 w101 r10 w102 w200 w201");
}
