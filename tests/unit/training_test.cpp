// SPDX-License-Identifier: Apache-2.0
// Whole training steps: golden runs, reproducibility, plans on meta, numbers that are not finite.
#include <doctest/doctest.h>
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/io/safetensors.h>
#include <sherd/tools/trainer/golden.h>
#include <sherd/tools/trainer/ranks.h>
#include <sherd/tools/trainer/train.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "io_support.h"

using namespace sherd;

namespace {

// A small run on synthetic images, with everything random switched on.
TrainSettings small_run(const std::string& out) {
  TrainSettings s;
  s.dataset = "synthetic";
  s.image_size = "2x12x8";
  s.images = 70;
  s.classes = 4;
  s.patch = 4;
  s.dim = 24;
  s.depth = 2;
  s.heads = 3;
  s.drop = 0.1;
  s.drop_path = 0.2;
  s.batch_size = 16;
  s.epochs = 2;
  s.threads = 2;
  s.label_smoothing = 0.1;
  s.out = out;
  return s;
}

std::vector<std::uint8_t> weights_of(const TrainSettings& settings) {
  TrainObserver quiet;
  return read_file(train(settings, quiet).weights_path);
}

GoldenResult repeat_golden(const std::string& name, DType dtype, double tolerance) {
  GoldenOptions options;
  options.directory = std::string(SHERD_TEST_DATA) + "/golden/" + name;
  options.dtype = dtype;
  options.tolerance = tolerance;
  options.ranks.threads = 2;
  return run_golden(options, [](const GoldenStep&) {});
}

// A model on one rank, ready to step.
struct OneRank {
  OneRank(const ContextOptions& options, const ViTSettings& model_settings, const TrainSettings& s)
      : context(options),
        model(model_settings),
        world(context.is_meta() ? make_meta_communicator(0, 1) : make_self_communicator()),
        engine(model, context, *world, training_precision(s), sharding_options(s, 1)),
        optimizer(make_optimizer(s)),
        step(context, model, engine, *optimizer, step_settings(s, lr_schedule(s, 10, 20))) {
    engine.initialize();
  }
  Context context;
  VisionTransformer model;
  std::unique_ptr<Communicator> world;
  ShardingEngine engine;
  std::unique_ptr<Optimizer> optimizer;
  TrainingStep step;
};

struct PlannedRun {
  MemoryBreakdown peaks{}, at_peak{};
  std::int64_t total = 0, flops = 0;
};

// Two steps and what the ledger says of them.
PlannedRun run_on(Device device, const TrainSettings& s, std::int64_t batch) {
  OneRank rank({.device = device, .threads = 2}, model_settings(s, 2, 12, 8, 4), s);
  Context& context = rank.context;
  const DataSource data = open_data(s);
  const std::int64_t micro = s.micro_batch > 0 ? s.micro_batch : batch;
  InputBuffers inputs(context, *data.train, micro, rank.engine.precision().master);
  BatchLoaderOptions options = loader_options(s, data, batch, true);
  BatchLoader loader(data.train, options);
  loader.start_epoch(0);
  for (int i = 0; i < 2; ++i) rank.step.run(inputs, loader.next());
  const Ledger& ledger = context.ledger();
  return {ledger.peaks(), ledger.at_peak(), ledger.peak_total(),
          context.work().matmul_flops + context.work().attention_flops};
}

}  // namespace

TEST_CASE("golden runs by PyTorch are repeated") {
  for (const char* name : {"cls", "mean"}) {
    CAPTURE(name);
    const GoldenResult exact = repeat_golden(name, DType::f64, 1e-9);
    CHECK(exact.passed);
    CHECK(exact.weights_compared);
    CHECK(exact.worst_error < 1e-12);
    CHECK(exact.worst_weight_error < 1e-11);
    CHECK(repeat_golden(name, DType::f32, 1e-5).passed);
  }
}

TEST_CASE("golden runs: a wrong field, a tolerance that is too small") {
  CHECK_FALSE(repeat_golden("cls", DType::f32, 1e-12).passed);
  const test::TempDirectory folder;
  std::filesystem::copy(std::string(SHERD_TEST_DATA) + "/golden/mean", folder.path(),
                        std::filesystem::copy_options::recursive);
  const auto bytes = read_file(folder.path("golden.json"));
  const std::string text(bytes.begin(), bytes.end());
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    const auto at = changed.find(from);
    REQUIRE(at != std::string::npos);
    changed.replace(at, from.size(), to);
    std::filesystem::remove(folder.path("golden.json"));
    test::put_file(folder.path("golden.json"), test::bytes_of(changed));
    GoldenOptions options;
    options.directory = folder.path();
    return run_golden(options, [](const GoldenStep&) {});
  };
  CHECK(with("\"eps\"", "\"eps\"").passed);
  CHECK_THROWS_WITH_AS(with("\"depth\": 2", "\"depth\": 3"), doctest::Contains("blocks.2"), Error);
  CHECK_THROWS_WITH_AS(with("\"heads\": 2", "\"heads\": 2, \"registers\": 4"),
                       doctest::Contains("a field 'registers' that this program does not know"),
                       Error);
  CHECK_THROWS_WITH_AS(with("\"adamw\"", "\"lion\""), doctest::Contains("'lion'"), Error);
  CHECK_THROWS_WITH_AS(with("\"dim\": 18,", ""), doctest::Contains("the field 'dim' is missing"),
                       Error);
}

TEST_CASE("golden runs: every field counts") {
  // A change of any one makes the run differ, or is refused.
  using json = nlohmann::json;
  const std::string source = std::string(SHERD_TEST_DATA) + "/golden/cls";
  const test::TempDirectory folder;
  std::filesystem::copy(source, folder.path(), std::filesystem::copy_options::recursive);
  const auto bytes = read_file(source + "/golden.json");
  const json document = json::parse(bytes.begin(), bytes.end());
  // Text for readers alone.
  const std::set<std::string> silent{"/note"};
  int fields = 0;
  const auto try_with = [&](const json& changed, const std::string& where) {
    std::filesystem::remove(folder.path("golden.json"));
    test::put_file(folder.path("golden.json"), test::bytes_of(changed.dump()));
    GoldenOptions options;
    options.directory = folder.path();
    bool noticed = false;
    try {
      noticed = !run_golden(options, [](const GoldenStep&) {}).passed;
    } catch (const Error&) {
      noticed = true;
    }
    CHECK_MESSAGE(noticed, where);
    ++fields;
  };
  const json flat = document.flatten();
  for (const auto& [where, value] : flat.items()) {
    if (silent.contains(where) || (where.starts_with("/steps/") && !where.starts_with("/steps/3/")))
      continue;
    const json::json_pointer at(where);
    json changed = document;
    if (value.is_number_integer()) {
      changed[at] = value.get<int>() + 1;
    } else if (value.is_number()) {
      changed[at] = value.get<double>() * 1.25 + 1e-3;
    } else if (value.is_boolean()) {
      changed[at] = !value.get<bool>();
    } else {
      changed[at] = value.get<std::string>() == "erf"   ? "tanh"
                    : value.get<std::string>() == "cls" ? "mean"
                                                        : "other";
    }
    try_with(changed, where);
    changed[at] = json::array({json::object(), 1});
    try_with(changed, where + " of another kind");
  }
  CHECK(fields > 50);
}

TEST_CASE("runs are bitwise reproducible, whatever the number of data workers") {
  const test::TempDirectory folder;
  TrainSettings s = small_run(folder.path("a"));
  s.workers = 0;
  const auto first = weights_of(s);
  for (const std::int64_t workers : {1, 3}) {
    s.workers = workers;
    s.out = folder.path("workers" + std::to_string(workers));
    CHECK(weights_of(s) == first);
  }
  s.out = folder.path("other-seed");
  s.seed = 1;
  CHECK(weights_of(s) != first);
}

TEST_CASE("micro-batches give the batch's gradient") {
  const test::TempDirectory folder;
  TrainSettings s = small_run(folder.path("whole"));
  s.precision = "fp64";
  TrainObserver quiet;
  const auto values = [&](const std::string& path) {
    const SafetensorsFile file = SafetensorsFile::open(path);
    std::vector<double> all;
    for (const SafetensorsEntry& entry : file.entries()) {
      const auto bytes = file.bytes(entry);
      const std::size_t before = all.size();
      all.resize(before + bytes.size() / sizeof(double));
      std::copy(bytes.begin(), bytes.end(), reinterpret_cast<std::uint8_t*>(all.data() + before));
    }
    return all;
  };
  const std::vector<double> whole = values(train(s, quiet).weights_path);
  for (const std::int64_t micro : {1, 5, 8}) {
    s.micro_batch = micro;
    s.out = folder.path("micro" + std::to_string(micro));
    const std::vector<double> parts = values(train(s, quiet).weights_path);
    REQUIRE(parts.size() == whole.size());
    double worst = 0.0;
    for (std::size_t i = 0; i < whole.size(); ++i)
      worst = std::max(worst, std::abs(parts[i] - whole[i]));
    CHECK(worst < 1e-7);  // AdamW enlarges the rounding of gradients that are zero in theory
    CHECK(worst > 0.0);   // it did run another way
  }
}

TEST_CASE("meta: the plan's peak is the run's, in every category") {
  for (const char* dtype : {"f32", "f64"}) {
    for (const std::int64_t micro : {0, 5}) {
      for (const char* optimizer : {"adamw", "sgd"}) {
        for (const char* pooling : {"cls", "mean"}) {
          TrainSettings s = small_run("");
          s.precision = dtype;
          s.micro_batch = micro;
          s.optimizer = optimizer;
          s.pooling = pooling;
          const PlannedRun real = run_on(Device::cpu, s, 16), plan = run_on(Device::meta, s, 16);
          CAPTURE(dtype);
          CAPTURE(micro);
          CHECK(plan.total == real.total);
          CHECK(plan.at_peak == real.at_peak);
          CHECK(plan.peaks == real.peaks);
          CHECK(plan.flops == real.flops);
          CHECK(real.total > 0);
        }
      }
    }
  }
}

TEST_CASE("meta: a step of ViT-L and of ViT-H") {
  for (const auto& [name, parameters] :
       {std::pair{"vit_large_patch16_224", std::int64_t{303'405'157}},
        std::pair{"vit_huge_patch14_224", std::int64_t{630'894'181}}}) {
    const auto start = std::chrono::steady_clock::now();
    ViTSettings settings = vit_preset(name);
    settings.classes = 101;
    TrainSettings synthetic;
    synthetic.dataset = "synthetic";
    synthetic.classes = 101;
    OneRank rank({.device = Device::meta}, settings, synthetic);
    Context& context = rank.context;
    InputBuffers inputs(context, *open_data(synthetic).train, 8, DType::f32);
    rank.step.run_shape(inputs, 8);
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    MESSAGE(name, ": planned in ", seconds, " s");
    // Model state: parameters, two moments; gradients are there in full when backward ends.
    const auto peaks = context.ledger().peaks();
    CHECK(peaks[static_cast<std::size_t>(MemoryCategory::parameters)] >= 4 * parameters);
    CHECK(peaks[static_cast<std::size_t>(MemoryCategory::parameters)] <
          4 * parameters + 300 * 1024);
    CHECK(peaks[static_cast<std::size_t>(MemoryCategory::optimizer_state)] ==
          2 * peaks[static_cast<std::size_t>(MemoryCategory::parameters)]);
    CHECK(peaks[static_cast<std::size_t>(MemoryCategory::gradients)] ==
          peaks[static_cast<std::size_t>(MemoryCategory::parameters)]);
    // The products that were counted are those of the formula, but for attention's recomputation.
    const double counted = static_cast<double>(context.work().matmul_flops);
    CHECK(counted == doctest::Approx(8 * rank.model.training_flops_per_image()).epsilon(0.06));
  }
}

TEST_CASE("two contexts train on two threads at once, each as if alone") {
  const auto losses = [](std::uint64_t seed, int threads) {
    TrainSettings s = small_run("");
    OneRank rank({.threads = threads, .seed = seed}, model_settings(s, 2, 12, 8, 4), s);
    const DataSource data = open_data(s);
    InputBuffers inputs(rank.context, *data.train, 16, DType::f32);
    BatchLoader loader(data.train, loader_options(s, data, 16, true));
    loader.start_epoch(0);
    std::vector<double> all;
    while (const BatchPtr batch = loader.next()) all.push_back(rank.step.run(inputs, batch).loss);
    return all;
  };
  const auto first = losses(1, 1), second = losses(2, 2);
  std::vector<double> first_again, second_again;
  std::thread other([&] { second_again = losses(2, 2); });
  first_again = losses(1, 1);
  other.join();
  CHECK(first_again == first);
  CHECK(second_again == second);
  CHECK(first != second);
}

TEST_CASE("not finite: the error names the step and the layer, and the weights are kept") {
  const TrainSettings s = small_run("");
  OneRank rank({}, model_settings(s, 2, 12, 8, 4), s);
  Context& context = rank.context;
  VisionTransformer& model = rank.model;
  TrainingStep& step = rank.step;
  const DataSource data = open_data(s);
  InputBuffers inputs(context, *data.train, 8, DType::f32);
  BatchLoader loader(data.train, loader_options(s, data, 8, true));
  loader.start_epoch(0);
  step.run(inputs, loader.next());
  Parameter* bad = nullptr;
  for (Parameter* p : model.parameters()) {
    if (p->name() == "blocks.1.mlp.fc1.weight") bad = p;
  }
  REQUIRE(bad != nullptr);
  SUBCASE("a weight") {
    bad->data().data<float>()[5] = NAN;
    CHECK_THROWS_WITH_AS(step.run(inputs, loader.next()),
                         doctest::Contains("step 1: the loss is not finite"), Error);
    CHECK(find_non_finite(model, rank.engine, inputs.images()) ==
          "parameter blocks.1.mlp.fc1.weight (element 5)");
  }
  SUBCASE("an overflowing layer") {
    for (int i = 0; i < bad->numel(); ++i) bad->data().data<float>()[i] = 1e38f;
    const std::vector<float> before = model.parameters()[0]->data().to_vector<float>();
    CHECK_THROWS_WITH_AS(step.run(inputs, loader.next()),
                         doctest::Contains("the output of layer blocks.1.mlp.fc1"), Error);
    CHECK(model.parameters()[0]->data().to_vector<float>() == before);
  }
  SUBCASE("nothing") {
    CHECK(find_non_finite(model, rank.engine, inputs.images()).empty());
  }
}

namespace {

std::vector<nlohmann::json> log_of(const TrainSettings& s, const std::string& event) {
  const auto bytes = read_file(s.out + "/log.jsonl");
  std::istringstream text(std::string(bytes.begin(), bytes.end()));
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(text, line);) {
    const nlohmann::json object = nlohmann::json::parse(line);
    if (object["event"] == event) lines.push_back(object);
  }
  return lines;
}

struct Listener : TrainObserver {
  void on_step(const StepInfo& now) override { steps.push_back(now); }
  void on_epoch(const EpochInfo& now) override { epochs.push_back(now); }
  std::vector<StepInfo> steps;
  std::vector<EpochInfo> epochs;
};

}  // namespace

TEST_CASE("train: skipped steps are told, and are no part of the mean loss") {
  const test::TempDirectory folder;
  TrainSettings s = small_run(folder.path("run"));
  s.images = 80;  // five whole batches
  s.precision = "fp16";
  s.ranks = 2;
  s.threads = 1;
  s.epochs = 4;
  s.log_every = 100;
  s.loss_scale_window = 1;  // doubles until gradients overflow, again and again
  Listener heard;
  const TrainOutcome outcome = train(s, heard);
  CHECK(outcome.info.scales_loss);
  REQUIRE(heard.steps.size() == 20);
  std::int64_t skipped = 0;
  double scale = 65536.0;
  std::vector<double> losses(4);
  std::vector<int> taken(4);
  for (const StepInfo& step : heard.steps) {
    CAPTURE(step.result.step);
    CHECK(step.result.loss_scale == scale);
    CHECK(std::isfinite(step.result.loss));
    CHECK(std::isfinite(step.result.grad_norm) != step.result.skipped);
    const auto epoch = static_cast<std::size_t>(step.epoch);
    if (step.result.skipped) {
      ++skipped;
      scale /= 2;
    } else {
      scale = std::min(2 * scale, 16777216.0);
      losses[epoch] += step.result.loss;
      ++taken[epoch];
    }
    CHECK(step.skipped == skipped);
  }
  CHECK(skipped > 0);
  CHECK(skipped < 20);
  CHECK(outcome.steps == 20);
  CHECK(outcome.skipped == skipped);
  CHECK(outcome.loss_scale == scale);
  // The skipped ones, whatever --log-every says, and the last.
  const std::vector<nlohmann::json> steps = log_of(s, "step"), epochs = log_of(s, "epoch");
  std::int64_t told = 0;
  for (const nlohmann::json& line : steps) {
    const bool skip = line.contains("skipped");
    CHECK((skip || line["step"] == 19));
    if (!skip) continue;
    ++told;
    CHECK(line["skipped"] == true);
    CHECK(line["grad_norm"].is_null());
  }
  CHECK(told == skipped);
  REQUIRE(heard.epochs.size() == 4);
  for (std::size_t i = 0; i < 4; ++i) {
    CAPTURE(i);
    if (taken[i] == 0) continue;
    CHECK(heard.epochs[i].train_loss == doctest::Approx(losses[i] / taken[i]).epsilon(1e-12));
    CHECK(heard.epochs[i].skipped == 5 - taken[i]);
    CHECK(epochs[i]["skipped"] == 5 - taken[i]);
  }
  const nlohmann::json end = log_of(s, "end").front();
  CHECK(end["skipped"] == skipped);
  CHECK(end["loss_scale"] == scale);
  // Without fp16 there is no word of it.
  TrainSettings plain = s;
  plain.precision = "bf16";
  plain.out = folder.path("plain");
  CHECK_FALSE(train(plain, heard).info.scales_loss);
  for (const char* event : {"step", "epoch", "end"}) {
    const nlohmann::json line = log_of(plain, event).front();
    CHECK_FALSE(line.contains("loss_scale"));
    CHECK_FALSE(line.contains("skipped"));
  }
  CHECK(log_of(plain, "start").front()["precision"] ==
        "bf16, gradients sent in bf16, output in f32, weights kept in f32");
}

TEST_CASE("train: what is there is not overwritten") {
  const test::TempDirectory folder;
  TrainSettings s = small_run(folder.path("run"));
  s.epochs = 1;
  const auto weights = weights_of(s);
  TrainObserver quiet;
  CHECK_THROWS_WITH_AS(train(s, quiet), doctest::Contains("is there already"), Error);
  CHECK(read_file(folder.path("run/model.safetensors")) == weights);
  // The resolved configuration repeats the run.
  TrainSettings again = resolve_settings(read_toml_settings(folder.path("run/config.toml")),
                                         {{"run.out", folder.path("again")}});
  CHECK(weights_of(again) == weights);
  test::put_file(folder.path("file"), test::bytes_of("x"));
  s.out = folder.path("file/run");
  CHECK_THROWS_WITH_AS(train(s, quiet), doctest::Contains("cannot make the folder"), Error);
}

TEST_CASE("train: of several runs into one folder, one succeeds") {
  const test::TempDirectory folder;
  TrainSettings s = small_run(folder.path("run"));
  s.epochs = 1;
  std::atomic<int> succeeded{0}, refused{0};
  std::vector<std::thread> runs;
  for (int i = 0; i < 4; ++i) {
    runs.emplace_back([&] {
      TrainObserver quiet;
      try {
        train(s, quiet);
        ++succeeded;
      } catch (const Error&) {
        ++refused;
      }
    });
  }
  for (std::thread& run : runs) run.join();
  CHECK(succeeded == 1);
  CHECK(refused == 3);
}

TEST_CASE("train: what fails before the first step leaves nothing, later the weights are saved") {
  const test::TempDirectory folder;
  TrainSettings s = small_run(folder.path("run"));
  TrainObserver quiet;
  for (const auto& setting : {std::pair{"optimizer.lr", "-1"},
                              {"optimizer.lr", "nan"},
                              {"optimizer.label_smoothing", "2"},
                              {"optimizer.clip_grad_norm", "nan"},
                              {"data.stddev", "0"},
                              {"data.workers", "-1"},
                              {"schedule.warmup_steps", "99"},
                              {"run.trace", "/nonexistent/trace.json"},
                              {"memory.memory_limit", "10KiB"}}) {
    TrainSettings bad = s;
    assign(bad, setting.first, setting.second, "test");
    CAPTURE(setting.first);
    CHECK_THROWS_AS(train(bad, quiet), Error);
    const bool empty = !std::filesystem::exists(folder.path("run")) ||
                       std::filesystem::is_empty(folder.path("run"));
    CHECK(empty);
  }
  s.lr = 1e30;
  s.clip_grad_norm = 0.0;
  s.warmup_steps = 0;
  CHECK_THROWS_WITH_AS(train(s, quiet), doctest::Contains("the weights after 1 step are in"),
                       Error);
  CHECK(std::filesystem::exists(folder.path("run/model-before-error.safetensors")));
  CHECK_FALSE(std::filesystem::exists(folder.path("run/model.safetensors")));
}

TEST_CASE("train: a trace never takes the place of another file") {
  const test::TempDirectory folder;
  TrainObserver quiet;
  for (const char* name : {"run/config.toml", "run/model.safetensors", "run/log.jsonl", "mine"}) {
    test::put_file(folder.path("mine"), test::bytes_of("mine"));
    TrainSettings s = small_run(folder.path("run"));
    s.trace = folder.path(name);
    CHECK_THROWS_AS(train(s, quiet), Error);
    CHECK(read_file(folder.path("mine")) == test::bytes_of("mine"));
  }
}

TEST_CASE("train: an observer can stop it, the weights are saved") {
  struct StopAtThree : TrainObserver {
    void on_step(const StepInfo&) override { ++steps; }
    bool should_stop() override { return steps == 3; }
    int steps = 0;
  };
  const test::TempDirectory folder;
  StopAtThree observer;
  const TrainOutcome outcome = train(small_run(folder.path("run")), observer);
  CHECK(outcome.stopped);
  CHECK(outcome.steps == 3);
  CHECK(std::filesystem::exists(outcome.weights_path));
}
