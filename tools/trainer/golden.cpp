// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/golden.h>

#include <sherd/autograd/tape.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/models/vit.h>
#include <sherd/runtime/data/idx.h>
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/io/safetensors.h>
#include <sherd/runtime/suggest.h>
#include <sherd/tools/trainer/ranks.h>
#include <sherd/tools/trainer/train.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

namespace sherd {
namespace {

using json = nlohmann::json;

// A JSON object whose every field must be asked for: done() names one that was not.
class Fields {
 public:
  Fields(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    SHERD_CHECK(object.is_object(), "{}: expected an object", where_);
  }

  bool has(const char* name) {
    known_.emplace_back(name);
    return object_.contains(name) && !object_.at(name).is_null();
  }
  Fields object(const char* name) { return {at(name), where_ + "." + name}; }
  const json& at(const char* name) {
    SHERD_CHECK(has(name), "{}: the field '{}' is missing", where_, name);
    return object_.at(name);
  }
  template <typename T>
  T get(const char* name) {
    const json& value = at(name);
    if constexpr (std::is_same_v<T, std::int64_t>) {
      const bool fits = value.is_number_integer() &&
                        !(value.is_number_unsigned() && value.get<std::uint64_t>() > kLargest);
      SHERD_CHECK(fits, "{}.{}: expected a whole number, got {}", where_, name, value.dump());
    }
    try {
      return value.get<T>();
    } catch (const json::exception&) {
      fail("{}.{}: a value of another kind was expected, got {}", where_, name, value.dump());
    }
  }
  template <typename T>
  T get(const char* name, T otherwise) {
    return has(name) ? get<T>(name) : otherwise;
  }
  void done() const {
    for (const auto& [name, value] : object_.items()) {
      SHERD_CHECK(std::ranges::find(known_, name) != known_.end(),
                  "{}: a field '{}' that this program does not know{}", where_, name,
                  did_you_mean(name, known_));
    }
  }

 private:
  static constexpr std::uint64_t kLargest = std::uint64_t{1} << 40;
  const json& object_;
  std::string where_;
  std::vector<std::string> known_;
};

struct Golden {
  std::string directory;
  ViTSettings model;
  std::shared_ptr<const ImageDataset> dataset;
  BatchLoaderOptions loader;
  AdamWSettings adamw;
  SgdSettings sgd;
  bool use_sgd = false;
  StepSettings step;
  std::vector<GoldenStep> steps;

  std::string path(const std::string& name) const {
    return (std::filesystem::path(directory) / name).string();
  }
};

void read_model(Fields fields, Golden& golden) {
  ViTSettings& model = golden.model;
  if (fields.at("image").is_array()) {
    const auto sides = fields.get<std::vector<std::int64_t>>("image");
    SHERD_CHECK(sides.size() == 2, "golden.json: model.image needs a side, or height and width");
    model.image_height = sides[0];
    model.image_width = sides[1];
  } else {
    model.image_height = model.image_width = fields.get<std::int64_t>("image");
  }
  model.channels = fields.get<std::int64_t>("channels");
  model.classes = fields.get<std::int64_t>("classes");
  model.patch = fields.get<std::int64_t>("patch");
  model.dim = fields.get<std::int64_t>("dim");
  model.depth = fields.get<std::int64_t>("depth");
  model.heads = fields.get<std::int64_t>("heads");
  model.head_dim = fields.get<std::int64_t>("head_dim", 0);
  model.mlp_ratio = fields.get<double>("mlp_ratio");
  model.layer_norm_eps = fields.get<double>("layer_norm_eps");
  model.qkv_bias = fields.get<bool>("qkv_bias", true);
  model.activation = activation_from_name(fields.get<std::string>("gelu", "erf"));
  const auto pool = fields.get<std::string>("pool", "cls");
  SHERD_CHECK(pool == "cls" || pool == "mean" || pool == "avg",
              "golden.json: unknown pool '{}': expected cls or mean", pool);
  model.pooling = pool == "cls" ? Pooling::class_token : Pooling::mean;
  fields.done();
  // What the weights hold decides between timm's two ways of mean pooling.
  const SafetensorsFile weights = SafetensorsFile::open(golden.path("initial.safetensors"));
  model.class_token = weights.find("cls_token") != nullptr;
  model.fc_norm = weights.find("fc_norm.weight") != nullptr;
  model.validate();
}

void read_data(Fields fields, const GoldenOptions& options, Golden& golden) {
  const auto set = fields.get<std::string>("set");
  const auto split = fields.get<std::string>("split", "train");
  SHERD_CHECK(split == "train" || split == "test",
              "golden.json: data.split '{}': expected train or test", split);
  if (set == "idx") {
    golden.dataset =
        load_idx_dataset(golden.path(fields.get<std::string>("images")),
                         golden.path(fields.get<std::string>("labels")), golden.model.classes);
  } else {
    golden.dataset = load_mnist_like(options.data_dir, set, split);
  }
  const auto order = fields.get<std::string>("order", "file");
  // The golden files explain the order after a semicolon.
  SHERD_CHECK(
      order == "file" || order == "file; step s takes images [s*batch_size, (s+1)*batch_size)",
      "golden.json: data.order '{}': only 'file' is known", order);
  const auto values = [&](const char* name) {
    return fields.at(name).is_array() ? fields.get<std::vector<double>>(name)
                                      : std::vector<double>{fields.get<double>(name)};
  };
  golden.loader.batch_size = fields.get<std::int64_t>("batch_size");
  check_range("golden.json: data.batch_size", golden.loader.batch_size, 1, golden.dataset->size());
  golden.loader.shuffle = false;
  golden.loader.f64 = options.dtype == DType::f64;
  golden.loader.mean = values("mean");
  golden.loader.stddev = values("std");
  fields.done();
  const ImageDataset& data = *golden.dataset;
  SHERD_CHECK(data.channels() == golden.model.channels &&
                  data.height() == golden.model.image_height &&
                  data.width() == golden.model.image_width,
              "golden.json: the model takes images {} x {} x {}, the data set has {} x {} x {}",
              golden.model.channels, golden.model.image_height, golden.model.image_width,
              data.channels(), data.height(), data.width());
}

void read_optimizer(Fields fields, Golden& golden) {
  const auto name = fields.get<std::string>("name");
  const auto weight_decay = fields.get<double>("weight_decay", 0.0);
  if (name == "adamw") {
    const auto betas = fields.get<std::vector<double>>("betas");
    SHERD_CHECK(betas.size() == 2, "golden.json: optimizer.betas needs two numbers");
    golden.adamw = {betas[0], betas[1], fields.get<double>("eps"), weight_decay};
  } else {
    SHERD_CHECK(name == "sgd", "golden.json: unknown optimizer '{}': expected adamw or sgd", name);
    golden.use_sgd = true;
    golden.sgd = {fields.get<double>("momentum", 0.0), fields.get<bool>("nesterov", false),
                  weight_decay};
  }
  golden.step.clip_grad_norm = fields.get<double>("clip_grad_norm", 0.0);
  fields.done();
}

void read_schedule(Fields fields, Golden& golden) {
  LrSchedule& schedule = golden.step.schedule;
  auto name = fields.get<std::string>("name");
  if (name.starts_with("warmup_")) name = name.substr(7);
  schedule.decay = decay_from_name(name);
  schedule.base_lr = fields.get<double>("base_lr");
  schedule.min_lr = fields.get<double>("min_lr", 0.0);
  schedule.warmup_steps = fields.get<std::int64_t>("warmup_steps", 0);
  schedule.total_steps = fields.get<std::int64_t>("steps");
  fields.done();
}

Golden read_golden(const GoldenOptions& options) {
  Golden golden;
  golden.directory = options.directory;
  const std::string path = golden.path("golden.json");
  const std::vector<std::uint8_t> text = read_file(path);
  const json document = json::parse(text.begin(), text.end(), nullptr, false);
  SHERD_CHECK(!document.is_discarded(), "{}: not valid JSON", path);
  Fields fields(document, path);
  fields.has("note");
  read_model(fields.object("model"), golden);
  read_data(fields.object("data"), options, golden);
  Fields loss = fields.object("loss");
  const auto loss_name = loss.get<std::string>("name");
  SHERD_CHECK(loss_name == "cross_entropy", "{}: unknown loss '{}': expected cross_entropy", path,
              loss_name);
  golden.step.label_smoothing = loss.get<double>("label_smoothing", 0.0);
  loss.done();
  read_optimizer(fields.object("optimizer"), golden);
  read_schedule(fields.object("schedule"), golden);
  for (const json& item : fields.at("steps")) {
    Fields step(item, path + ".steps");
    GoldenStep& given = golden.steps.emplace_back();
    given.step = step.get<std::int64_t>("step");
    given.given_lr = step.get<double>("lr");
    given.given_loss = step.get<double>("loss");
    given.given_grad_norm = step.get<double>("grad_norm");
    step.done();
    SHERD_CHECK(given.step + 1 == static_cast<std::int64_t>(golden.steps.size()),
                "{}: step {} stands at place {}", path, given.step, golden.steps.size() - 1);
  }
  SHERD_CHECK(!golden.steps.empty(), "{}: no steps to compare with", path);
  fields.done();
  return golden;
}

double relative_error(double value, double given) {
  const double error = std::abs(value - given) / std::max(std::abs(given), 1e-300);
  return std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
}

void compare_weights(const Module& model, ShardingEngine& engine, const std::string& path,
                     GoldenResult& result) {
  result.weights_compared = true;
  const SafetensorsFile file = SafetensorsFile::open(path);
  SHERD_CHECK(file.entries().size() == model.parameters().size(),
              "{}: holds {} tensors, the model has {} parameters", path, file.entries().size(),
              model.parameters().size());
  engine.visit_parameters([&](const Parameter& parameter, const Tensor& data) {
    const SafetensorsEntry* entry = file.find(parameter.name());
    SHERD_CHECK(entry != nullptr && entry->shape == parameter.shape() && entry->dtype == DType::f64,
                "{}: expected '{}' as F64 {}", path, parameter.name(),
                parameter.shape().to_string());
    std::vector<double> given(static_cast<std::size_t>(parameter.numel()));
    std::memcpy(given.data(), file.bytes(*entry).data(), given.size() * sizeof(double));
    std::vector<double> values;
    if (data.dtype() == DType::f64) {
      values = data.to_vector<double>();
    } else {
      const std::vector<float> narrow = data.to_vector<float>();
      values.assign(narrow.begin(), narrow.end());
    }
    for (std::size_t i = 0; i < given.size(); ++i) {
      const double error = std::abs(values[i] - given[i]);
      if (error <= result.worst_weight_error) continue;  // a NaN falls through
      result.worst_weight_error =
          std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
      result.worst_weight = fmt::format("{}[{}]", parameter.name(), i);
    }
  });
}

GoldenResult run_rank(const GoldenOptions& options, Communicator& world,
                      const std::function<void(const GoldenStep&)>& on_step) {
  Golden golden = read_golden(options);
  const std::vector<std::uint8_t> text = read_file(golden.path("golden.json"));
  std::istringstream lines(std::string(text.begin(), text.end()));
  std::vector<std::string> same{fmt::format("a golden run in {}", name_of(options.dtype))};
  for (std::string line; std::getline(lines, line);) same.push_back(line);
  check_same_start(world, same, options.ranks);
  const std::string final_weights = golden.path("final_float64.safetensors");
  const bool has_final = std::filesystem::exists(final_weights);
  SHERD_CHECK(has_final || options.weight_tolerance < 0.0,
              "--weight-tolerance: there is no {} to compare with", final_weights);
  Context context(rank_context_options(options.ranks, world));
  VisionTransformer model(golden.model);
  ShardingEngine engine(model, context, world, options.dtype,
                        sharding_options(options.ranks, world.size()));
  TrainSettings weights;
  weights.weights = golden.path("initial.safetensors");
  make_weights(weights, model, engine);
  const std::unique_ptr<Optimizer> optimizer =
      golden.use_sgd ? make_sgd(golden.sgd) : make_adamw(golden.adamw);
  TrainingStep step(context, model, engine, *optimizer, golden.step);
  golden.loader.rank = world.rank();
  golden.loader.ranks = world.size();
  place_batches(golden.loader, context);
  BatchLoader loader(golden.dataset, golden.loader);
  const std::int64_t capacity =
      rank_slice(golden.loader.batch_size, world.rank(), world.size()).size;
  InputBuffers inputs(context, *golden.dataset, std::max<std::int64_t>(1, capacity), options.dtype);

  GoldenResult result;
  std::int64_t epoch = 0;
  loader.start_epoch(epoch);
  for (GoldenStep& given : golden.steps) {
    BatchPtr batch = loader.next();
    if (batch == nullptr) {
      loader.start_epoch(++epoch);
      batch = loader.next();
    }
    const StepResult now = step.run(inputs, batch);
    given.lr = now.lr;
    given.loss = now.loss;
    given.grad_norm = now.grad_norm;
    given.error = std::max({relative_error(now.lr, given.given_lr),
                            relative_error(now.loss, given.given_loss),
                            relative_error(now.grad_norm, given.given_grad_norm)});
    result.worst_error = std::max(result.worst_error, given.error);
    ++result.steps;
    if (world.rank() == 0) on_step(given);
  }
  if (has_final) compare_weights(model, engine, final_weights, result);
  return result;
}

}  // namespace

LogitsResult compare_logits(Context& context, Module& model,
                            const std::shared_ptr<const ImageDataset>& dataset,
                            BatchLoaderOptions options, const std::string& path) {
  const std::vector<std::uint8_t> text = read_file(path);
  const json document = json::parse(text.begin(), text.end(), nullptr, false);
  SHERD_CHECK(document.is_object() && document.contains("logits"),
              "{}: expected a JSON object with a list 'logits'", path);
  std::vector<std::vector<double>> given;
  try {
    given = document.at("logits").get<std::vector<std::vector<double>>>();
  } catch (const json::exception&) {
    fail("{}: 'logits' must be a list of lists of numbers", path);
  }
  const auto count = static_cast<std::int64_t>(given.size());
  SHERD_CHECK(count > 0 && count <= dataset->size(), "{}: logits of {} images, the data set has {}",
              path, count, dataset->size());
  options.batch_size = count;
  options.shuffle = false;
  place_batches(options, context);
  BatchLoader loader(dataset, options);
  InputBuffers inputs(context, *dataset, count, options.f64 ? DType::f64 : DType::f32);
  loader.start_epoch(0);
  const BatchPtr batch = loader.next();
  inputs.stage(batch, 0, count);
  const NoGradScope no_grad(context);
  model.set_training(false);
  const Tensor logits = cast(model(inputs.images()).tensor(), DType::f64);
  const std::vector<double> values = logits.to_vector<double>();
  LogitsResult result;
  result.images = count;
  for (std::size_t i = 0; i < given.size(); ++i) {
    SHERD_CHECK(static_cast<std::int64_t>(given[i].size()) == logits.dim(1),
                "{}: image {} has {} logits, the model {}", path, i, given[i].size(),
                logits.dim(1));
    for (std::size_t c = 0; c < given[i].size(); ++c) {
      const double error = std::abs(values[i * given[i].size() + c] - given[i][c]);
      if (!(error <= result.worst_error)) result.worst_error = error;
    }
  }
  return result;
}

GoldenResult run_golden(const GoldenOptions& options,
                        const std::function<void(const GoldenStep&)>& on_step) {
  const double tolerance = options.tolerance > 0.0       ? options.tolerance
                           : options.dtype == DType::f64 ? 1e-9
                                                         : 1e-4;
  SHERD_CHECK(options.dtype == DType::f64 || options.dtype == DType::f32,
              "--precision {}: a golden run computes in fp32 or fp64", name_of(options.dtype));
  sharding_options(options.ranks, planned_ranks(options.ranks));
  GoldenResult result;
  run_on_ranks(options.ranks, [&](Communicator& world) {
    const GoldenResult mine = run_rank(options, world, on_step);
    if (world.rank() == 0) result = mine;
  });
  result.weight_tolerance = options.weight_tolerance >= 0.0 ? options.weight_tolerance
                            : options.dtype == DType::f64   ? 1e-8
                                                            : -1.0;
  result.tolerance = tolerance;
  result.passed = result.worst_error <= tolerance &&
                  (!result.weights_compared || result.weight_tolerance < 0.0 ||
                   result.worst_weight_error <= result.weight_tolerance);
  return result;
}

}  // namespace sherd
