// SPDX-License-Identifier: Apache-2.0
#include "command.h"

#include <sherd/comm/checkpoint/store.h>
#include <sherd/tools/trainer/evaluate.h>
#include <sherd/tools/trainer/golden.h>
#include <sherd/tools/trainer/train.h>

#include <filesystem>

namespace sherd::cli {
namespace {

// RUN is a folder that `sherd train` wrote, or a checkpoint in it: its configuration and weights
// serve unless flags say other.
TrainSettings settings_of(const std::string& run, const SettingFlags& flags) {
  if (run.empty()) return flags.resolve({});
  const std::filesystem::path folder(run);
  SHERD_CHECK(
      std::filesystem::is_regular_file(folder / "config.toml"),
      "{}: not the folder of a run (it has no config.toml); for a weights file use --weights "
      "FILE and the model's settings",
      run);
  TrainSettings settings = flags.resolve((folder / "config.toml").string());
  if (flags.gives("model.weights")) return settings;
  if (std::filesystem::exists(folder / "index.json")) {  // a checkpoint
    settings.weights = run;
    return settings;
  }
  const std::filesystem::path weights = folder / "model.safetensors";
  const bool ended = std::filesystem::exists(weights);
  SHERD_CHECK(ended || !find_checkpoints((folder / "checkpoints").string()).empty(),
              "{}: has no model.safetensors and no checkpoint; the run did not finish", run);
  settings.weights = ended ? weights.string() : run;  // the newest checkpoint's
  return settings;
}

struct LogitsOptions {
  std::string path;
  double tolerance = 0.0;
};

int evaluate_command(TrainSettings settings, const LogitsOptions& logits) {
  SHERD_CHECK(!settings.weights.empty(), "eval: give the folder of a run, or --weights FILE");
  check_range("--batch-size", settings.batch_size, 1, 1 << 24);
  const DataSource data = open_data(settings, DataParts::test);
  VisionTransformer model(model_settings(settings, data.test->channels(), data.test->height(),
                                         data.test->width(), data.test->classes()));
  Context context(context_options(settings));
  SHERD_CHECK(!context.is_meta(), "--device meta computes no numbers, so it cannot evaluate");
  settings.reduce_dtype.clear();  // nothing is reduced here
  const std::unique_ptr<Communicator> alone = make_self_communicator();
  ShardingEngine engine(model, context, *alone, training_precision(settings),
                        {.policy = ShardingPolicy::none});
  const std::vector<std::string> notes = make_weights(settings, model, engine);
  ProgressLine line;
  const std::int64_t batch = std::min(settings.batch_size, data.test->size());
  InputBuffers inputs(context, *data.test, batch, engine.precision().master);
  const EvaluationResult result =
      evaluate(context, model, inputs, data.test, loader_options(settings, data, batch, false),
               [&](std::int64_t done) {
                 const auto of = static_cast<double>(data.test->size());
                 line.show(fmt::format("{} {}/{}", bar(static_cast<double>(done) / of, 30), done,
                                       data.test->size()));
                 return true;
               });
  line.clear();
  fmt::print("weights         {}\n", settings.weights);
  for (const std::string& note : notes) fmt::print("                {}\n", note);
  fmt::print("data            {}\n", data.test->name());
  fmt::print("top-1           {:.2f}% ({} of {})\n", 100.0 * result.accuracy(),
             group_digits(result.correct), group_digits(result.samples));
  fmt::print("loss            {:.6f}\n", result.loss);
  if (logits.path.empty()) return 0;
  const LogitsResult compared = compare_logits(
      context, model, data.test, loader_options(settings, data, batch, false), logits.path);
  const double tolerance = logits.tolerance > 0.0                    ? logits.tolerance
                           : engine.precision().master == DType::f64 ? 1e-9
                                                                     : 1e-4;
  const bool within = compared.worst_error <= tolerance;
  fmt::print("logits          of {} images: largest difference {:.2e}, {} {:g}\n", compared.images,
             compared.worst_error, within ? "within the tolerance of" : "PAST the tolerance of",
             tolerance);
  return within ? 0 : 1;
}

}  // namespace

Command add_eval(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand(
      "eval",
      "Top-1 accuracy and mean loss on the test images.\n\n"
      "  sherd eval runs/NAME\n"
      "  sherd eval --weights FILE --dataset mnist --data-dir DIR --patch 4 --depth 6 ...\n"
      "  sherd eval ... --logits FILE        also compare logits with those of another program\n");
  auto run = std::make_shared<std::string>();
  app->add_option("run", *run,
                  "folder of a run: its config.toml, and its model.safetensors or else its newest "
                  "checkpoint; or a checkpoint")
      ->type_name("RUN");
  auto logits = std::make_shared<LogitsOptions>();
  CLI::Option* path =
      app->add_option(
             "--logits", logits->path,
             "JSON file whose \"logits\" are those of the first test images, to compare with")
          ->type_name("FILE");
  app->add_option("--tolerance", logits->tolerance,
                  "largest difference of a logit [1e-09 in fp64, 1e-04 in fp32]")
      ->type_name("NUMBER")
      ->needs(path);
  SettingFlags flags(app, {"model.preset",
                           "model.patch",
                           "model.dim",
                           "model.depth",
                           "model.heads",
                           "model.head_dim",
                           "model.mlp_ratio",
                           "model.activation",
                           "model.pooling",
                           "model.qkv_bias",
                           "model.layer_norm_eps",
                           "model.weights",
                           "data.dataset",
                           "data.data_dir",
                           "data.image_size",
                           "data.images",
                           "data.classes",
                           "data.mean",
                           "data.stddev",
                           "data.workers",
                           "run.batch_size",
                           "run.device",
                           "precision.precision",
                           "precision.param_dtype",
                           "precision.output_dtype",
                           "memory.memory_limit",
                           "run.threads",
                           "run.seed"});
  return {app, [app, run, flags, logits] {
            check_one_process("eval");
            check_tolerance("--tolerance", *app, logits->tolerance);
            const TrainSettings settings = settings_of(*run, flags);
            SHERD_CHECK(!flags.gives("run.seed") || settings.dataset == "synthetic",
                        "--seed: has no effect here, it makes the images of --dataset synthetic");
            return evaluate_command(settings, *logits);
          }};
}

}  // namespace sherd::cli
