// SPDX-License-Identifier: Apache-2.0
// `sherd bench calibrate`: this machine as a system that `sherd plan` takes.
#include "calibration_cases.h"
#include "command.h"
#include "disk_loop.h"
#include "kernel_timer.h"
#include "quantile.h"
#include "stop_signal.h"

#include <sherd/comm/device_communicator.h>
#include <sherd/comm/rank_threads.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/runtime/cuda/device.h>
#include <sherd/runtime/io/file.h>
#include <sherd/tools/planner/measured_cost.h>
#include <sherd/tools/planner/system.h>
#include <sherd/tools/trainer/setup.h>
#include <sherd/tools/trainer/train.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

namespace sherd::cli {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;
using Point = MeasuredCosts::Point;

struct CalibrateOptions {
  std::string out, name = "this-machine", precisions = "fp32,bf16", tables, device = "cpu", base;
  std::int64_t repeat = 7;
  bool quick = false;
};

struct Layout {
  int threads = 1, ranks = 1;
};

// "2x1,1x2": threads of a rank x ranks.
std::vector<Layout> parse_tables(const std::string& text, bool cuda) {
  const int cores = default_threads();
  if (text.empty() && cuda) {
    std::vector<Layout> all{{1, 1}};
    if (cuda::device_count() > 1) all.push_back({1, cuda::device_count()});
    return all;
  }
  if (text.empty()) {
    std::vector<Layout> all{{cores, 1}};
    if (cores > 1) all.push_back({1, cores});
    return all;
  }
  std::vector<Layout> all;
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const std::size_t by = part.find('x');
    Layout layout{0, 0};
    try {
      if (by != std::string::npos)
        layout = {std::stoi(part.substr(0, by)), std::stoi(part.substr(by + 1))};
    } catch (const std::exception&) {
    }
    SHERD_CHECK(layout.threads > 0 && layout.ranks > 0 && layout.threads * layout.ranks <= 4096,
                "--tables: expected THREADSxRANKS, such as {}x1,1x{}, got '{}'", cores, cores,
                part);
    all.push_back(layout);
  }
  SHERD_CHECK(!all.empty(), "--tables: expected THREADSxRANKS, such as {}x1", cores);
  return all;
}

std::vector<DType> parse_precisions(const std::string& text) {
  std::vector<DType> all;
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const DType dtype = dtype_from_name(part);
    SHERD_CHECK(is_floating(dtype), "--precisions: expected fp32, bf16, fp16 or fp64, got '{}'",
                part);
    all.push_back(dtype);
  }
  SHERD_CHECK(!all.empty(), "--precisions: expected a list such as fp32,bf16");
  return all;
}

// What the kernel of a case is asked for. Nothing where it is made of several, as a product is in a
// type that the processor does not multiply: those have cases of their own.
std::optional<Work> work_of(const CalibrationCase& one, const Context& context) {
  Schedule schedule;
  Context paper({.device = Device::meta,
                 .meta_of = context.device(),
                 .threads = context.threads(),
                 .schedule = &schedule});
  const std::function<void()> call = one.make(paper);
  schedule.clear();
  call();
  SHERD_INTERNAL_CHECK(!schedule.works().empty(), "a case of calibration is no work");
  if (schedule.works().size() > 1) return {};
  return schedule.works().front();
}

class Calibration {
 public:
  Calibration(const CalibrateOptions& options, std::vector<DType> dtypes, const Layout& layout)
      : options_(options), dtypes_(std::move(dtypes)), layout_(layout) {}

  std::vector<Point> run(ProgressLine& progress) {
    run_rank_threads(layout_.ranks, [&](Communicator& world) { measure(world, progress); });
    return std::move(points_);
  }

 private:
  void measure(Communicator& world, ProgressLine& progress) {
    const bool cuda = options_.device == "cuda";
    Context context({.device = cuda ? Device::cuda : Device::cpu,
                     .device_index = cuda ? world.rank() : 0,
                     .threads = layout_.threads,
                     .rank = world.rank()});
    KernelTimer timer(context,
                      options_.quick ? kSmallBuffer
                      : cuda         ? kDeviceBuffer
                                     : kBuffer,
                      static_cast<int>(options_.repeat), [&] {
                        // Ranks compute at once, as in a step: they share the memory's bandwidth.
                        if (world.size() > 1) world.barrier("calibrate: at once");
                      });
    for (const DType dtype : dtypes_) {
      const std::vector<CalibrationCase> cases =
          calibration_cases(dtype, options_.quick, cuda && !options_.quick ? 8 : 1);
      for (std::size_t i = 0; i < cases.size(); ++i) {
        const std::optional<Work> work = work_of(cases[i], context);
        if (!work) continue;
        const std::function<void()> call = cases[i].make(context);
        world.barrier("calibrate: a kernel");
        check_not_stopped("nothing was written");
        // Not the median: what disturbs a call, on a machine that is never quite idle, adds to it.
        const double seconds = timer.measure(call).quartile;
        add(world, *work, seconds);
        if (world.rank() == 0) {
          progress.show(fmt::format("{} threads x {} ranks, {}: {} {}/{} {}", layout_.threads,
                                    layout_.ranks, name_of(dtype),
                                    bar(double(i) / double(cases.size()), 24), i + 1, cases.size(),
                                    work->name));
        }
      }
    }
    if (layout_.ranks > 1) measure_collectives(world, context, progress);
  }

  // The slowest rank counts, for the others wait for it.
  void add(Communicator& world, const Work& work, double seconds) {
    auto nanoseconds = static_cast<std::int64_t>(std::llround(seconds * 1e9));
    world.all_reduce(&nanoseconds, 1, DType::i64, ReduceOp::max, "calibrate: the slowest rank");
    if (world.rank() == 0) {
      points_.push_back(
          {work, std::string(work.name), std::max(1e-9, static_cast<double>(nanoseconds) / 1e9)});
    }
  }

  // Ranks agree in the host's memory; tensors travel where they lie.
  void measure_collectives(Communicator& world, Context& context, ProgressLine& progress) {
    std::unique_ptr<Stream> stream;
    std::unique_ptr<Communicator> on_device;
    if (context.device() == Device::cuda) {
      stream = context.make_stream("communication stream");
      on_device = make_device_communicator(world, context, *stream, false);
    }
    std::vector<DType> dtypes{DType::f32};
    for (const DType dtype : dtypes_) {
      if (dtype != DType::f32) dtypes.push_back(dtype);
    }
    for (const DType dtype : dtypes) {
      const std::int64_t most = options_.quick ? 1 << 16 : 64 << 20;
      for (std::int64_t bytes = 4096; bytes <= most; bytes *= 4) {
        if (world.rank() == 0)
          progress.show(
              fmt::format("collectives of {} among {} ranks", name_of(dtype), world.size()));
        measure_collectives_of(world, on_device ? *on_device : world, stream.get(), context, dtype,
                               bytes);
      }
    }
    std::vector<std::int64_t> message(1024);
    for (std::int64_t count = 16; count <= 1024; count *= 8) {
      time_collective(world, Collective::all_reduce, DType::i64, 8 * count, [&] {
        world.all_reduce(message.data(), count, DType::i64, ReduceOp::sum, "calibrate");
      });
    }
    time_collective(world, Collective::barrier, DType::u8, 0, [&] { world.barrier("calibrate"); });
  }

  void measure_collectives_of(Communicator& world, Communicator& group, Stream* stream,
                              Context& context, DType dtype, std::int64_t bytes) {
    const auto size = static_cast<std::int64_t>(size_of(dtype));
    const std::int64_t count = std::max<std::int64_t>(1, bytes / size / world.size());
    const std::int64_t whole = count * world.size();
    const Tensor from = Tensor::zeros(context, {whole}, dtype, MemoryCategory::workspace),
                 into = Tensor::zeros(context, {2 * whole}, dtype, MemoryCategory::workspace);
    context.compute_stream().synchronize();
    void* const a = from.raw_data();
    void* const b = into.raw_data();
    const auto timed = [&](Collective collective, const auto& call) {
      time_collective(world, collective, dtype, whole * size, [&] {
        call();
        if (stream != nullptr) stream->synchronize();
      });
    };
    timed(Collective::all_gather, [&] { group.all_gather(a, b, count, dtype, "calibrate"); });
    timed(Collective::reduce_scatter,
          [&] { group.reduce_scatter_wide(a, b, count, dtype, ReduceOp::sum, "calibrate"); });
    timed(Collective::all_reduce,
          [&] { group.all_reduce(a, whole, dtype, ReduceOp::sum, "calibrate"); });
  }

  template <typename Call>
  void time_collective(Communicator& world, Collective collective, DType dtype, std::int64_t bytes,
                       const Call& call) {
    constexpr int kCalls = 11;
    call();
    std::vector<double> seconds;
    for (int i = 0; i < kCalls; ++i) {
      world.barrier("calibrate: a collective");
      const auto start = Clock::now();
      call();
      seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    }
    add(world,
        {.kind = Work::Kind::collective,
         .name = name_of(collective),
         .dtype = dtype,
         .bytes = bytes,
         .group = {.size = world.size()}},
        quantile(seconds, 0.25));
  }

  static constexpr std::size_t kBuffer = std::size_t{64} << 20;  // beyond the caches
  static constexpr std::size_t kDeviceBuffer = std::size_t{512} << 20;
  static constexpr std::size_t kSmallBuffer = std::size_t{1} << 20;
  const CalibrateOptions& options_;
  std::vector<DType> dtypes_;
  Layout layout_;
  std::vector<Point> points_;  // of rank 0
};

std::string processor_kind() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.find("AuthenticAMD") != std::string::npos) return "amd";
    if (line.find("GenuineIntel") != std::string::npos) return "intel";
    if (line.find("POWER") != std::string::npos) return "power";
    if (line.starts_with("CPU implementer")) return "arm";
  }
  return "intel";
}

// The fastest of some points, in FLOP or bytes per second.
template <typename Which>
double best_rate(const std::vector<Point>& points, bool flops, const Which& which) {
  double best = 0.0;
  for (const Point& point : points) {
    if (!which(point)) continue;
    const std::int64_t amount = flops ? point.work.flops : point.work.bytes;
    best = std::max(best, static_cast<double>(amount) / point.seconds);
  }
  return best;
}

// The machine in the form of a system file. Its plain numbers stand in for what the tables lack.
Json describe_machine(const CalibrateOptions& options, const std::vector<DType>& dtypes,
                      const std::vector<Point>& points, const std::string& folder) {
  const auto kernels = [&](const char* name) {
    return best_rate(points, false, [&](const Point& p) {
      return p.name == name && (options.quick || p.work.bytes > (8 << 20));
    });
  };
  Json products = Json::object();
  for (const DType dtype : dtypes) {
    const double rate = best_rate(points, true, [&](const Point& p) {
      return p.work.kind == Work::Kind::product && p.work.dtype == dtype;
    });
    if (rate == 0.0) continue;  // its products are made of others
    products[std::string(name_of(dtype))] = {{"peak_TFLOP_per_s", rate / 1e12},
                                             {"measured_TFLOP_per_s", rate / 1e12},
                                             {"measured_at", {1576, 3072, 768}},
                                             {"tiles", {{64, 64, 1.0}}},
                                             {"prologue_k", 16}};
  }
  SHERD_CHECK(!products.empty(),
              "--precisions: this processor multiplies in none of these types; add fp32");
  const auto attention = [&](const char* name) {
    const double rate = best_rate(points, true, [&](const Point& p) {
      return p.name == name && p.work.dtype == dtypes.front();
    });
    const double product = best_rate(points, true, [&](const Point& p) {
      return p.work.kind == Work::Kind::product && p.work.dtype == dtypes.front();
    });
    return std::clamp(rate / product, 0.01, 1.0);
  };
  const double bandwidth = kernels("add");
  DiskLimit disk(folder, std::uint64_t{options.quick ? 8U : 256U} << 20);
  const std::int64_t memory = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  return {{"name", options.name},
          {"about",
           {fmt::format("Measured by sherd bench calibrate, sherd {} ({}).", version(),
                        build_description())}},
          {"device", "cpu"},
          {"memory_MiB", static_cast<double>(memory >> 20)},
          {"devices_per_node", std::max(2, default_threads())},
          {"products", products},
          {"memory", {{"GB_per_s", bandwidth / 1e9}, {"reached", 1.0}}},
          {"launch", {{"host_us", 0}, {"smallest_kernel_us", 1}}},
          {"attention",
           {{"forward", attention("attention_forward")},
            {"backward", attention("attention_backward")}}},
          {"node_link", {{"kind", "memory"}, {"GB_per_s", bandwidth / 2e9}, {"latency_us", 10}}},
          {"host",
           {{"processor", processor_kind()},
            {"memory_GB_per_s", bandwidth / 1e9},
            {"disk_GB_per_s", disk.measure() / 1e9}}}};
}

int calibrate(const CalibrateOptions& options) {
  check_range("--repeat", options.repeat, 3, 1000);
  SHERD_CHECK(!options.name.empty(), "--name: expected a name, got ''");
  const bool cuda = device_from_name(options.device) == Device::cuda;
  SHERD_CHECK(cuda || options.device == "cpu", "--device: expected cpu or cuda, got '{}'",
              options.device);
  SHERD_CHECK(
      cuda != options.base.empty(),
      "--base: a GPU's tables go into the description of its system, whose links and memory "
      "are not measured, such as --base dgx-h100; a processor needs none");
  Json machine;
  if (cuda) {
    const System base = read_system(options.base);
    SHERD_CHECK(base.cuda, "--base {}: is of device cpu", base.name);
    const std::vector<std::uint8_t> text = read_file(base.path);
    machine = Json::parse(text.begin(), text.end());
    machine["name"] = options.name;
    machine["about"].push_back(
        fmt::format("Tables measured by sherd bench calibrate, sherd {} ({}).", version(),
                    build_description()));
  }
  const std::vector<Layout> layouts = parse_tables(options.tables, cuda);
  const std::vector<DType> dtypes = parse_precisions(options.precisions);
  const std::string out = options.out.empty() ? options.name + ".json" : options.out;
  SHERD_CHECK(out.ends_with(".json"), "--out: expected a name that ends with .json, got '{}'", out);
  const ClaimedFile claimed(out);
  watch_stop_signals();
  const auto start = Clock::now();
  ProgressLine progress;
  Json tables = Json::array();
  for (const Layout& layout : layouts) {
    const std::vector<Point> points = Calibration(options, dtypes, layout).run(progress);
    if (machine.is_null()) {
      const std::string folder = std::filesystem::path(out).parent_path().string();
      machine = describe_machine(options, dtypes, points, folder.empty() ? "." : folder);
    }
    tables.push_back(measured_table(layout.threads, layout.ranks, points));
    progress.clear();
    fmt::print("{} thread{} x {} rank{}: {} points\n", layout.threads,
               layout.threads == 1 ? "" : "s", layout.ranks, layout.ranks == 1 ? "" : "s",
               points.size());
  }
  machine["measured"] = {{"cores", default_threads()}, {"tables", std::move(tables)}};
  const std::string text = machine.dump(1) + "\n";
  parse_system(text, out);  // what plan will read
  AtomicFile file(out);
  file.write(text);
  file.commit();
  fmt::print("{}: measured in {:.0f} s; sherd plan --system {} ...\n", out,
             std::chrono::duration<double>(Clock::now() - start).count(), out);
  return 0;
}

}  // namespace

Command add_bench_calibrate(CLI::App& bench) {
  CLI::App* app = bench.add_subcommand(
      "calibrate",
      "Measures this machine's kernels, products and collectives at many sizes, for `sherd plan`.\n"
      "Let nothing else run meanwhile.\n\n"
      "  sherd bench calibrate                                this-machine.json\n"
      "  sherd bench calibrate --precisions fp32 --tables 2x1,1x2\n"
      "  sherd bench calibrate --device cuda --base dgx-h100  on a machine with such GPUs\n"
      "  sherd plan --system this-machine.json --preset vit_base_patch16_224 --batch-size 8\n");
  auto options = std::make_shared<CalibrateOptions>();
  app->add_option("--out", options->out, "the file [NAME.json]")->type_name("FILE");
  app->add_option("--name", options->name, "of the system [this-machine]")->type_name("NAME");
  app->add_option("--device", options->device, "cpu or cuda [cpu]")->type_name("NAME");
  app->add_option("--base", options->base,
                  "with cuda: the system that the tables are added to, for its links and memory")
      ->type_name("NAME|FILE");
  app->add_option("--precisions", options->precisions, "types to measure [fp32,bf16]")
      ->type_name("LIST");
  app->add_option("--tables", options->tables,
                  "threads of a rank x ranks that work at once [all cores x 1, 1 x all cores]")
      ->type_name("LIST");
  app->add_option("--repeat", options->repeat,
                  "timed calls of each, of which the lower quartile counts [7]")
      ->type_name("INT");
  app->add_flag("--quick", options->quick,
                "small sizes alone, in seconds: a first look, too coarse to plan large models by")
      ->disable_flag_override();
  return {app, [options] {
            check_one_process("bench calibrate");
            return calibrate(*options);
          }};
}

}  // namespace sherd::cli
