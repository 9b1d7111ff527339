// SPDX-License-Identifier: Apache-2.0
// `sherd bench checkpoint`: how fast checkpoints are saved and loaded, beside plain files of as
// many bytes on the same disk.
#include "command.h"
#include "stop_signal.h"

#include <fcntl.h>
#include <sherd/runtime/ledger.h>
#include <sherd/tools/trainer/checkpoints.h>
#include <sherd/tools/trainer/plan.h>
#include <sherd/tools/trainer/ranks.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace sherd::cli {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

struct CheckpointBenchOptions {
  std::string dir;
  int rounds = 3;
  bool async = false;  // also
  bool json = false;
};

enum Work { kPlainWrite, kSave, kCopy, kPlainRead, kLoad, kWorks };

struct CheckpointBench {
  std::int64_t parameters = 0, bytes = 0;  // bytes of all ranks
  std::vector<double> seconds[kWorks];
  std::int64_t held = 0, peak_of_load = 0;  // bytes of rank 0's ledger
  std::uint64_t read = 0;                   // bytes that rank 0 read to load

  double median(Work work) const {
    std::vector<double> sorted = seconds[work];
    std::ranges::sort(sorted);
    return sorted[sorted.size() / 2];
  }
  double rate(Work work) const { return static_cast<double>(bytes) / median(work); }
};

// What a program must do that wants its bytes on the disk, or from there. They come from memory and
// go there, as a model's do: the buffer is larger than caches.
class PlainFile {
 public:
  explicit PlainFile(std::string path) : path_(std::move(path)), memory_(16 * kPiece, 7) {}

  void write(std::int64_t bytes) {
    const int file = open(O_WRONLY | O_CREAT | O_TRUNC);
    for (std::int64_t left = bytes; left > 0;) {
      const auto size = std::min<std::size_t>(kPiece, static_cast<std::size_t>(left));
      const ssize_t done = ::write(file, next(), size);
      SHERD_CHECK(done > 0, "cannot write '{}': {}", path_, std::strerror(errno));
      left -= done;
    }
    SHERD_CHECK(::fsync(file) == 0, "cannot flush '{}': {}", path_, std::strerror(errno));
    ::close(file);
  }

  void read() {
    const int file = open(O_RDONLY);
    ssize_t done = 0;
    while ((done = ::read(file, next(), kPiece)) > 0) {
    }
    SHERD_CHECK(done == 0, "cannot read '{}': {}", path_, std::strerror(errno));
    ::close(file);
  }

 private:
  int open(int flags) {
    const int file = ::open(path_.c_str(), flags | O_CLOEXEC, 0666);
    SHERD_CHECK(file >= 0, "cannot open '{}': {}", path_, std::strerror(errno));
    return file;
  }

  char* next() {
    at_ = (at_ + kPiece) % memory_.size();
    return memory_.data() + at_;
  }

  static constexpr std::size_t kPiece = std::size_t{16} << 20;
  std::string path_;
  std::vector<char> memory_;
  std::size_t at_ = 0;
};

// So that the next reads come from the disk.
void forget(const std::string& directory) {
  for (const auto& entry : fs::directory_iterator(directory)) {
    const int file = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) continue;
    ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    ::close(file);
  }
}

// On every rank; the result is rank 0's.
CheckpointBench measure(const TrainSettings& settings, const CheckpointBenchOptions& options,
                        Communicator& world) {
  const auto image = one_image(settings);
  VisionTransformer model(model_settings(settings, image->channels(), image->height(),
                                         image->width(), image->classes()));
  Context context(rank_context_options(settings, world));
  ShardingEngine engine(model, context, world, training_precision(settings),
                        sharding_options(settings, world.size()));
  const std::unique_ptr<Optimizer> optimizer = make_optimizer(settings);
  engine.initialize();
  engine.prepare(*optimizer);
  CheckpointBench bench;
  ProgressLine progress;
  const auto timed = [&](Work work, int round, const char* what, const auto& body) {
    if (world.rank() == 0) {
      progress.show(fmt::format("round {} of {}: {}", round + 1, options.rounds, what));
    }
    world.barrier("before");
    const auto start = Clock::now();
    body();
    world.barrier("after");
    bench.seconds[work].push_back(std::chrono::duration<double>(Clock::now() - start).count());
  };
  // Between rounds, so that the folder can be removed.
  bool stop = false;
  const auto all_stop = [&] {
    std::int64_t stopped = stop_requested() ? 1 : 0;
    world.all_reduce(&stopped, 1, DType::i64, ReduceOp::max, "does one stop");
    return stopped != 0;
  };
  const std::string folder =
      (fs::path(options.dir) / fmt::format("sherd-bench-{}", world.size())).string();
  {
    CheckpointStore store(world, folder, 1);
    CheckpointSaver saver(context, model, engine, *optimizer, false);
    bench.parameters = model.parameter_count();
    bench.bytes = saver.bytes();
    world.all_reduce(&bench.bytes, 1, DType::i64, ReduceOp::sum, "bytes of all");
    PlainFile plain(fmt::format("{}/plain-{}", folder, world.rank()));
    RunProgress progress_of_run;
    const CheckpointStore::Content content{"sherd bench", progress_of_run.to_json(), "", false};
    for (int round = 0; round < options.rounds && !stop; ++round) {
      timed(kPlainWrite, round, "plain files", [&] { plain.write(saver.bytes()); });
      std::string path;
      timed(kSave, round, "save", [&] {
        saver.save(store, round, content);
        path = saver.finish(store);
      });
      forget(folder);
      timed(kPlainRead, round, "plain reads", [&] { plain.read(); });
      forget(path);
      Ledger& ledger = context.ledger();
      bench.held = ledger.live_total();
      ledger.reset_peak();
      timed(kLoad, round, "load", [&] {
        const CheckpointReader reader(path);
        load_weights(reader, engine);
        load_state(reader, engine, *optimizer, progress_of_run);
        bench.read = reader.bytes_read();
      });
      bench.peak_of_load = std::max(bench.peak_of_load, ledger.peak_total());
      stop = all_stop();
    }
    std::optional<CheckpointSaver> beside;
    if (options.async) beside.emplace(context, model, engine, *optimizer, true);
    for (int round = 0; beside && round < options.rounds && !stop; ++round) {
      timed(kCopy, round, "copy", [&] { beside->save(store, round, content); });
      beside->finish(store);
      stop = all_stop();
    }
  }
  world.barrier("done");
  if (world.rank() == 0) fs::remove_all(folder);
  progress.clear();
  if (stop) check_not_stopped("the folder is removed");
  return bench;
}

void print_table(const CheckpointBench& b, int ranks, const CheckpointBenchOptions& options) {
  fmt::print("{} parameters and their optimizer state, {}, from {} rank{} to {}; medians of {}\n\n",
             group_digits(b.parameters), format_bytes(b.bytes), ranks, ranks == 1 ? "" : "s",
             options.dir, options.rounds);
  const auto row = [&](const char* what, Work work, Work of) {
    fmt::print("{:<34}{:>8.2f} s{:>9.2f} GB/s{}\n", what, b.median(work), b.rate(work) / 1e9,
               work == of
                   ? ""
                   : fmt::format("{:>8.0f}% of plain files", 100.0 * b.rate(work) / b.rate(of)));
  };
  row("plain files, flushed", kPlainWrite, kPlainWrite);
  row("save", kSave, kPlainWrite);
  row("plain files, read", kPlainRead, kPlainRead);
  row("load, checksums compared", kLoad, kPlainRead);
  if (options.async) row("training waits, --checkpoint-async", kCopy, kCopy);
  fmt::print("\nrank 0 read {} of {} and held {} at most beside its share of {}\n",
             format_bytes(static_cast<std::int64_t>(b.read)), format_bytes(b.bytes),
             format_bytes(b.peak_of_load - b.held), format_bytes(b.held));
}

void print_json(const CheckpointBench& b, int ranks) {
  const auto seconds = [&](Work work) { return b.seconds[work]; };
  fmt::print("{}\n", nlohmann::ordered_json{{"parameters", b.parameters},
                                            {"bytes", b.bytes},
                                            {"ranks", ranks},
                                            {"plain_write_seconds", seconds(kPlainWrite)},
                                            {"save_seconds", seconds(kSave)},
                                            {"plain_read_seconds", seconds(kPlainRead)},
                                            {"load_seconds", seconds(kLoad)},
                                            {"copy_seconds", seconds(kCopy)},
                                            {"rank_0_read_bytes", b.read},
                                            {"rank_0_held_bytes", b.held},
                                            {"rank_0_peak_bytes_of_load", b.peak_of_load}}
                         .dump(2));
}

int bench_checkpoint(const TrainSettings& settings, const CheckpointBenchOptions& options) {
  check_range("--rounds", options.rounds, 1, 1000);
  SHERD_CHECK(device_from_name(settings.device) != Device::meta,
              "--device meta: has nothing to save; expected cpu or cuda");
  watch_stop_signals();
  CheckpointBench result;
  int ranks = 1;
  run_on_ranks(settings, [&](Communicator& world) {
    const CheckpointBench mine = measure(settings, options, world);
    if (world.rank() != 0) return;
    result = mine;
    ranks = world.size();
  });
  if (!is_first_process()) return 0;
  if (options.json) {
    print_json(result, ranks);
  } else {
    print_table(result, ranks, options);
  }
  return 0;
}

}  // namespace

Command add_bench_checkpoint(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand(
      "checkpoint",
      "Saves and loads the checkpoint of a model with its optimizer state, beside plain files of "
      "as\n"
      "many bytes, written with a flush and read from the disk. Makes a folder in --dir, and "
      "removes\n"
      "it.\n\n"
      "  sherd bench checkpoint --dir /scratch --preset vit_huge_patch14_224 --ranks 4\n");
  auto options = std::make_shared<CheckpointBenchOptions>();
  app->add_option("--dir", options->dir, "a folder on the disk")->type_name("DIR")->required();
  app->add_option("--rounds", options->rounds, "times everything is done [3]")->type_name("INT");
  app->add_flag("--async", options->async,
                "also how long --checkpoint-async makes training wait, which needs the memory of a "
                "copy")
      ->disable_flag_override();
  app->add_flag("--json", options->json, "print one JSON object")->disable_flag_override();
  SettingFlags flags(app, {"model", "optimizer", "sharding", "precision", "memory",
                           "data.image_size", "data.classes", "run.device", "run.threads"});
  return {app, [options, flags] {
            flags.refuse("model.weights", "as any weights take the same time");
            TrainSettings settings = flags.resolve_over({{"data.dataset", "synthetic"}});
            return bench_checkpoint(settings, *options);
          }};
}

}  // namespace sherd::cli
