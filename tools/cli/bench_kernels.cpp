// SPDX-License-Identifier: Apache-2.0
// `sherd bench kernels`: how near each kernel comes to what the device can do.
#include "command.h"
#include "kernel_cases.h"
#include "kernel_timer.h"

#include <sherd/kernels/attention.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/matmul.h>
#include <sherd/kernels/random.h>
#include <sherd/runtime/cuda/device.h>
#include <sherd/runtime/suggest.h>
#include <sherd/tools/trainer/setup.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace sherd::cli {
namespace {

struct KernelOptions {
  std::string device = "cpu", attention = "auto", dtype = "bf16", only, buffer;
  std::vector<std::string> models = {"base", "large", "huge"};
  std::vector<std::int64_t> tokens;
  std::int64_t batch_size = 0, matrix = 0;
  int repeat = 0, threads = 0;
  bool json = false;
};

// What the device can do, measured before and after the kernels; the better counts.
struct Limits {
  double product = 0.0;  // FLOP/s of a large square product
  double copy = 0.0;     // bytes/s, read and written, of a copy
};

struct Row {
  std::string model, kernel, shape;
  DType dtype;
  std::int64_t bytes;
  CallTimes times;

  bool counts_flops() const { return bytes == 0; }
  double rate() const {
    return static_cast<double>(counts_flops() ? times.flops : bytes) / times.median;
  }
  double share(const Limits& limits) const {
    return rate() / (counts_flops() ? limits.product : limits.copy);
  }
};

std::string preset_of(const std::string& size) {
  std::vector<std::string> sizes;
  for (const std::string& name : vit_preset_names()) {  // "vit_base_patch16_224"
    sizes.push_back(name.substr(4, name.find("_patch") - 4));
    if (sizes.back() == size) return name;
  }
  fail("--models: unknown size '{}'{}", size, did_you_mean(size, sizes));
}

class KernelBench {
 public:
  KernelBench(Context& context, const KernelOptions& options)
      : context_(context),
        options_(options),
        buffer_(parse_bytes(options.buffer, "--buffer")),
        timer_(context, buffer_, options.repeat) {}

  void run() {
    measure_limits();
    for (const std::string& size : options_.models) {
      const KernelSizes sizes{vit_preset(preset_of(size)), options_.batch_size,
                              dtype_from_name(options_.dtype)};
      const auto visit = [&](const KernelCase& kernel) { measure(size, kernel); };
      visit_products(context_, sizes, visit);
      visit_attention(context_, sizes, sizes.model.tokens(), visit);
      // Longer sequences: of the first size, since it is the head's width that matters.
      if (size == options_.models.front()) {
        for (const std::int64_t tokens : options_.tokens)
          visit_attention(context_, sizes, tokens, visit);
      }
      visit_memory_bound(context_, sizes, visit);
    }
    SHERD_CHECK(!rows_.empty(), "--only: no kernel's name contains '{}'", options_.only);
    measure_limits();
    progress_.clear();
  }

  const std::vector<Row>& rows() const { return rows_; }
  const Limits& limits() const { return limits_; }
  std::size_t buffer() const { return buffer_; }

 private:
  void measure(const std::string& size, const KernelCase& kernel) {
    if (kernel.kernel.find(options_.only) == std::string::npos) return;
    progress_.show(fmt::format("ViT {}: {}", size, kernel.kernel));
    rows_.push_back({size, kernel.kernel, kernel.shape, kernel.dtype, kernel.bytes,
                     timer_.measure(kernel.call)});
  }

  void measure_limits() {
    progress_.show("limits: a large product, a copy");
    const DType dtype = dtype_from_name(options_.dtype);
    const Shape square{options_.matrix, options_.matrix};
    const Tensor a = Tensor::empty(context_, square, dtype);
    const Tensor b = Tensor::empty(context_, square, dtype);
    fill_normal(a, 0.0, 1.0, RandomStream(context_.seed(), "bench", "a"));
    fill_normal(b, 0.0, 1.0, RandomStream(context_.seed(), "bench", "b"));
    const CallTimes product = timer_.measure([&] { matmul(a, b); });
    limits_.product =
        std::max(limits_.product, static_cast<double>(product.flops) / product.fastest);
    const Tensor from = full(context_, {static_cast<std::int64_t>(buffer_ / 4)}, DType::f32, 1.0);
    const Tensor to = Tensor::empty(context_, from.shape(), DType::f32);
    const CallTimes copied = timer_.measure([&] { copy(to, from); });
    limits_.copy = std::max(limits_.copy, 2.0 * static_cast<double>(buffer_) / copied.fastest);
  }

  Context& context_;
  const KernelOptions& options_;
  std::size_t buffer_;
  KernelTimer timer_;
  Limits limits_;
  std::vector<Row> rows_;
  ProgressLine progress_;
};

std::string device_text(const Context& context) {
  return context.device() == Device::cuda
             ? fmt::format("{} ({})", cuda::device_name(context.device_index()), cuda::build_name())
             : fmt::format("cpu, {} threads", context.threads());
}

void print_json(const KernelBench& bench, const Context& context, const KernelOptions& options) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const Row& row : bench.rows()) {
    nlohmann::ordered_json line{
        {"model", row.model},          {"kernel", row.kernel},
        {"shape", row.shape},          {"dtype", name_of(row.dtype)},
        {"seconds", row.times.median}, {"seconds_fastest", row.times.fastest},
        {"calls", row.times.calls}};
    if (row.counts_flops()) {
      line["flops"] = row.times.flops;
      line["flops_per_second"] = row.rate();
      line["limit"] = "product";
    } else {
      line["bytes"] = row.bytes;
      line["bytes_per_second"] = row.rate();
      line["limit"] = "copy";
    }
    line["of_limit"] = row.share(bench.limits());
    rows.push_back(std::move(line));
  }
  const nlohmann::ordered_json line{{"program", "sherd"},
                                    {"version", version()},
                                    {"build", build_description()},
                                    {"device", device_text(context)},
                                    {"batch_size", options.batch_size},
                                    {"dtype", options.dtype},
                                    {"attention", options.attention},
                                    {"matrix", options.matrix},
                                    {"buffer_bytes", bench.buffer()},
                                    {"product_flops_per_second", bench.limits().product},
                                    {"copy_bytes_per_second", bench.limits().copy},
                                    {"kernels", rows}};
  fmt::print("{}\n", line.dump());
}

void print_table(const KernelBench& bench, const Context& context, const KernelOptions& options) {
  const Limits& limits = bench.limits();
  fmt::print("device          {}\n", device_text(context));
  fmt::print("product limit   {:.1f} GFLOP/s: a {}^3 {} product\n", limits.product / 1e9,
             options.matrix, options.dtype);
  fmt::print("memory limit    {:.1f} GB/s: a copy of {}, read and written\n\n", limits.copy / 1e9,
             format_bytes(static_cast<std::int64_t>(bench.buffer())));
  fmt::print("{:<6} {:<26} {:<26} {:<5} {:>10} {:>10} {:<7} {:>8}\n", "model", "kernel", "size",
             "type", "us", "rate", "", "of limit");
  for (const Row& row : bench.rows()) {
    fmt::print("{:<6} {:<26} {:<26} {:<5} {:>10.1f} {:>10.1f} {:<7} {:>7.1f}%\n", row.model,
               row.kernel, row.shape, name_of(row.dtype), row.times.median * 1e6, row.rate() / 1e9,
               row.counts_flops() ? "GFLOP/s" : "GB/s", 100.0 * row.share(limits));
  }
  fmt::print(
      "\nMedians; each call finds its operands in memory. Rates count products, recomputation in\n"
      "attention's backward included, or the bytes of each operand once.\n");
}

int bench_kernels(KernelOptions options) {
  check_one_process("bench kernels");
  SHERD_CHECK(
      options.batch_size >= 0 && options.matrix >= 0 && options.repeat >= 0 && options.threads >= 0,
      "--batch-size, --matrix, --repeat and --threads must not be negative");
  TrainSettings chosen;
  chosen.device = options.device;
  chosen.attention = options.attention;
  chosen.threads = options.threads;
  SHERD_CHECK(device_from_name(options.device) != Device::meta,
              "--device meta: computes nothing that could be timed; use cpu or cuda");
  const ContextOptions settings = context_options(chosen);
  for (const std::int64_t tokens : options.tokens) check_range("--tokens", tokens, 1, 1 << 20);
  for (const std::string& size : options.models) preset_of(size);
  const DType dtype = dtype_from_name(options.dtype);
  SHERD_CHECK(dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f32,
              "--dtype: expected bf16, f16 or f32, got {}", options.dtype);
  options.dtype = name_of(dtype);
  const bool cuda = settings.device == Device::cuda;
  if (options.batch_size == 0) options.batch_size = cuda ? 64 : 1;
  if (options.matrix == 0) options.matrix = cuda ? 8192 : 2048;
  if (options.buffer.empty()) options.buffer = cuda ? "256MiB" : "64MiB";
  SHERD_CHECK(parse_bytes(options.buffer, "--buffer") >= 4096,
              "--buffer: expected at least 4096 bytes, got {}", options.buffer);
  Context context(settings);
  KernelBench bench(context, options);
  bench.run();
  options.json ? print_json(bench, context, options) : print_table(bench, context, options);
  return 0;
}

}  // namespace

Command add_bench_kernels(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand(
      "kernels",
      "Times the operations of a ViT's training step one by one, beside the "
      "rate of a large square\n"
      "product and of a copy, which are their limits.\n\n"
      "  sherd bench kernels --device cuda\n"
      "  sherd bench kernels --device cuda --models huge --only attention --attention cudnn\n"
      "  sherd bench kernels --models tiny --dtype f32\n");
  auto options = std::make_shared<KernelOptions>();
  app->add_option("--device", options->device, "cpu or cuda [cpu]")->type_name("TEXT");
  app->add_option("--attention", options->attention,
                  "whose attention on cuda: own, cudnn, or auto: own [auto]")
      ->type_name("TEXT");
  app->add_option("--models", options->models,
                  "sizes of ViT: tiny, small, base, large, huge [base,large,huge]")
      ->type_name("TEXT,...")
      ->delimiter(',');
  app->add_option("--batch-size", options->batch_size, "images [64 on cuda, 1 on cpu]")
      ->type_name("INT");
  app->add_option("--dtype", options->dtype,
                  "of what most kernels read and write: bf16, f16, f32 [bf16]")
      ->type_name("TEXT");
  app->add_option("--tokens", options->tokens,
                  "more lengths of attention's sequences, for the first model [none]")
      ->type_name("INT,...")
      ->delimiter(',');
  app->add_option("--only", options->only, "kernels whose name contains this [all]")
      ->type_name("TEXT");
  app->add_option("--matrix", options->matrix, "side of the square product [8192; 2048 on cpu]")
      ->type_name("INT");
  app->add_option("--buffer", options->buffer,
                  "what is copied for the memory's rate, and what is read before each call,\n"
                  "so that no cache holds its operands [256MiB; 64MiB on cpu]")
      ->type_name("SIZE");
  app->add_option("--repeat", options->repeat,
                  "timed calls of each; 0: what fits in 0.1 s, 3 to 200 [0]")
      ->type_name("INT");
  app->add_option("--threads", options->threads, "on cpu; 0: all processors [0]")->type_name("INT");
  app->add_flag("--json", options->json, "print one JSON object")->disable_flag_override();
  return {app, [options] { return bench_kernels(*options); }};
}

}  // namespace sherd::cli
