// SPDX-License-Identifier: Apache-2.0
#include "bench_inputs.h"
#include "command.h"
#include "disk_loop.h"
#include "gpu_peaks.h"
#include "quantile.h"
#include "resident_meter.h"
#include "stop_signal.h"

#include <sherd/comm/faulty_communicator.h>
#include <sherd/kernels/matmul.h>
#include <sherd/runtime/cuda/device.h>
#include <sherd/runtime/io/file.h>
#include <sherd/tools/trainer/plan.h>
#include <sherd/tools/trainer/ranks.h>
#include <sherd/tools/trainer/run_trace.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

namespace sherd::cli {
namespace {

struct BenchOptions {
  std::int64_t steps = 10, warmup = 2, matrix = 2048;
  double comm_delay = 0.0;
  std::string write_inputs;
  std::string of_timing;  // a flag that was given and says something of what is computed
  bool json = false;
};

struct BenchResult {
  std::vector<double> seconds;          // of the timed steps, in order, of the slowest rank
  std::vector<double> losses;           // of every step, warm-up too
  double median = 0.0;                  // seconds a step
  double fastest = 0.0, slowest = 0.0;  // the same
  double lower = 0.0, upper = 0.0;      // quartiles of the same
  double mean = 0.0, exposed = 0.0;     // of all, and of that waiting for other ranks
  std::vector<std::int64_t> resident;   // of each process, at most while steps ran
  double matrix_rate = 0.0;             // FLOP/s
  double peak_rate = 0.0;               // the GPU's by its data sheet; 0: not known
  std::int64_t collectives = 0, sent_bytes = 0;  // of this rank, a step
  double update = 0.0;                           // seconds, of the slowest rank
  FileTraffic files;                             // of all ranks' updates, a step
  double disk_rate = 0.0;                        // bytes/s; 0 where there is none to measure
  bool disk_direct = true;
};

// Seconds of each step, of the slowest rank. All ranks together.
std::vector<double> slowest_of_ranks(const std::vector<double>& seconds, Communicator& world) {
  std::vector<std::int64_t> nanoseconds;
  for (const double value : seconds) nanoseconds.push_back(std::llround(value * 1e9));
  world.all_reduce(nanoseconds.data(), static_cast<std::int64_t>(nanoseconds.size()), DType::i64,
                   ReduceOp::max, "bench: seconds of steps");
  std::vector<double> slowest;
  for (const std::int64_t value : nanoseconds) slowest.push_back(static_cast<double>(value) / 1e9);
  return slowest;
}

// Of each process; ranks that are threads share one. All ranks together.
std::vector<std::int64_t> resident_of_processes(std::int64_t mine, Communicator& world) {
  if (!under_launcher()) return {mine};
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(world.size()));
  bytes[static_cast<std::size_t>(world.rank())] = mine;
  world.all_reduce(bytes.data(), world.size(), DType::i64, ReduceOp::sum, "bench: memory");
  return bytes;
}

// In which folder updates move bytes; empty where in none, or in two that may be on two disks.
std::string offload_folder(const ShardingOptions& options) {
  const std::string& a = options.offload_optimizer.directory;
  const std::string& b = options.offload_parameters.directory;
  return a.empty() || b.empty() || a == b ? (a.empty() ? b : a) : std::string();
}

// Times of updates, and between them of the disk on which their files lie. All ranks together.
class UpdateMeter {
 public:
  explicit UpdateMeter(const ShardingEngine& engine)
      : engine_(engine), world_(engine.groups().world) {}

  void add_step() { nanoseconds_.push_back(std::llround(engine_.last_update().seconds * 1e9)); }

  // After a step. The ranks' files are taken to be on one disk, so one rank measures it for all.
  void measure_disk() {
    const FileTraffic& mine = engine_.last_update().files;
    std::int64_t sums[] = {mine.read, mine.written};
    world_.all_reduce(sums, 2, DType::i64, ReduceOp::sum, "bench: bytes of updates");
    files_ = {sums[0], sums[1]};
    const std::string folder = offload_folder(engine_.options());
    if (folder.empty() || files_.read + files_.written == 0) return;
    if (world_.rank() == 0) {
      if (!limit_) limit_.emplace(folder, static_cast<std::uint64_t>(files_.read + files_.written));
      rates_.push_back(limit_->measure());
    }
    world_.barrier("bench: the disk is measured");
  }

  void finish(BenchResult& result) {
    const auto count = static_cast<std::int64_t>(nanoseconds_.size());
    world_.all_reduce(nanoseconds_.data(), count, DType::i64, ReduceOp::max, "bench: updates");
    result.update = quantile({nanoseconds_.begin(), nanoseconds_.end()}, 0.5) / 1e9;
    result.files = files_;
    if (!limit_) return;
    result.disk_rate = quantile(rates_, 0.5);
    result.disk_direct = limit_->direct();
  }

 private:
  const ShardingEngine& engine_;
  Communicator& world_;
  std::vector<std::int64_t> nanoseconds_;
  FileTraffic files_;
  std::optional<DiskLimit> limit_;
  std::vector<double> rates_;
};

std::int64_t calls(const CommunicationCounters& counters) {
  return std::accumulate(std::begin(counters.calls), std::end(counters.calls), std::int64_t{0});
}

void print_memory(const MemoryPlan& device, const MemoryPlan& host, int ranks) {
  const char* each = ranks > 1 ? "a rank " : "";
  fmt::print("peak memory     {} {}({})\n", format_bytes(device.peak_bytes), each,
             format_breakdown(device.at_peak));
  if (host.peak_bytes == 0) return;
  fmt::print("host memory     {} {}at most in the host's memory ({})\n",
             format_bytes(host.peak_bytes), each, format_breakdown(host.at_peak));
}

void print_traffic(std::int64_t collectives, std::int64_t sent_bytes) {
  if (collectives > 1) {
    fmt::print("communication   {} collectives a step, {} sent by a rank\n", collectives,
               format_bytes(sent_bytes));
  }
}

int run_meta(const TrainSettings& settings, const BenchOptions& options) {
  const int ranks = planned_ranks(settings);
  check_one_process("bench step --device meta");
  const auto start = std::chrono::steady_clock::now();
  const StepPlan plan = plan_step(settings, ranks);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (options.json) {
    const nlohmann::ordered_json line{
        {"program", "sherd"},
        {"version", version()},
        {"device", "meta"},
        {"ranks", ranks},
        {"sharding", name_of(sharding_options(settings, ranks).policy)},
        {"batch_size", settings.batch_size},
        {"parameters", plan.parameters},
        {"flops", plan.flops},
        {"collectives_per_step", plan.collectives},
        {"sent_bytes_per_step", plan.sent_bytes},
        {"peak_bytes", plan.device.peak_bytes},
        {"host_peak_bytes", plan.host.peak_bytes}};
    fmt::print("{}\n", line.dump());
    return 0;
  }
  fmt::print("model           {} parameters, batch {}, {}\n", group_digits(plan.parameters),
             settings.batch_size, describe(training_precision(settings)));
  fmt::print("ranks           {}\n", describe_ranks(settings, *make_meta_communicator(0, ranks)));
  fmt::print("products        {:.2f} TFLOP a step{}\n", static_cast<double>(plan.flops) / 1e12,
             ranks > 1 ? " of a rank" : "");
  if (ranks > 1) print_traffic(plan.collectives, plan.sent_bytes);
  print_memory(plan.device, plan.host, ranks);
  fmt::print("planned in      {:.3f} s; nothing was allocated or computed\n", seconds);
  return 0;
}

// All ranks together.
BenchResult measure(Context& context, Rehearsal& test, std::int64_t batch,
                    const BenchOptions& options) {
  using Clock = std::chrono::steady_clock;
  Communicator& world = test.engine.groups().world;
  BenchResult result;
  for (std::int64_t i = 0; i < options.warmup; ++i) {
    check_not_stopped("nothing is left behind");
    result.losses.push_back(test.step->run_shape(*test.inputs, batch).loss);
  }
  context.compute_stream().synchronize();
  context.ledger().reset_peak();
  context.host_ledger().reset_peak();
  // The limit is measured before, between and after the steps, so that both see the same machine;
  // by all ranks at once, as they compute, in the type that they compute in; with memory of its
  // own, which it gives back.
  const DType dtype = test.engine.precision().parameters;
  ResidentMeter resident;
  resident.resume();
  const auto measure_limit = [&] {
    resident.pause();
    world.barrier("bench: a product");
    {
      Context limit({.device = context.device(),
                     .device_index = context.device_index(),
                     .threads = context.threads()});
      result.matrix_rate =
          std::max(result.matrix_rate, measure_matmul_rate(limit, dtype, options.matrix, 3));
    }
    world.barrier("bench: a product is done");
    resident.resume();
  };
  UpdateMeter updates(test.engine);
  std::vector<double> seconds;
  double exposed = 0.0;
  for (std::int64_t i = 0; i < options.steps; ++i) {
    if (options.matrix > 0 && (i == 0 || i == options.steps / 2)) measure_limit();
    check_not_stopped("nothing is left behind");
    world.barrier("bench: a step");  // it lasts as long as its slowest rank's, and is no part of it
    const double exposed_before = test.engine.exposed_seconds();
    const CommunicationCounters before = test.engine.counters();
    const auto start = Clock::now();
    result.losses.push_back(test.step->run_shape(*test.inputs, batch).loss);
    context.compute_stream().synchronize();  // the update may still be under way
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    exposed += test.engine.exposed_seconds() - exposed_before;
    result.collectives = calls(test.engine.counters()) - calls(before);
    result.sent_bytes = test.engine.counters().total_bytes() - before.total_bytes();
    updates.add_step();
    if (i == 0 || i == options.steps / 2 || i == options.steps - 1) updates.measure_disk();
  }
  updates.finish(result);
  resident.pause();
  result.resident = resident_of_processes(resident.peak_bytes(), world);
  if (options.matrix > 0) measure_limit();
  if (context.device() == Device::cuda && size_of(dtype) == 2)
    result.peak_rate = peak_bf16_flops(cuda::device_name(context.device_index()));
  seconds = slowest_of_ranks(seconds, world);
  result.seconds = seconds;
  result.mean =
      std::accumulate(seconds.begin(), seconds.end(), 0.0) / static_cast<double>(options.steps);
  result.median = quantile(seconds, 0.5);
  result.fastest = quantile(seconds, 0.0);
  result.slowest = quantile(seconds, 1.0);
  result.lower = quantile(seconds, 0.25);
  result.upper = quantile(seconds, 0.75);
  result.exposed = exposed / static_cast<double>(options.steps);
  return result;
}

void print_json(const TrainSettings& settings, Context& context, Rehearsal& test,
                const BenchResult& result, double rate) {
  const auto batch = static_cast<double>(settings.batch_size);
  nlohmann::ordered_json line{{"program", "sherd"},
                              {"version", version()},
                              {"build", build_description()},
                              {"device", name_of(context.device())},
                              {"precision", name_of(test.engine.precision().parameters)},
                              {"replays_graph", test.step->replays()},
                              {"graph_refusal", test.step->graph_refusal()},
                              {"ranks", test.engine.groups().world.size()},
                              {"sharding", name_of(test.engine.options().policy)},
                              {"threads", context.threads()},
                              {"batch_size", settings.batch_size},
                              {"parameters", test.model.parameter_count()},
                              {"seconds_per_step", result.median},
                              {"seconds_fastest", result.fastest},
                              {"seconds_slowest", result.slowest},
                              {"seconds_lower_quartile", result.lower},
                              {"seconds_upper_quartile", result.upper},
                              {"seconds", result.seconds},
                              {"losses", result.losses},
                              {"exposed_seconds_per_step", result.exposed},
                              {"update_seconds_per_step", result.update},
                              {"update_read_bytes", result.files.read},
                              {"update_written_bytes", result.files.written},
                              {"disk_bytes_per_second", result.disk_rate},
                              {"collectives_per_step", result.collectives},
                              {"sent_bytes_per_step", result.sent_bytes},
                              {"images_per_second", batch / result.median},
                              {"flops_per_second", rate},
                              {"matrix_flops_per_second", result.matrix_rate},
                              {"peak_flops_per_second", result.peak_rate},
                              {"peak_bytes", context.ledger().peak_total()},
                              {"host_peak_bytes", context.host_ledger().peak_total()},
                              {"peak_resident_bytes", peak_resident_bytes()},
                              {"peak_resident_bytes_of_processes", result.resident}};
  fmt::print("{}\n", line.dump());
}

void print_update(const BenchResult& result) {
  const FileTraffic& files = result.files;
  if (files.read + files.written == 0) return;
  const double rate = static_cast<double>(files.read + files.written) / result.update;
  fmt::print("update          {:.4f} s: {} read and {} written, {:.3f} GB/s", result.update,
             format_bytes(files.read), format_bytes(files.written), rate / 1e9);
  if (result.disk_rate > 0.0) {
    fmt::print("; a plain loop here: {:.3f} GB/s, the update reaches {:.1f}% of it",
               result.disk_rate / 1e9, 100.0 * rate / result.disk_rate);
  }
  fmt::print("\n");
  if (!result.disk_direct) {
    fmt::print("                this file system cannot go past the page cache: rates of memory\n");
  }
}

void print_result(const TrainSettings& settings, const BenchOptions& options, Context& context,
                  Rehearsal& test, const BenchResult& result, double rate) {
  const int ranks = test.engine.groups().world.size();
  fmt::print("step            {:.4f} s median of {} ({:.4f} to {:.4f})\n", result.median,
             options.steps, result.fastest, result.slowest);
  fmt::print("speed           {:.1f} images/s, {:.1f} GFLOP/s of model products (forward x 3)\n",
             static_cast<double>(settings.batch_size) / result.median, rate / 1e9);
  if (result.matrix_rate > 0.0) {
    fmt::print(
        "limit           {:.1f} GFLOP/s for a {}^3 {} product here{}; the step reaches {:.1f}% "
        "of it\n",
        result.matrix_rate / 1e9, options.matrix, name_of(test.engine.precision().parameters),
        ranks > 1 ? ", on every rank at once" : "", 100.0 * rate / (result.matrix_rate * ranks));
  }
  if (result.peak_rate > 0.0) {
    fmt::print("MFU             {:.1f}% of the {:.0f} TFLOP/s that the GPU's data sheet gives\n",
               100.0 * rate / (result.peak_rate * ranks), result.peak_rate / 1e12);
  } else if (result.matrix_rate > 0.0 && context.device() == Device::cuda) {
    fmt::print("MFU             no peak of this GPU in {} is known here; see the limit\n",
               name_of(test.engine.precision().parameters));
  }
  if (ranks > 1) {
    print_traffic(result.collectives, result.sent_bytes);
    fmt::print("exposed         {:.4f} s a step in which rank 0 waited for other ranks ({:.1f}%)\n",
               result.exposed, 100.0 * result.exposed / result.mean);
  }
  if (test.step->replays()) {
    fmt::print("graph           the steps are captured and replayed\n");
  } else if (settings.graph) {
    fmt::print("graph           the steps are not captured: {}\n", test.step->graph_refusal());
  }
  print_update(result);
  print_memory(memory_plan(context.ledger()), memory_plan(context.host_ledger()), ranks);
  fmt::print("                {} held by the process\n", format_bytes(peak_resident_bytes()));
}

// Behind those that are timed.
void trace_steps(const RunTrace& trace, Context& context, Rehearsal& test, std::int64_t batch) {
  constexpr int kTracedSteps = 3;
  trace.start(context);
  for (int i = 0; i < kTracedSteps; ++i) {
    const StepResult result = test.step->run_shape(*test.inputs, batch);
    RunTrace::note(context, {.step = result.step,
                             .samples = result.samples,
                             .graph = test.step->replays(),
                             .skipped = result.skipped});
  }
  const std::string problem = trace.write(context);
  if (!problem.empty()) fail("{}", problem);
}

void bench_rank(const TrainSettings& settings, const BenchOptions& options, Communicator& all) {
  check_same_start(all,
                   {fmt::format("--steps {} --warmup {} --matrix {} --comm-delay {}", options.steps,
                                options.warmup, options.matrix, options.comm_delay),
                    settings.trace.empty() ? "no --trace" : "a --trace"},
                   settings);
  std::unique_ptr<Communicator> delayed;
  if (options.comm_delay > 0.0) {
    std::vector<int> members(static_cast<std::size_t>(all.size()));
    std::iota(members.begin(), members.end(), 0);
    Fault delay;
    delay.call = -1;
    delay.delay_seconds = options.comm_delay;
    delayed = make_faulty_communicator(all.split(members, "bench: delayed ranks"), {delay});
  }
  Communicator& world = delayed ? *delayed : all;
  const bool first = world.rank() == 0;
  const RunTrace trace(settings.trace, all);
  Context context(trace.with_origin(rank_context_options(settings, world)));
  Rehearsal test(settings, context, world);
  if (first && !options.json) {
    fmt::print("model           {} parameters, batch {}, {}\n",
               group_digits(test.model.parameter_count()), settings.batch_size,
               describe(test.engine.precision()));
    fmt::print("ranks           {}; {} thread{} each\n", describe_ranks(settings, world),
               context.threads(), context.threads() == 1 ? "" : "s");
    std::fflush(stdout);
  }
  if (!options.write_inputs.empty()) {
    write_bench_inputs(options.write_inputs, settings, test, options.warmup + options.steps);
    fmt::print("inputs          {}\n", options.write_inputs);
    return;
  }
  const BenchResult result = measure(context, test, settings.batch_size, options);
  const double flops =
      test.model.training_flops_per_image() * static_cast<double>(settings.batch_size);
  const double rate = flops / result.median;
  if (first && options.json) print_json(settings, context, test, result, rate);
  if (first && !options.json) print_result(settings, options, context, test, result, rate);
  if (settings.trace.empty()) return;
  trace_steps(trace, context, test, settings.batch_size);
  if (first && !options.json) fmt::print("trace           {}\n", settings.trace);
}

int bench_step(TrainSettings settings, const BenchOptions& options) {
  SHERD_CHECK(options.steps > 0 && options.warmup >= 0 && options.matrix >= 0,
              "--steps must be positive, --warmup and --matrix not negative");
  const int ranks = planned_ranks(settings);
  check_step(settings, ranks);
  const bool meta = device_from_name(settings.device) == Device::meta;
  SHERD_CHECK(settings.trace.empty() || !meta,
              "--trace: has no effect on meta, where nothing takes time; see sherd plan --trace");
  SHERD_CHECK(options.comm_delay >= 0.0 && options.comm_delay <= 60.0,
              "--comm-delay: expected 0 to 60 seconds, got {}", options.comm_delay);
  SHERD_CHECK(options.comm_delay == 0.0 || (ranks > 1 && !meta),
              "--comm-delay: has no effect {}; it needs several ranks",
              meta ? "on meta" : "on one rank");
  SHERD_CHECK(options.write_inputs.empty() ||
                  (ranks == 1 && !meta && !options.json && settings.trace.empty() &&
                   settings.micro_batch == 0 && settings.precision == "fp32"),
              "--write-inputs: writes what steps start from and times none: on one rank, in fp32, "
              "not on meta, and without --json, --trace and --micro-batch");
  SHERD_CHECK(!meta || options.of_timing.empty(),
              "{}: has no effect on meta, where nothing is computed; leave it out",
              options.of_timing);
  settings.recompute = chosen_recompute(settings, ranks);
  check_memory_limit(settings, ranks);
  if (meta) return run_meta(settings, options);
  std::optional<ClaimedFile> trace;
  if (!settings.trace.empty() && is_first_process()) trace.emplace(settings.trace);
  watch_stop_signals();  // so that files of what is offloaded are removed
  run_on_ranks(settings, [&](Communicator& world) {
    with_memory_advice(settings, ranks, [&] { bench_rank(settings, options, world); });
  });
  return 0;
}

}  // namespace

Command add_bench(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand("bench", "Measures this machine.\n");
  CLI::App* step = app->add_subcommand(
      "step",
      "Times a training step (forward, backward, clipping, update) on random images, and in the "
      "same\n"
      "run the rate of a large matrix product, which is its limit; on a GPU also the share of the "
      "peak\n"
      "that its data sheet gives (MFU). With optimizer state or "
      "parameters\n"
      "in files also the update alone, and the rate of a plain loop on their disk.\n\n"
      "  sherd bench step --preset vit_base_patch16_224 --dataset synthetic --batch-size 8\n"
      "  sherd bench step --preset vit_base_patch16_224 --dataset synthetic --batch-size 8 --ranks "
      "2 --shard "
      "zero3\n"
      "  sherd bench step --preset vit_large_patch16_224 --dataset synthetic --batch-size 64 "
      "--device cuda --precision bf16\n"
      "  sherd bench step --preset vit_huge_patch14_224 --dataset synthetic --device meta\n");
  auto options = std::make_shared<BenchOptions>();
  const std::string group = "benchmark";
  const CLI::Option* steps =
      step->add_option("--steps", options->steps, "steps that are timed [10]")
          ->type_name("INT")
          ->group(group);
  const CLI::Option* warmup =
      step->add_option("--warmup", options->warmup, "steps before them [2; with --graph 4]")
          ->type_name("INT")
          ->group(group);
  const CLI::Option* matrix =
      step->add_option("--matrix", options->matrix,
                       "side of the large product; 0: do not measure it [8192 on cuda, else 2048]")
          ->type_name("INT")
          ->group(group);
  step->add_option("--comm-delay", options->comm_delay,
                   "sleep so many seconds in every collective: how much of it does the overlap "
                   "hide? [0]")
      ->type_name("SECONDS")
      ->group(group);
  step->add_option("--write-inputs", options->write_inputs,
                   "time nothing: write the initial weights, the images, the labels and the "
                   "learning rates of these steps into this folder, for another program to start "
                   "from")
      ->type_name("DIR")
      ->group(group);
  step->add_flag("--json", options->json, "print one JSON object")
      ->group(group)
      ->disable_flag_override();
  SettingFlags flags(
      step, {"model", "optimizer", "sharding", "data.dataset", "data.data_dir", "data.image_size",
             "data.classes", "run.batch_size", "run.micro_batch", "run.device", "run.attention",
             "run.graph", "precision", "memory", "run.threads", "run.seed", "run.trace"});
  const std::vector<Command> others{add_bench_calibrate(*app), add_bench_checkpoint(*app),
                                    add_bench_comm(*app),      add_bench_disk(*app),
                                    add_bench_kernels(*app),   add_bench_matrix(*app),
                                    add_bench_plan(*app)};
  return {app, [options, steps, warmup, matrix, flags, others] {
            for (const Command& other : others) {
              if (other.app->parsed()) return other.run();
            }
            const TrainSettings settings = flags.resolve({});
            for (const CLI::Option* option : {steps, warmup, matrix}) {
              if (option->count() > 0) options->of_timing = option->get_name();
            }
            if (flags.gives("model.weights")) options->of_timing = "--weights";
            if (matrix->count() == 0 && settings.device == "cuda") options->matrix = 8192;
            // Two run as usual, one is captured, and one shows what a replay costs at first.
            if (warmup->count() == 0 && settings.graph) options->warmup = 4;
            return bench_step(settings, *options);
          }};
}

}  // namespace sherd::cli
