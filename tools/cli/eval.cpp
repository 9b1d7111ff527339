// SPDX-License-Identifier: Apache-2.0
#include "command.h"

#include <sherd/models/weights.h>
#include <sherd/tools/trainer/evaluate.h>
#include <sherd/tools/trainer/train.h>

#include <filesystem>

namespace sherd::cli {
namespace {

// RUN is a folder that `sherd train` wrote: its configuration and weights serve unless flags say other.
TrainSettings settings_of(const std::string& run, const SettingFlags& flags) {
  if (run.empty()) return flags.resolve("");
  const std::filesystem::path folder(run);
  SHERD_CHECK(std::filesystem::is_directory(folder),
              "{}: not the folder of a run; for a weights file use --weights FILE and the model's "
              "settings",
              run);
  TrainSettings settings = flags.resolve((folder / "config.toml").string());
  if (!flags.gives("model.weights")) settings.weights = (folder / "model.safetensors").string();
  return settings;
}

int evaluate_command(const TrainSettings& settings) {
  SHERD_CHECK(!settings.weights.empty(), "eval: give the folder of a run, or --weights FILE");
  SHERD_CHECK(settings.batch_size > 0, "--batch-size: must be positive, got {}", settings.batch_size);
  const DataSource data = open_data(settings, DataParts::test);
  VisionTransformer model(model_settings(settings, data.test->channels(), data.test->height(),
                                         data.test->width(), data.test->classes()));
  Context context(context_options(settings));
  SHERD_CHECK(!context.is_meta(), "--device meta computes no numbers, so it cannot evaluate");
  make_weights(settings, context, model);
  ProgressLine line;
  const std::int64_t batch = std::min(settings.batch_size, data.test->size());
  const EvaluationResult result =
      evaluate(context, model, data.test, loader_options(settings, data, batch, false),
               [&](std::int64_t done) {
                 const auto of = static_cast<double>(data.test->size());
                 line.show(fmt::format("{} {}/{}", bar(static_cast<double>(done) / of, 30), done,
                                       data.test->size()));
                 return true;
               });
  line.clear();
  fmt::print("weights         {}\ndata            {}\n", settings.weights, data.test->name());
  fmt::print("top-1           {:.2f}% ({} of {})\n", 100.0 * result.accuracy(),
             group_digits(result.correct), group_digits(result.samples));
  fmt::print("loss            {:.6f}\n", result.loss);
  return 0;
}

}  // namespace

Command add_eval(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand(
      "eval",
      "Top-1 accuracy and mean loss on the test images.\n\n"
      "  sherd eval runs/NAME\n"
      "  sherd eval --weights FILE --dataset mnist --data-dir DIR --patch 4 --depth 6 ...\n");
  auto run = std::make_shared<std::string>();
  app->add_option("run", *run, "folder of a run; its config.toml and model.safetensors are used")
      ->type_name("RUN");
  SettingFlags flags(app, {"model", "data", "run"});
  return {app, [run, flags] { return evaluate_command(settings_of(*run, flags)); }};
}

}  // namespace sherd::cli
