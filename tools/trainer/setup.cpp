// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/setup.h>

#include <sherd/comm/agreement.h>
#include <sherd/models/weights.h>

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
  return {schedule, settings.clip_grad_norm, settings.label_smoothing, settings.micro_batch};
}

DType training_dtype(const TrainSettings& settings) {
  const DType dtype = dtype_from_name(settings.dtype);
  SHERD_CHECK(dtype == DType::f32 || dtype == DType::f64,
              "--dtype {}: training computes in f32 or f64", settings.dtype);
  return dtype;
}

void make_weights(const TrainSettings& settings, const Module& model, ShardingEngine& engine) {
  if (settings.weights.empty()) {
    engine.initialize();
    return;
  }
  const WeightsFile file(settings.weights, model);
  engine.visit_shards([&](const Parameter& parameter, std::int64_t first, const Tensor& elements) {
    file.read(parameter, first, elements);
  });
}

std::map<std::string, std::string> weights_metadata() {
  return {{"format", "pt"}, {"producer", "sherd " + version()}};
}

void save_sharded(const Module& model, ShardingEngine& engine, const std::string& path) {
  Communicator& world = engine.groups().world;
  std::unique_ptr<SafetensorsWriter> writer;
  std::string failure;
  const auto try_to = [&](const std::function<void()>& work) {
    if (world.rank() != 0 || !failure.empty()) return;
    try {
      work();
    } catch (const std::exception& error) {
      failure = error.what();
    }
  };
  try_to([&] {
    std::vector<SafetensorsWriter::Item> items;
    for (const Parameter* parameter : model.parameters()) {
      items.push_back({parameter->name(), parameter->data().dtype(), parameter->shape()});
    }
    writer = std::make_unique<SafetensorsWriter>(path, items, weights_metadata());
  });
  engine.visit_parameters([&](Parameter& parameter) {
    try_to([&] {
      const Tensor& data = parameter.data();
      writer->write(parameter.name(),
                    {static_cast<const std::uint8_t*>(data.raw_data()),
                     static_cast<std::size_t>(data.numel()) * size_of(data.dtype())});
    });
  });
  try_to([&] { writer->commit(); });
  agree_on_errors(world, failure);
}

std::string version() {
  return SHERD_VERSION;
}

std::string build_description() {
  return SHERD_BUILD;
}

}  // namespace sherd
