// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/setup.h>

#include <sherd/comm/agreement.h>
#include <sherd/models/weights.h>
#include <sherd/runtime/cuda/device.h>
#include <sherd/runtime/host_bytes.h>
#include <sherd/tools/trainer/weights_source.h>

#include <charconv>
#include <functional>

namespace sherd {

void check_batch(const TrainSettings& settings, int ranks) {
  check_range("--batch-size", settings.batch_size, 1, 1 << 24);
  SHERD_CHECK(settings.batch_size >= ranks,
              "--batch-size {}: fewer samples than the {} ranks that share them; raise it, or use "
              "fewer ranks",
              settings.batch_size, ranks);
  const std::int64_t most = rank_slice(settings.batch_size, 0, ranks).size;
  check_range("--micro-batch", settings.micro_batch, 0, std::int64_t{1} << 24);
  SHERD_CHECK(settings.micro_batch <= most,
              "--micro-batch {}: a rank has only {} samples of a step (batch of {} / {} rank{}); "
              "lower it, or raise --batch-size",
              settings.micro_batch, most, settings.batch_size, ranks, ranks == 1 ? "" : "s");
}

std::unique_ptr<Optimizer> make_optimizer(const TrainSettings& s) {
  if (s.optimizer == "adamw") return make_adamw({s.beta1, s.beta2, s.eps, s.weight_decay});
  if (s.optimizer == "sgd") return make_sgd({s.momentum, s.nesterov, s.weight_decay});
  fail("unknown optimizer '{}': expected adamw or sgd", s.optimizer);
}

StepSettings step_settings(const TrainSettings& settings, const LrSchedule& schedule) {
  return {schedule,
          settings.clip_grad_norm,
          settings.label_smoothing,
          settings.micro_batch,
          loss_scale_settings(settings),
          settings.graph};
}

bool offloads_activations(const TrainSettings& settings) {
  const std::string& to = settings.offload_activations;
  SHERD_CHECK(to == "none" || to == "cpu", "--offload-activations: expected none or cpu, got '{}'",
              to);
  SHERD_CHECK(to == "none" || settings.recompute != "none",
              "--offload-activations cpu: moves the inputs of what runs again in backward, and "
              "--recompute is none; add --recompute block (or selective, or auto)");
  return to == "cpu";
}

void apply_recompute(const TrainSettings& settings, VisionTransformer& model) {
  model.set_recompute(recompute_from_name(settings.recompute), offloads_activations(settings));
}

std::optional<LossScaleSettings> loss_scale_settings(const TrainSettings& settings) {
  const Precision precision = training_precision(settings);
  if (precision.parameters != DType::f16 && precision.reduce != DType::f16) return {};
  LossScaleSettings scale;
  scale.dynamic = settings.loss_scale == "auto";
  scale.minimum = settings.min_loss_scale;
  if (!scale.dynamic) {
    const char* end = settings.loss_scale.data() + settings.loss_scale.size();
    const auto [rest, error] = std::from_chars(settings.loss_scale.data(), end, scale.initial);
    SHERD_CHECK(error == std::errc() && rest == end,
                "--loss-scale: expected auto, or a power of two, got '{}'", settings.loss_scale);
    scale.minimum = scale.initial;
  }
  scale.growth_window = settings.loss_scale_window;
  scale.hysteresis = settings.loss_scale_hysteresis;
  LossScaler{scale};  // refuses what makes no sense
  return scale;
}

Precision training_precision(const TrainSettings& settings) {
  const auto parse = [](const char* flag, const std::string& name, const char* expected) {
    std::optional<DType> type;
    try {
      type = dtype_from_name(name);
    } catch (const Error&) {  // it does not know the flag
    }
    SHERD_CHECK(type && is_floating(*type), "{} {}: expected {}", flag, name, expected);
    return *type;
  };
  const DType type = parse("--precision", settings.precision, "fp32, bf16, fp16 or fp64");
  Precision precision;
  if (type == DType::f64) precision = DType::f64;
  precision.parameters = precision.reduce = type;
  const auto choose = [&](const char* flag, const std::string& name, DType& target) {
    if (name.empty()) return;
    target = parse(flag, name, "fp32, bf16 or fp16");
    SHERD_CHECK(type != DType::f64 || target == type,
                "{} {}: with --precision fp64 everything is in fp64; leave it out", flag, name);
    SHERD_CHECK(type == DType::f64 || target != DType::f64,
                "{} {}: expected fp32, bf16 or fp16; fp64 needs --precision fp64", flag, name);
  };
  choose("--param-dtype", settings.param_dtype, precision.parameters);
  choose("--reduce-dtype", settings.reduce_dtype, precision.reduce);
  choose("--output-dtype", settings.output_dtype, precision.output);
  return precision;
}

std::vector<std::string> make_weights(const TrainSettings& settings, const Module& model,
                                      ShardingEngine& engine) {
  if (settings.weights.empty()) {
    engine.initialize();
    return {};
  }
  const WeightsFile file(open_weights(settings.weights), model);
  engine.fill_shards([&](const Parameter& parameter, std::int64_t first, const Tensor& elements) {
    file.read(parameter, first, elements);
  });
  std::vector<std::string> notes;
  if (file.file().path() != settings.weights) {
    notes.push_back(fmt::format("taken from {}", file.file().path()));
  }
  notes.insert(notes.end(), file.notes().begin(), file.notes().end());
  return notes;
}

std::map<std::string, std::string> weights_metadata() {
  return {{"format", "pt"}, {"producer", "sherd " + version()}};
}

std::string write_weights(const Module& model, ShardingEngine& engine, const std::string& path) {
  std::unique_ptr<SafetensorsWriter> writer;
  std::string failure;
  const auto try_to = [&](const std::function<void()>& work) {
    if (engine.groups().world.rank() != 0 || !failure.empty()) return;
    try {
      work();
    } catch (const std::exception& error) {
      failure = error.what();
    }
  };
  try_to([&] {
    std::vector<SafetensorsWriter::Item> items;
    for (const Parameter* parameter : model.parameters()) {
      items.push_back({parameter->name(), engine.precision().master, parameter->shape()});
    }
    writer = std::make_unique<SafetensorsWriter>(path, items, weights_metadata());
  });
  engine.visit_parameters([&](const Parameter& parameter, const Tensor& weights) {
    try_to([&] { writer->write(parameter.name(), HostBytes(weights).get()); });
  });
  try_to([&] { writer->commit(); });
  return failure;
}

void save_sharded(const Module& model, ShardingEngine& engine, const std::string& path) {
  agree_on_errors(engine.groups().world, write_weights(model, engine, path));
}

std::string version() {
  return SHERD_VERSION;
}

std::string build_description() {
  return fmt::format("{}, {}", SHERD_BUILD, cuda::build_name());
}

}  // namespace sherd
