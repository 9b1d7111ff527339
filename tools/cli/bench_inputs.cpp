// SPDX-License-Identifier: Apache-2.0
#include "bench_inputs.h"

#include <sherd/runtime/host_bytes.h>
#include <sherd/runtime/io/directory.h>
#include <sherd/runtime/io/safetensors.h>

#include <cstring>

namespace sherd::cli {

void write_bench_inputs(const std::string& directory, const TrainSettings& settings,
                        Rehearsal& test, std::int64_t steps) {
  make_directories(directory);
  save_sharded(test.model, test.engine, directory + "/weights.safetensors");
  const LrSchedule schedule = rehearsal_schedule(settings);
  std::vector<double> rates;
  for (std::int64_t step = 0; step < steps; ++step) rates.push_back(schedule.at(step));
  std::vector<std::uint8_t> rate_bytes(rates.size() * sizeof rates[0]);
  std::memcpy(rate_bytes.data(), rates.data(), rate_bytes.size());
  const HostBytes images(test.inputs->images()), labels(test.inputs->labels());
  const std::vector<SafetensorsItem> items{
      {"images", test.inputs->images().dtype(), test.inputs->images().shape(), images.get()},
      {"labels", DType::i64, test.inputs->labels().shape(), labels.get()},
      {"learning_rates", DType::f64, Shape{steps}, rate_bytes}};
  const ViTSettings& model = test.model.settings();
  write_safetensors(
      directory + "/inputs.safetensors", items,
      {{"heads", fmt::format("{}", model.heads)},
       {"layer_norm_eps", fmt::format("{}", model.layer_norm_eps)},
       {"weight_decay", fmt::format("{}", settings.weight_decay)},
       {"betas", fmt::format("{},{}", settings.beta1, settings.beta2)},
       {"eps", fmt::format("{}", settings.eps)},
       {"clip_grad_norm", fmt::format("{}", settings.clip_grad_norm)},
       // What a reader that builds another model must refuse.
       {"variant", fmt::format("{}, {} pooling, drop {}, drop path {}, label smoothing {}, {}",
                               settings.activation, settings.pooling, settings.drop,
                               settings.drop_path, settings.label_smoothing, settings.optimizer)}});
}

}  // namespace sherd::cli
