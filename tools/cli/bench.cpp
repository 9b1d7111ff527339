// SPDX-License-Identifier: Apache-2.0
#include "command.h"

#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/matmul.h>
#include <sherd/kernels/random.h>
#include <sherd/runtime/data/synthetic.h>
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/io/trace_file.h>
#include <sherd/tools/trainer/train.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

namespace sherd::cli {
namespace {

struct BenchOptions {
  std::int64_t steps = 10, warmup = 2, matrix = 2048;
  bool json = false;
};

struct BenchResult {
  double median = 0.0, fastest = 0.0, slowest = 0.0;  // seconds a step
  double matrix_rate = 0.0;                           // FLOP/s
};

// What the settings need to run a step on `context` again and again.
struct StepUnderTest {
  StepUnderTest(const TrainSettings& settings, Context& context, std::int64_t batch)
      : dataset(make_synthetic_dataset(shape_options(settings))),
        model(model_settings(settings, dataset->channels(), dataset->height(), dataset->width(),
                             dataset->classes())),
        optimizer(make_optimizer(settings)) {
    make_weights(settings, context, model);
    step = std::make_unique<TrainingStep>(context, model, *optimizer,
                                          step_settings(settings, lr_schedule(settings, 1, 1000)));
    const DType dtype = dtype_from_name(settings.dtype);
    const std::int64_t capacity = settings.micro_batch > 0 ? settings.micro_batch : batch;
    inputs = std::make_unique<InputBuffers>(context, *dataset, capacity, dtype);
    inputs->stage_shape(capacity);
    fill_normal(inputs->images(), 0.0, 1.0, RandomStream(1, "bench", "images"));
    std::vector<std::int64_t> labels(static_cast<std::size_t>(capacity));
    for (std::size_t i = 0; i < labels.size(); ++i) {
      labels[i] = static_cast<std::int64_t>(i) % dataset->classes();
    }
    inputs->labels().copy_from_host(labels.data(), labels.size() * sizeof labels[0]);
  }

  static SyntheticOptions shape_options(const TrainSettings& settings) {
    const DataSource data = open_data(settings, DataParts::test);
    SyntheticOptions options;
    options.size = 1;
    options.channels = data.test->channels();
    options.height = data.test->height();
    options.width = data.test->width();
    options.classes = data.test->classes();
    return options;
  }

  std::shared_ptr<ImageDataset> dataset;
  VisionTransformer model;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<TrainingStep> step;
  std::unique_ptr<InputBuffers> inputs;
};

void print_memory(Context& context) {
  const Ledger& ledger = context.ledger();
  fmt::print("peak memory     {} ({})\n", format_bytes(ledger.peak_total()),
             format_breakdown(ledger.at_peak()));
}

int run_meta(Context& context, StepUnderTest& test, std::int64_t batch, bool as_json) {
  const auto start = std::chrono::steady_clock::now();
  context.ledger().reset_peak();
  test.step->run_shape(*test.inputs, batch);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const std::int64_t flops = context.work().matmul_flops + context.work().attention_flops;
  if (as_json) {
    const nlohmann::ordered_json line{{"program", "sherd"},
                                      {"version", version()},
                                      {"device", "meta"},
                                      {"batch_size", batch},
                                      {"parameters", test.model.parameter_count()},
                                      {"flops", flops},
                                      {"peak_bytes", context.ledger().peak_total()}};
    fmt::print("{}\n", line.dump());
    return 0;
  }
  fmt::print("products        {:.2f} TFLOP a step\n", static_cast<double>(flops) / 1e12);
  print_memory(context);
  fmt::print("planned in      {:.3f} s; nothing was allocated or computed\n", seconds);
  return 0;
}

BenchResult measure(Context& context, StepUnderTest& test, std::int64_t batch,
                    const BenchOptions& options) {
  using Clock = std::chrono::steady_clock;
  for (std::int64_t i = 0; i < options.warmup; ++i) test.step->run_shape(*test.inputs, batch);
  context.ledger().reset_peak();
  BenchResult result;
  // The limit is measured before, between and after the steps, so that both see the same machine.
  const auto measure_limit = [&] {
    result.matrix_rate =
        std::max(result.matrix_rate, measure_matmul_rate(context, DType::f32, options.matrix, 3));
  };
  std::vector<double> seconds;
  for (std::int64_t i = 0; i < options.steps; ++i) {
    if (options.matrix > 0 && (i == 0 || i == options.steps / 2)) measure_limit();
    const auto start = Clock::now();
    test.step->run_shape(*test.inputs, batch);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  if (options.matrix > 0) measure_limit();
  std::ranges::sort(seconds);
  result.median = seconds[seconds.size() / 2];
  result.fastest = seconds.front();
  result.slowest = seconds.back();
  return result;
}

int bench_step(const TrainSettings& settings, const BenchOptions& options) {
  SHERD_CHECK(options.steps > 0 && options.warmup >= 0 && options.matrix >= 0,
              "--steps must be positive, --warmup and --matrix not negative");
  const std::int64_t batch = settings.batch_size;
  check_range("--batch-size", batch, 1, 1 << 24);
  check_range("--micro-batch", settings.micro_batch, 0, batch);
  SHERD_CHECK(settings.trace.empty() || (!options.json && settings.device != "meta"),
              "--trace: has no effect with --json or on meta");
  // Claimed before the work: a name that is taken or cannot be written is refused at once.
  if (!settings.trace.empty()) create_new_file(settings.trace, "");
  Context context(context_options(settings));
  StepUnderTest test(settings, context, batch);
  if (!options.json) {
    fmt::print("model           {} parameters, batch {}, {}, {} threads\n",
               group_digits(test.model.parameter_count()), batch, settings.dtype,
               context.threads());
  }
  if (context.is_meta()) return run_meta(context, test, batch, options.json);
  const BenchResult result = measure(context, test, batch, options);
  const double flops = test.model.training_flops_per_image() * static_cast<double>(batch);
  const double rate = flops / result.median;
  if (options.json) {
    nlohmann::ordered_json line{{"program", "sherd"},
                                {"version", version()},
                                {"build", build_description()},
                                {"threads", context.threads()},
                                {"batch_size", batch},
                                {"parameters", test.model.parameter_count()},
                                {"seconds_per_step", result.median},
                                {"seconds_fastest", result.fastest},
                                {"seconds_slowest", result.slowest},
                                {"images_per_second", static_cast<double>(batch) / result.median},
                                {"flops_per_second", rate},
                                {"matrix_flops_per_second", result.matrix_rate},
                                {"peak_bytes", context.ledger().peak_total()},
                                {"peak_resident_bytes", peak_resident_bytes()}};
    fmt::print("{}\n", line.dump());
    return 0;
  }
  fmt::print("step            {:.4f} s median of {} ({:.4f} to {:.4f})\n", result.median,
             options.steps, result.fastest, result.slowest);
  fmt::print("speed           {:.1f} images/s, {:.1f} GFLOP/s of model products (forward x 3)\n",
             static_cast<double>(batch) / result.median, rate / 1e9);
  if (result.matrix_rate > 0.0) {
    fmt::print(
        "limit           {:.1f} GFLOP/s for a {}^3 fp32 product here; the step reaches {:.1f}% of "
        "it\n",
        result.matrix_rate / 1e9, options.matrix, 100.0 * rate / result.matrix_rate);
  }
  print_memory(context);
  fmt::print("                {} held by the process\n", format_bytes(peak_resident_bytes()));
  if (!settings.trace.empty()) {
    context.trace().enable();
    test.step->run_shape(*test.inputs, batch);
    write_trace(context.trace(), settings.trace);
    fmt::print("trace           {}\n", settings.trace);
  }
  return 0;
}

}  // namespace

Command add_bench(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand("bench", "Measures this machine.\n");
  CLI::App* step = app->add_subcommand(
      "step",
      "Times a training step (forward, backward, clipping, update) on random images, and in the "
      "same\n"
      "run the rate of a large matrix product, which is its limit.\n\n"
      "  sherd bench step --preset vit_base_patch16_224 --dataset synthetic --batch-size 8\n"
      "  sherd bench step --preset vit_huge_patch14_224 --dataset synthetic --device meta\n");
  auto options = std::make_shared<BenchOptions>();
  const std::string group = "benchmark";
  step->add_option("--steps", options->steps, "steps that are timed [10]")
      ->type_name("INT")
      ->group(group);
  step->add_option("--warmup", options->warmup, "steps before them [2]")
      ->type_name("INT")
      ->group(group);
  step->add_option("--matrix", options->matrix,
                   "side of the large product; 0: do not measure it [2048]")
      ->type_name("INT")
      ->group(group);
  step->add_flag("--json", options->json, "print one JSON object")
      ->group(group)
      ->disable_flag_override();
  SettingFlags flags(
      step, {"model", "optimizer", "data.dataset", "data.data_dir", "data.image_size",
             "data.classes", "run.batch_size", "run.micro_batch", "run.device", "run.dtype",
             "run.memory_limit", "run.threads", "run.seed", "run.trace"});
  const Command comm = add_bench_comm(*app);
  return {app, [options, flags, comm] {
            if (comm.app->parsed()) return comm.run();
            return bench_step(flags.resolve({}), *options);
          }};
}

}  // namespace sherd::cli
