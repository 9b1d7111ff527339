// SPDX-License-Identifier: Apache-2.0
// The settings of a training run, and the one table that the command line, TOML files and the
// resolved configuration beside a run are all read from and written by.
//
// Later wins: defaults, then the model preset, then the TOML file, then flags.
#pragma once

#include <sherd/models/vit.h>
#include <sherd/optim/schedule.h>
#include <sherd/runtime/context.h>

#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace sherd {

struct TrainSettings {
  // [model]
  std::string preset;  // a timm name; empty: the settings below
  std::int64_t patch = 7, dim = 64, depth = 4, heads = 4, head_dim = 0;
  double mlp_ratio = 2.0;
  std::string activation = "gelu", pooling = "cls";
  bool qkv_bias = true;
  double layer_norm_eps = 1e-6, drop = 0.0, drop_path = 0.0;
  std::string weights;
  // [data]
  std::string dataset = "fashion-mnist", data_dir;
  std::string image_size = "3x224x224";      // of synthetic images
  std::int64_t images = 1024, classes = 10;  // of synthetic data
  std::vector<double> mean, stddev;          // empty: the data set's own
  bool shuffle = true;
  std::int64_t workers = 1;
  // [optimizer]
  std::string optimizer = "adamw";
  double lr = 1e-3, weight_decay = 0.05, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, momentum = 0.9;
  bool nesterov = false;
  double clip_grad_norm = 1.0, label_smoothing = 0.0;
  // [schedule]
  std::string schedule = "cosine";
  double min_lr = 0.0, warmup_epochs = 1.0;
  std::int64_t warmup_steps = -1;  // -1: by warmup_epochs
  // [sharding]
  std::int64_t ranks = 1, prefetch = 1, persist_below = 0;
  std::string shard = "auto", mesh, unit = "block", reshard_after_forward, reduce_every = "step";
  bool exact_sums = false;
  // [precision]
  std::string precision = "fp32", param_dtype, reduce_dtype, output_dtype, loss_scale = "auto";
  std::int64_t loss_scale_window = 1000, loss_scale_hysteresis = 1;
  double min_loss_scale = 1.0;
  // [memory]
  std::string memory_limit, recompute = "none";
  std::string offload_optimizer = "none", offload_parameters = "none", offload_activations = "none";
  // [run]
  std::int64_t epochs = 10, max_steps = 0, batch_size = 128, micro_batch = 0;
  std::string device = "cpu", attention = "auto";
  bool graph = false;
  std::int64_t threads = 0, seed = 0;
  std::string out, trace;
  std::int64_t log_every = 50, eval_every = 1;
  // [checkpoint]
  std::int64_t save_every = 0, keep = 2;
  bool checkpoint_async = false;
  std::string resume;
};

// One entry of the table. `key` is "section.name" in TOML; the flag is --name with dashes.
struct Setting {
  using Field = std::variant<std::string TrainSettings::*, std::int64_t TrainSettings::*,
                             double TrainSettings::*, bool TrainSettings::*,
                             std::vector<double> TrainSettings::*>;
  std::string key;
  Field field;
  std::string help;

  std::string section() const { return key.substr(0, key.find('.')); }
  std::string flag() const;  // "--batch-size"
  const char* type() const;  // "INT", "NUMBER", "yes|no", "TEXT", "NUMBER,..."
};

SHERD_API const std::vector<Setting>& setting_table();

// (key, value) pairs in the order they should be applied.
using Assignments = std::vector<std::pair<std::string, std::string>>;

// Reads a TOML file; an unknown key is an error with a suggestion.
SHERD_API Assignments read_toml_settings(const std::string& path);
// Applies defaults, preset, file and flags in this order.
SHERD_API TrainSettings resolve_settings(const Assignments& file, const Assignments& flags);
// Throws where one of the given settings has no effect beside the others.
SHERD_API void check_used(const TrainSettings& settings, const Assignments& given);
// Sets one value; `source` ("--lr", "run.toml") is named in errors.
SHERD_API void assign(TrainSettings& settings, const std::string& key, const std::string& value,
                      const std::string& source);
SHERD_API std::string value_text(const TrainSettings& settings, const Setting& setting);
// The whole configuration as TOML, which read_toml_settings reads back to the same settings, but
// for the folder and the trace that belong to one run.
SHERD_API std::string settings_to_toml(const TrainSettings& settings);

// Throws, naming the flag, unless low <= value <= high.
SHERD_API void check_range(const char* flag, std::int64_t value, std::int64_t low,
                           std::int64_t high);
SHERD_API double number_from_text(const std::string& text, const std::string& source);
// "6GiB", "512MiB", "1000000" → bytes; empty → 0.
SHERD_API std::size_t parse_bytes(const std::string& text, const std::string& source);
// Of --attention: auto, own or cudnn.
SHERD_API AttentionKernels parse_attention(const std::string& name);

SHERD_API ContextOptions context_options(const TrainSettings& settings);
// Model settings for images of this shape.
SHERD_API ViTSettings model_settings(const TrainSettings& settings, std::int64_t channels,
                                     std::int64_t height, std::int64_t width, std::int64_t classes);
SHERD_API LrSchedule lr_schedule(const TrainSettings& settings, std::int64_t steps_per_epoch,
                                 std::int64_t total_steps);

}  // namespace sherd
