// SPDX-License-Identifier: Apache-2.0
// `sherd bench disk`: what a disk gives to scratch files, beside a plain loop.
#include "command.h"
#include "disk_loop.h"
#include "stop_signal.h"

#include <sherd/runtime/error.h>
#include <sherd/runtime/io/block_file.h>
#include <sherd/runtime/ledger.h>
#include <sherd/tools/trainer/train.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

namespace sherd::cli {
namespace {

using Clock = std::chrono::steady_clock;

struct DiskOptions {
  std::string dir;
  std::string size = "2GiB";
  int rounds = 3;
  bool json = false;
};

enum Work { kWrite, kRead, kBoth, kWorks };
constexpr const char* kWorkNames[kWorks] = {"write", "read", "both"};

// One way to move bytes, and bytes/s of each work in each round.
struct Contender {
  std::string name;  // "plain loop", "io_uring", "threads"
  BlockEngine engine;
  bool plain;
  std::string mode = {};  // "direct"
  std::vector<double> rates[kWorks] = {};

  double median(int work) const {
    std::vector<double> sorted = rates[work];
    std::ranges::sort(sorted);
    return sorted[sorted.size() / 2];
  }
};

std::string scratch_path(const std::string& dir) {
  return fmt::format("{}/sherd-bench-{}.scratch", dir, ::getpid());
}

class DiskBench {
 public:
  explicit DiskBench(const DiskOptions& options)
      : options_(options),
        size_(parse_bytes(options.size, "--size")),
        part_(std::min<std::size_t>(size_ / 4, std::size_t{64} << 20)),
        first_(part_),
        second_(part_) {}

  // A file of its own in each round: written once before the clock runs, since a block's first
  // write costs the file system more.
  void measure(Contender& contender, int round) {
    const std::string path = scratch_path(options_.dir);
    BlockFile file(path, size_, {.engine = contender.engine});
    const std::string description = file.describe();
    contender.mode = description.substr(description.find(", ") + 2);
    const auto start_part = [&](bool write, std::size_t at, std::byte* memory) {
      const std::size_t bytes = std::min(part_, size_ - at);
      return write ? file.start_write(at, memory, bytes) : file.start_read(at, memory, bytes);
    };
    // Two parts under way, as with two buffers.
    const auto stream = [&](bool write) {
      BlockTransfer before;
      bool turn = false;
      for (std::size_t at = 0; at < size_; at += part_, turn = !turn) {
        show(contender, round);
        const BlockTransfer now = start_part(write, at, turn ? first_.data() : second_.data());
        before.wait();
        before = now;
      }
      before.wait();
    };
    stream(true);
    if (contender.plain) {
      DiskLoop loop(file, first_, second_);
      return measure_plain(contender, loop, round);
    }
    timed(contender, kWrite, [&] { stream(true); });
    timed(contender, kRead, [&] { stream(false); });
    // As offloading does: the next part comes while the last one goes.
    timed(contender, kBoth, [&] {
      for (std::size_t at = 0; at < size_ / 2; at += part_) {
        show(contender, round);
        const std::size_t bytes = std::min(part_, size_ / 2 - at);
        const BlockTransfer read = file.start_read(size_ / 2 + at, first_.data(), bytes);
        file.start_write(at, second_.data(), bytes).wait();
        read.wait();
      }
    });
  }

  void clear() { progress_.clear(); }
  std::size_t size() const { return size_; }

 private:
  void show(const Contender& contender, int round) {
    check_not_stopped("the file is removed");
    progress_.show(fmt::format("round {} of {}: {}", round + 1, options_.rounds, contender.name));
  }

  template <typename Body>
  void timed(Contender& contender, Work work, const Body& body) {
    const auto start = Clock::now();
    body();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    contender.rates[work].push_back(static_cast<double>(size_) / seconds);
  }

  void measure_plain(Contender& contender, DiskLoop& loop, int round) {
    show(contender, round);
    timed(contender, kWrite, [&] { loop.write(0, size_); });
    show(contender, round);
    timed(contender, kRead, [&] { loop.read(0, size_); });
    show(contender, round);
    timed(contender, kBoth, [&] { loop.both(size_ / 2, 0, size_ / 2); });
    show(contender, round);
  }

  const DiskOptions& options_;
  const std::size_t size_, part_;
  AlignedMemory first_, second_;
  ProgressLine progress_;
};

void print_json(const std::vector<Contender>& contenders, const DiskBench& bench,
                const DiskOptions& options, const std::string& without_uring) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const Contender& contender : contenders) {
    nlohmann::ordered_json row{{"name", contender.name}, {"mode", contender.mode}};
    for (int work = 0; work < kWorks; ++work) {
      row[fmt::format("{}_bytes_per_second", kWorkNames[work])] = contender.median(work);
      row[fmt::format("{}_ratio", kWorkNames[work])] =
          contender.median(work) / contenders.front().median(work);
    }
    rows.push_back(std::move(row));
  }
  nlohmann::ordered_json line{{"program", "sherd"},           {"version", version()},
                              {"build", build_description()}, {"dir", options.dir},
                              {"bytes", bench.size()},        {"rounds", options.rounds},
                              {"rates", std::move(rows)}};
  if (!without_uring.empty()) line["io_uring_not_possible"] = without_uring;
  fmt::print("{}\n", line.dump());
}

void print_table(const std::vector<Contender>& contenders, const DiskBench& bench,
                 const DiskOptions& options, const std::string& without_uring) {
  fmt::print("{} in {}, {}; GB/s, median of {}, and its ratio to the plain loop's\n\n",
             format_bytes(static_cast<std::int64_t>(bench.size())), options.dir,
             contenders.front().mode, options.rounds);
  fmt::print("{:<12}", "");
  for (const char* name : kWorkNames) fmt::print(" {:>8} {:>6}", name, "");
  fmt::print("\n");
  for (const Contender& contender : contenders) {
    fmt::print("{:<12}", contender.name);
    for (int work = 0; work < kWorks; ++work) {
      fmt::print(" {:>8.3f} {:>6.2f}", contender.median(work) / 1e9,
                 contender.median(work) / contenders.front().median(work));
    }
    fmt::print("\n");
  }
  fmt::print(
      "\nThe plain loop reads or writes 1 MiB at a time. Both: one half is read while the other is "
      "written,\nbytes of both counted.\n");
  if (!without_uring.empty()) fmt::print("{}\n", without_uring);
  if (contenders.front().mode != "direct") {
    fmt::print("This file system cannot go past the page cache: these are rates of memory.\n");
  }
}

// Why there is no io_uring here; empty where there is.
std::string uring_refusal(const std::string& dir) {
  const std::string path = scratch_path(dir);
  const std::string found = BlockFile(path, BlockFile::kAlignment).describe();
  if (found.starts_with(name_of(BlockEngine::io_uring))) return "";
  try {
    const BlockFile file(path, BlockFile::kAlignment, {.engine = BlockEngine::io_uring});
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

int bench_disk(const DiskOptions& options) {
  check_one_process("bench disk");
  constexpr std::size_t kStep = std::size_t{16} << 20;
  const std::size_t size = parse_bytes(options.size, "--size");
  SHERD_CHECK(size > 0 && size % kStep == 0,
              "--size: expected a multiple of 16MiB above 0, got '{}'", options.size);
  check_range("--rounds", options.rounds, 1, 1000);
  watch_stop_signals();
  std::vector<Contender> contenders{{"plain loop", BlockEngine::threads, true},
                                    {"io_uring", BlockEngine::io_uring, false},
                                    {"threads", BlockEngine::threads, false}};
  const std::string without_uring = uring_refusal(options.dir);
  if (!without_uring.empty()) contenders.erase(contenders.begin() + 1);
  DiskBench bench(options);
  for (int round = 0; round < options.rounds; ++round) {
    for (Contender& contender : contenders) {
      try {
        bench.measure(contender, round);
      } catch (...) {
        bench.clear();
        throw;
      }
    }
  }
  bench.clear();
  (options.json ? print_json : print_table)(contenders, bench, options, without_uring);
  return 0;
}

}  // namespace

Command add_bench_disk(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand(
      "disk",
      "Times scratch files, as offloading to a disk uses them: writes, reads, and both at once, "
      "by\n"
      "each engine, beside a plain loop of pread and pwrite past the page cache. Makes a file of\n"
      "--size in --dir, and removes it.\n\n"
      "  sherd bench disk --dir /scratch\n"
      "  sherd bench disk --dir /scratch --size 8GiB --rounds 5 --json\n");
  auto options = std::make_shared<DiskOptions>();
  app->add_option("--dir", options->dir, "a folder on the disk")->type_name("DIR")->required();
  app->add_option("--size", options->size, "bytes of the file, a multiple of 16MiB [2GiB]")
      ->type_name("SIZE");
  app->add_option("--rounds", options->rounds, "rounds in which the engines take turns [3]")
      ->type_name("INT");
  app->add_flag("--json", options->json, "print one JSON object")->disable_flag_override();
  return {app, [options] { return bench_disk(*options); }};
}

}  // namespace sherd::cli
