// SPDX-License-Identifier: Apache-2.0
#include "command.h"

#include <sherd/models/vit.h>
#include <sherd/models/weights.h>
#include <sherd/models/weights_names.h>
#include <sherd/runtime/io/quote.h>
#include <sherd/runtime/ledger.h>
#include <sherd/tools/trainer/plan.h>
#include <sherd/tools/trainer/ranks.h>
#include <sherd/tools/trainer/weights_source.h>

#include <algorithm>

namespace sherd::cli {
namespace {

int list_models(std::int64_t classes) {
  fmt::print("model                    parameters   dim  depth  heads  head dim  patch  image\n");
  for (const std::string& name : vit_preset_names()) {
    ViTSettings settings = vit_preset(name);
    settings.classes = classes;
    const VisionTransformer model(settings);
    const ViTSettings& s = model.settings();
    fmt::print("{:<23}  {:>11}  {:>4}  {:>5}  {:>5}  {:>8}  {:>5}  {}x{}x{}\n", name,
               group_digits(model.parameter_count()), s.dim, s.depth, s.heads, s.head_dim, s.patch,
               s.channels, s.image_height, s.image_width);
  }
  fmt::print("\nwith {} classes; `sherd inspect model NAME` lists a model's parameters\n", classes);
  return 0;
}

int inspect_model(const std::string& name, std::int64_t classes) {
  SHERD_CHECK(classes > 0, "--classes: must be positive, got {}", classes);
  if (name.empty()) return list_models(classes);
  ViTSettings settings = vit_preset(name);
  settings.classes = classes;
  VisionTransformer model(settings);
  std::int64_t decayed = 0;
  for (const Parameter* parameter : model.parameters()) {
    if (parameter->weight_decay()) decayed += parameter->numel();
    fmt::print("{:<32} {:<20} {:>12}  {}\n", parameter->name(), parameter->shape().to_string(),
               group_digits(parameter->numel()), parameter->weight_decay() ? "decay" : "no decay");
  }
  const std::int64_t count = model.parameter_count();
  fmt::print("\n{}: {} parameters ({} in fp32), {} with weight decay and {} without\n", name,
             group_digits(count), format_bytes(4 * count), group_digits(decayed),
             group_digits(count - decayed));
  fmt::print("{:.2f} GFLOP of matrix products for a training step on one image\n",
             model.training_flops_per_image() / 1e9);
  return 0;
}

int inspect_weights(const std::string& path) {
  const std::unique_ptr<TensorFile> file = open_weights(path);
  std::int64_t elements = 0, bytes = 0;
  std::size_t width = 4, type_width = 5;
  std::vector<const TensorEntry*> sorted;
  const std::vector<std::string> weights = weight_names(*file);  // the rest may be an optimizer's
  for (const TensorEntry& entry : file->entries()) {
    width = std::max(width, quote(entry.name).size() - 2);
    type_width = std::max(type_width, entry.type.size());
    sorted.push_back(&entry);
  }
  std::ranges::sort(sorted, {}, [](const TensorEntry* entry) { return entry->name; });
  for (const TensorEntry* entry : sorted) {
    const std::string quoted = quote(entry->name);  // without the quotes: printable
    fmt::print("{:<{}}  {:<{}} {:<20} {:>12}{}\n", quoted.substr(1, quoted.size() - 2), width,
               entry->type, type_width, fmt::format("[{}]", fmt::join(entry->dims, ", ")),
               group_digits(entry->numel), entry->dtype ? "" : "  (cannot be read here)");
    // What is spread out of a small storage may claim more than any number holds.
    const auto own = static_cast<std::int64_t>(entry->bytes);
    if (__builtin_add_overflow(elements, entry->numel, &elements)) elements = INT64_MAX;
    if (__builtin_add_overflow(bytes, own, &bytes)) bytes = INT64_MAX;
  }
  fmt::print("\n{}: {} tensors, {} elements, {}, {}\n", file->path(), file->entries().size(),
             group_digits(elements), format_bytes(bytes), file->format());
  if (!file->prefix().empty()) {
    fmt::print("a model's weights: the {} under '{}'\n", weights.size(),
               file->prefix().substr(0, file->prefix().size() - 1));
  } else if (weights.size() < file->entries().size()) {
    fmt::print("a model's weights: {}; the rest is an optimizer's state\n", weights.size());
  }
  for (const std::string& note : map_weight_names(weights).notes) {
    fmt::print("for a model: {}\n", note);
  }
  for (const auto& [key, value] : file->metadata()) fmt::print("{} = {}\n", key, value);
  return 0;
}

// Of the second step: by then the engine knows the order in which units run.
int inspect_events(TrainSettings settings) {
  const int ranks = static_cast<int>(settings.ranks);
  check_range("--ranks", settings.ranks, 1, 1 << 20);
  check_batch(settings, ranks);
  sharding_options(settings, ranks);
  settings.recompute = chosen_recompute(settings, ranks);
  check_memory_limit(settings, ranks);
  Context context({.device = Device::meta});
  const std::unique_ptr<Communicator> world = make_meta_communicator(0, ranks);
  Rehearsal test(settings, context, *world);
  test.step->run_shape(*test.inputs, settings.batch_size);
  test.engine.record_events(true);
  test.step->run_shape(*test.inputs, settings.batch_size);
  fmt::print("rank 0 of {}\n\n", describe_ranks(settings, *world));
  for (const ShardingEvent& event : test.engine.events()) fmt::print("{}\n", event.to_string());
  fmt::print("\nunit                             parameters      with padding   of one rank\n");
  for (const auto& unit : test.engine.units()) {
    const FlatLayout& layout = unit->layout();
    fmt::print("{:<28} {:>14} {:>17} {:>13}\n", unit->name(), group_digits(layout.numel()),
               group_digits(layout.padded_numel()), group_digits(layout.shard_numel()));
  }
  return 0;
}

}  // namespace

Command add_inspect(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand(
      "inspect",
      "Shows what is in a model, a weights file, a checkpoint or a sharded training step.\n");
  struct State {
    std::string model, weights;
    std::int64_t classes = 1000;
  };
  auto state = std::make_shared<State>();
  CLI::App* model = app->add_subcommand("model", "The model names, or every parameter of one.\n");
  model->add_option("name", state->model, "timm's name, such as vit_base_patch16_224")
      ->type_name("NAME");
  model->add_option("--classes", state->classes, "classes of the head [1000]")->type_name("INT");
  CLI::App* weights = app->add_subcommand(
      "weights",
      "Every tensor of a file, without running any of it: safetensors, PyTorch's .pt, .pth, .bin,\n"
      "split files, a checkpoint of Sherd's, PyTorch's or DeepSpeed's.\n\n"
      "  sherd inspect weights model.safetensors\n"
      "  sherd inspect weights model.safetensors.index.json      or the directory that has it\n"
      "  sherd inspect weights runs/NAME                         its newest checkpoint\n");
  weights->add_option("file", state->weights, "a file, or a directory of files")->type_name("PATH");
  CLI::App* events = app->add_subcommand(
      "events",
      "What the sharding engine does in one training step, in order, planned on the meta device:\n"
      "any number of ranks, any model, nothing is computed.\n\n"
      "  sherd inspect events --ranks 4 --shard zero3 --depth 2\n"
      "  sherd inspect events --offload-optimizer nvme:/scratch          what the update reads and "
      "writes\n");
  SettingFlags flags(events,
                     {"model", "sharding", "data.dataset", "data.data_dir", "data.image_size",
                      "data.classes", "run.batch_size", "run.micro_batch", "precision", "memory"});
  const Command checkpoint = add_inspect_checkpoint(*app);
  return {app, [state, model, events, checkpoint, flags] {
            check_one_process("inspect");
            if (checkpoint.app->parsed()) return checkpoint.run();
            if (events->parsed()) return inspect_events(flags.resolve({}));
            if (model->parsed()) return inspect_model(state->model, state->classes);
            SHERD_CHECK(!state->weights.empty(),
                        "inspect weights: give a safetensors or PyTorch file, split files, or a "
                        "checkpoint");
            return inspect_weights(state->weights);
          }};
}

}  // namespace sherd::cli
