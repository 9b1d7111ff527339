// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/settings.h>

#include <sherd/kernels/attention.h>
#include <sherd/runtime/suggest.h>

#include <toml++/toml.h>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>
#include <set>
#include <sstream>

namespace sherd {
namespace {

using T = TrainSettings;

template <typename Number>
bool parse_number(std::string_view text, Number* value) {
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, *value);
  return error == std::errc() && rest == end;
}

std::vector<std::string> known_keys() {
  std::vector<std::string> keys;
  for (const Setting& setting : setting_table()) keys.push_back(setting.key);
  return keys;
}

// A key near to this one, in its section or by its name in another, or what its section has.
std::string suggestion(const std::string& key) {
  std::vector<std::string> section, names;
  for (const std::string& known : known_keys()) {
    names.push_back(known.substr(known.find('.') + 1));
    if (known.starts_with(key.substr(0, key.find('.') + 1))) section.push_back(known);
  }
  std::string hint = did_you_mean(key, known_keys());
  if (!hint.starts_with("; known")) return hint;
  const std::string by_name = did_you_mean(key.substr(key.find('.') + 1), names);
  for (const std::string& known : known_keys()) {  // with its section
    if (by_name == fmt::format("; did you mean '{}'?", known.substr(known.find('.') + 1)))
      return fmt::format("; did you mean '{}'?", known);
  }
  return section.empty() ? "; sections: model, data, optimizer, schedule, sharding, precision, "
                           "memory, run, checkpoint"
                         : did_you_mean("", section);
}

const Setting& find_setting(const std::string& key, const std::string& source) {
  const auto& table = setting_table();
  const auto found = std::ranges::find(table, key, &Setting::key);
  SHERD_CHECK(found != table.end(), "{}: unknown key '{}'{}", source, key, suggestion(key));
  return *found;
}

std::vector<double> parse_list(const std::string& text, const std::string& source) {
  std::vector<double> values;
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    SHERD_CHECK(parse_number(part, &values.emplace_back()),
                "{}: expected numbers separated by commas, got '{}'", source, text);
  }
  return values;
}

// The value as a flag would have it; its kind must be the setting's.
std::string toml_text(const toml::node& node, const Setting& setting, const std::string& path) {
  const auto number = [](const toml::node& item) -> std::string {
    if (const auto whole = item.value_exact<std::int64_t>()) return std::to_string(*whole);
    if (const auto real = item.value_exact<double>()) return fmt::format("{}", *real);
    return {};
  };
  std::string text;
  bool fits = false;
  switch (setting.field.index()) {
    case 0:
      fits = node.is_string();
      if (fits) text = *node.value_exact<std::string>();
      break;
    case 1:
    case 2:
      text = number(node);
      fits = !text.empty() && (setting.field.index() == 2 || node.is_integer());
      break;
    case 3:
      fits = node.is_boolean();
      if (fits) text = *node.value_exact<bool>() ? "yes" : "no";
      break;
    default: {
      const toml::array* list = node.as_array();
      fits = list != nullptr;
      for (std::size_t i = 0; fits && i < list->size(); ++i) {
        const std::string item = number(*list->get(i));
        fits = !item.empty();
        text += (i == 0 ? "" : ",") + item;
      }
    }
  }
  static constexpr const char* kKinds[] = {"a text in quotes", "a whole number", "a number",
                                           "true or false", "a list of numbers"};
  std::stringstream given;
  given << toml::node_view<const toml::node>(&node);
  SHERD_CHECK(fits, "{}:{}: {}: expected {}, got {}", path, node.source().begin.line, setting.key,
              kKinds[setting.field.index()], given.str());
  return text;
}

std::string toml_quoted(const std::string& text) {
  std::stringstream out;
  out << toml::value<std::string>(text);
  return out.str();
}

}  // namespace

const std::vector<Setting>& setting_table() {
  static const std::vector<Setting> table{
      {"model.preset", &T::preset,
       "a timm model name, see `sherd inspect model`; sets the rest of [model]. Needs images of "
       "its "
       "size, such as --dataset synthetic"},
      {"model.patch", &T::patch, "side of a square patch, in pixels; must divide the image"},
      {"model.dim", &T::dim, "features of a token"},
      {"model.depth", &T::depth, "number of blocks"},
      {"model.heads", &T::heads, "attention heads"},
      {"model.head_dim", &T::head_dim, "features of a head; 0: dim / heads"},
      {"model.mlp_ratio", &T::mlp_ratio, "hidden features of the MLP, as a multiple of dim"},
      {"model.activation", &T::activation, "gelu, gelu_tanh or relu"},
      {"model.pooling", &T::pooling, "cls (class token) or mean (of the patch tokens)"},
      {"model.qkv_bias", &T::qkv_bias, "a bias in the query, key and value projection"},
      {"model.layer_norm_eps", &T::layer_norm_eps, "added to the variance in LayerNorm"},
      {"model.drop", &T::drop, "dropout rate after projections and in the MLP"},
      {"model.drop_path", &T::drop_path, "stochastic depth rate of the last block"},
      {"model.weights", &T::weights,
       "start from, or evaluate, these: a file, split files, a checkpoint; all that convert reads"},
      {"data.dataset", &T::dataset, "fashion-mnist, mnist or synthetic"},
      {"data.data_dir", &T::data_dir,
       "folder of the IDX files; empty: where Debian's package puts them"},
      {"data.image_size", &T::image_size, "channels x height x width of synthetic images"},
      {"data.images", &T::images, "how many synthetic images"},
      {"data.classes", &T::classes, "classes of synthetic images"},
      {"data.mean", &T::mean,
       "subtracted from pixels in [0, 1], one a channel; empty: the data set's"},
      {"data.stddev", &T::stddev, "divides them afterwards, one a channel; empty: the data set's"},
      {"data.shuffle", &T::shuffle, "a new order each epoch, from the seed; no: file order"},
      {"data.workers", &T::workers,
       "threads of a rank that prepare batches; 0: none. Never changes a result"},
      {"optimizer.optimizer", &T::optimizer, "adamw or sgd"},
      {"optimizer.lr", &T::lr, "learning rate after the warm-up"},
      {"optimizer.weight_decay", &T::weight_decay,
       "times lr; not on biases, norms, class token and position embedding"},
      {"optimizer.beta1", &T::beta1, "AdamW: decay of the gradient average"},
      {"optimizer.beta2", &T::beta2, "AdamW: decay of the squared gradient average"},
      {"optimizer.eps", &T::eps, "AdamW: added to the denominator"},
      {"optimizer.momentum", &T::momentum, "SGD: momentum"},
      {"optimizer.nesterov", &T::nesterov, "SGD: Nesterov's momentum"},
      {"optimizer.clip_grad_norm", &T::clip_grad_norm,
       "largest global gradient norm; 0: no clipping"},
      {"optimizer.label_smoothing", &T::label_smoothing, "of the cross-entropy targets"},
      {"schedule.schedule", &T::schedule, "cosine, linear or constant"},
      {"schedule.min_lr", &T::min_lr, "learning rate at the end"},
      {"schedule.warmup_epochs", &T::warmup_epochs,
       "length of the linear warm-up; up to 1, at most half of the run"},
      {"schedule.warmup_steps", &T::warmup_steps, "the same in steps; -1: by warmup_epochs"},
      {"sharding.ranks", &T::ranks,
       "ranks as threads of this process; under mpiexec leave it out, each process is a rank"},
      {"sharding.shard", &T::shard,
       "none (ddp), zero1, zero2, grad_op, zero3 (fsdp), hybrid (hsdp, needs --mesh), or auto: "
       "none on one rank, else zero3"},
      {"sharding.mesh", &T::mesh,
       "arrangement of the ranks, such as replicate=2,shard=4; empty: shard over all"},
      {"sharding.unit", &T::unit,
       "what is gathered as one: block, model, or params:N (at least N parameters)"},
      {"sharding.reshard_after_forward", &T::reshard_after_forward,
       "yes, no, or K: keep 1/K inside groups of K ranks; empty: by the policy"},
      {"sharding.prefetch", &T::prefetch, "units gathered ahead of the one that computes"},
      {"sharding.persist_below", &T::persist_below, "parameters with fewer elements stay gathered"},
      {"sharding.reduce_every", &T::reduce_every,
       "step: sum gradients over ranks once a step; micro: after each micro-batch, which holds "
       "less"},
      {"sharding.exact_sums", &T::exact_sums,
       "on GPUs: sum over ranks in one fixed tree, whatever NCCL would do; slower"},
      {"precision.precision", &T::precision,
       "fp32, bf16 or fp16: of parameters and activations, and of gradients when they are sent; "
       "weights, their sums and the optimizer state stay in fp32. fp64: everything in fp64"},
      {"precision.param_dtype", &T::param_dtype,
       "of parameters and activations alone: fp32, bf16 or fp16; empty: by --precision"},
      {"precision.reduce_dtype", &T::reduce_dtype,
       "to which gradients are rounded, once, before they are sent: fp32, bf16 or fp16; empty: by "
       "--precision"},
      {"precision.output_dtype", &T::output_dtype,
       "to which the logits are cast: fp32, bf16 or fp16; empty: fp32"},
      {"precision.loss_scale", &T::loss_scale,
       "fp16: auto (starts at 65536, halves when a step overflows, doubles after a while without), "
       "or a fixed power of two"},
      {"precision.loss_scale_window", &T::loss_scale_window,
       "fp16: steps without overflow before the scale doubles"},
      {"precision.loss_scale_hysteresis", &T::loss_scale_hysteresis,
       "fp16: overflows before the scale halves"},
      {"precision.min_loss_scale", &T::min_loss_scale,
       "fp16: an overflow at this scale ends the run, and names the layer"},
      {"memory.memory_limit", &T::memory_limit,
       "most memory that a rank may reserve on its device, such as 6GiB; empty: no limit"},
      {"memory.recompute", &T::recompute,
       "run forward passes again in backward instead of keeping what they save: none, selective "
       "(of "
       "the MLPs), block (of whole blocks), or auto: the least that fits --memory-limit"},
      {"memory.offload_optimizer", &T::offload_optimizer,
       "where optimizer state, master weights and sharded gradients are kept: none, cpu (the "
       "memory of the host), or nvme:DIR (files in DIR, the update reads ahead and writes behind)"},
      {"memory.offload_parameters", &T::offload_parameters,
       "the same for the shard of the parameters"},
      {"memory.offload_activations", &T::offload_activations,
       "where the inputs of what --recompute runs again wait for backward: none (in place), or cpu "
       "(the memory of the host)"},
      {"run.epochs", &T::epochs, "passes over the training images"},
      {"run.max_steps", &T::max_steps,
       "stop (and end the schedule) after this many steps; 0: by epochs"},
      {"run.batch_size", &T::batch_size,
       "samples of one optimizer step, over all ranks; eval: of one forward pass"},
      {"run.micro_batch", &T::micro_batch,
       "samples of one rank's forward pass; 0: its whole part of the batch"},
      {"run.device", &T::device,
       "cpu, or cuda: a GPU for each rank; bench takes meta too, which plans and computes nothing"},
      {"run.attention", &T::attention,
       "on a GPU: whose kernels compute attention: own, cudnn (bf16 and fp16), or auto: own"},
      {"run.graph", &T::graph,
       "on GPUs: capture a step as CUDA graphs and replay it, which spares the host's work; says "
       "why where that cannot be done, and goes on without"},
      {"run.threads", &T::threads,
       "CPU threads of a rank's kernels; 0: its part of OMP_NUM_THREADS, or of all"},
      {"run.seed", &T::seed, "of initial weights, data order and dropout"},
      {"run.out", &T::out, "folder of the results; empty: runs/DATASET-TIME"},
      {"run.trace", &T::trace,
       "write a Chrome trace of the first 10 steps of all ranks to this new file"},
      {"run.log_every", &T::log_every, "steps between lines of the log"},
      {"run.eval_every", &T::eval_every,
       "epochs between evaluations on the test images; 0: at the end"},
      {"checkpoint.save_every", &T::save_every,
       "steps between checkpoints in OUT/checkpoints, from which --resume goes on; also one where "
       "an evaluation is the best so far, and at the end. 0: none"},
      {"checkpoint.keep", &T::keep, "how many of the newest checkpoints stay, beside the best"},
      {"checkpoint.checkpoint_async", &T::checkpoint_async,
       "write checkpoints from a copy in the host's memory while training goes on"},
      {"checkpoint.resume", &T::resume,
       "go on from this checkpoint (or the newest of this run), by its settings, which flags "
       "change; auto: from the newest in OUT, or, where a run was killed before its first, from "
       "the start by OUT/config.toml"},
  };
  return table;
}

std::string Setting::flag() const {
  std::string name = key.substr(key.find('.') + 1);
  std::ranges::replace(name, '_', '-');
  return "--" + name;
}

const char* Setting::type() const {
  static constexpr const char* kTypes[] = {"TEXT", "INT", "NUMBER", "yes|no", "NUMBER,..."};
  return kTypes[field.index()];
}

void assign(TrainSettings& settings, const std::string& key, const std::string& value,
            const std::string& source) {
  const Setting& setting = find_setting(key, source);
  std::visit(
      [&](auto field) {
        using Value = std::remove_reference_t<decltype(settings.*field)>;
        Value& target = settings.*field;
        if constexpr (std::is_same_v<Value, std::string>) {
          target = value;
        } else if constexpr (std::is_same_v<Value, bool>) {
          const bool yes = value == "yes" || value == "true",
                     no = value == "no" || value == "false";
          SHERD_CHECK(yes || no, "{}: expected yes or no, got '{}'", source, value);
          target = yes;
        } else if constexpr (std::is_same_v<Value, std::vector<double>>) {
          target = parse_list(value, source);
        } else {
          const bool parsed = parse_number(value, &target);
          SHERD_CHECK(parsed, "{}: expected {}, got '{}'", source,
                      std::is_same_v<Value, double> ? "a number" : "a whole number", value);
        }
      },
      setting.field);
}

std::string value_text(const TrainSettings& settings, const Setting& setting) {
  return std::visit(
      [&](auto field) -> std::string {
        const auto& value = settings.*field;
        using Value = std::remove_cvref_t<decltype(value)>;
        if constexpr (std::is_same_v<Value, std::string>) {
          return value;
        } else if constexpr (std::is_same_v<Value, bool>) {
          return value ? "yes" : "no";
        } else if constexpr (std::is_same_v<Value, std::vector<double>>) {
          std::string text;
          for (const double item : value)
            text += fmt::format("{}{}", text.empty() ? "" : ",", item);
          return text;
        } else {
          return fmt::format("{}", value);
        }
      },
      setting.field);
}

Assignments read_toml_settings(const std::string& path) {
  SHERD_CHECK(std::filesystem::is_regular_file(path), "{}: expected a TOML file of settings, {}",
              path,
              std::filesystem::is_directory(path) ? "got a directory; sherd eval and --resume take "
                                                    "those of runs"
                                                  : "there is no such file");
  toml::table document;
  try {
    document = toml::parse_file(path);
  } catch (const toml::parse_error& error) {
    const auto& at = error.source().begin;
    fail("{}:{}:{}: {}", path, at.line, at.column, error.description());
  }
  Assignments assignments;
  for (const auto& [section, node] : document) {
    const toml::table* keys = node.as_table();
    const std::string section_name(section.str());
    SHERD_CHECK(keys != nullptr, "{}: '{}' stands outside a section{}", path, section_name,
                suggestion("." + section_name));
    for (const auto& [name, value] : *keys) {
      const std::string key = section_name + "." + std::string(name.str());
      assignments.emplace_back(key, toml_text(value, find_setting(key, path), path));
    }
  }
  return assignments;
}

TrainSettings resolve_settings(const Assignments& file, const Assignments& flags) {
  TrainSettings settings;
  for (const Assignments* assignments : {&file, &flags}) {
    for (const auto& [key, value] : *assignments) {
      if (key == "model.preset") settings.preset = value;
    }
  }
  const auto gives = [](const Assignments& assignments, const std::string& key) {
    return std::ranges::any_of(assignments, [&](const auto& a) { return a.first == key; });
  };
  if (gives(flags, "model.preset")) {
    for (const char* key :
         {"model.patch", "model.dim", "model.depth", "model.heads", "model.mlp_ratio"}) {
      SHERD_CHECK(
          !gives(file, key),
          "--preset {}: the settings file sets {}; remove it there, or leave the preset out",
          settings.preset, key);
    }
  }
  if (!settings.preset.empty()) {
    const ViTSettings preset = vit_preset(settings.preset);
    settings.patch = preset.patch;
    settings.dim = preset.dim;
    settings.depth = preset.depth;
    settings.heads = preset.heads;
    settings.mlp_ratio = preset.mlp_ratio;
  }
  for (const auto& [key, value] : file) assign(settings, key, value, key);
  for (const auto& [key, value] : flags) {
    assign(settings, key, value, find_setting(key, "flag").flag());
  }
  check_used(settings, flags);
  return settings;
}

void check_used(const TrainSettings& s, const Assignments& given) {
  const bool synthetic = s.dataset == "synthetic", adamw = s.optimizer == "adamw";
  static const std::set<std::string> kFull{"none", "ddp", "no_shard", "zero1", "zero2"};
  const bool gathers = !kFull.contains(s.shard);
  static const std::set<std::string> kHalf{"fp16", "f16", "float16"};
  const bool half = kHalf.contains(s.param_dtype.empty() ? s.precision : s.param_dtype) ||
                    kHalf.contains(s.reduce_dtype.empty() ? s.precision : s.reduce_dtype);
  const bool scaled = half && s.loss_scale == "auto";
  const struct {
    const char* key;
    bool used;
    const char* needs;
  } rules[] = {
      {"data.data_dir", !synthetic, "a data set of files; synthetic images are made"},
      {"data.image_size", synthetic, "--dataset synthetic"},
      {"data.images", synthetic, "--dataset synthetic"},
      {"data.classes", synthetic, "--dataset synthetic"},
      {"optimizer.beta1", adamw, "--optimizer adamw"},
      {"optimizer.beta2", adamw, "--optimizer adamw"},
      {"optimizer.eps", adamw, "--optimizer adamw"},
      {"optimizer.momentum", !adamw, "--optimizer sgd"},
      {"optimizer.nesterov", !adamw, "--optimizer sgd"},
      {"schedule.min_lr", s.schedule != "constant", "a schedule that decays"},
      {"sharding.reduce_every", s.micro_batch > 0, "--micro-batch"},
      {"run.graph", s.device == "cuda", "--device cuda"},
      {"sharding.exact_sums", s.device == "cuda", "--device cuda; sums are exact elsewhere"},
      {"run.attention", s.device == "cuda", "--device cuda"},
      {"sharding.prefetch", gathers, "a policy that shards parameters (grad_op, zero3, hybrid)"},
      {"memory.offload_parameters", gathers || s.offload_parameters == "none",
       "a policy that shards parameters (grad_op, zero3, hybrid)"},
      {"precision.loss_scale", half, "--precision fp16"},
      {"precision.loss_scale_window", scaled, "--precision fp16 and --loss-scale auto"},
      {"precision.loss_scale_hysteresis", scaled, "--precision fp16 and --loss-scale auto"},
      {"precision.min_loss_scale", scaled, "--precision fp16 and --loss-scale auto"},
      {"checkpoint.keep", s.save_every > 0, "--save-every"},
      {"checkpoint.checkpoint_async", s.save_every > 0, "--save-every"},
      {"schedule.warmup_epochs", s.warmup_steps < 0, "no --warmup-steps beside it"},
  };
  for (const auto& [key, value] : given) {
    for (const auto& rule : rules) {
      SHERD_CHECK(key != rule.key || rule.used, "{}: has no effect here, it needs {}",
                  find_setting(key, "flag").flag(), rule.needs);
    }
  }
}

std::string settings_to_toml(const TrainSettings& settings) {
  std::string text =
      "# Every setting of this run; `sherd train FILE` repeats it in a new folder.\n";
  std::string section;
  for (const Setting& setting : setting_table()) {
    static const std::set<std::string> kOfOneRun{"run.out", "run.trace", "checkpoint.resume"};
    if (kOfOneRun.contains(setting.key)) continue;
    if (setting.section() != section) {
      section = setting.section();
      text += fmt::format("\n[{}]\n", section);
    }
    std::string value = value_text(settings, setting);
    switch (setting.field.index()) {
      case 0: value = toml_quoted(value); break;
      case 3: value = value == "yes" ? "true" : "false"; break;
      case 4: value = "[" + value + "]"; break;
      default: break;
    }
    text += fmt::format("{} = {}\n", setting.key.substr(section.size() + 1), value);
  }
  return text;
}

void check_range(const char* flag, std::int64_t value, std::int64_t low, std::int64_t high) {
  SHERD_CHECK(value >= low && value <= high, "{}: expected {} to {}, got {}", flag, low, high,
              value);
}

double number_from_text(const std::string& text, const std::string& source) {
  double value = 0.0;
  SHERD_CHECK(parse_number(text, &value), "{}: expected a number, got '{}'", source, text);
  return value;
}

std::size_t parse_bytes(const std::string& text, const std::string& source) {
  if (text.empty()) return 0;
  static constexpr std::pair<const char*, double> kUnits[] = {
      {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}, {"KB", 1e3},
      {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12},    {"B", 1.0},      {"", 1.0}};
  for (const auto& [unit, factor] : kUnits) {
    if (!text.ends_with(unit)) continue;
    double value = 0.0;
    if (parse_number(std::string_view(text).substr(0, text.size() - std::string_view(unit).size()),
                     &value) &&
        value > 0.0 && value * factor < 0x1p62) {
      return static_cast<std::size_t>(value * factor);
    }
    break;
  }
  fail("{}: expected an amount of memory such as 6GiB or 512MiB, got '{}'", source, text);
}

AttentionKernels parse_attention(const std::string& name) {
  if (name == "auto") return AttentionKernels::automatic;
  if (name == "own") return AttentionKernels::own;
  SHERD_CHECK(name == "cudnn", "--attention: expected auto, own or cudnn, got '{}'", name);
  return AttentionKernels::cudnn;
}

ContextOptions context_options(const TrainSettings& settings) {
  check_range("--threads", settings.threads, 0, 1024);
  SHERD_CHECK(settings.seed >= 0, "--seed: expected a number from 0 on, got {}", settings.seed);
  ContextOptions options;
  options.device = device_from_name(settings.device);
  options.threads = static_cast<int>(settings.threads);
  options.attention = parse_attention(settings.attention);
  require_attention(options.attention, options.device);
  options.seed = static_cast<std::uint64_t>(settings.seed);
  options.memory_limit = parse_bytes(settings.memory_limit, "--memory-limit");
  return options;
}

ViTSettings model_settings(const TrainSettings& settings, std::int64_t channels,
                           std::int64_t height, std::int64_t width, std::int64_t classes) {
  ViTSettings model;
  model.image_height = height;
  model.image_width = width;
  model.channels = channels;
  model.classes = classes;
  model.patch = settings.patch;
  model.dim = settings.dim;
  model.depth = settings.depth;
  model.heads = settings.heads;
  model.head_dim = settings.head_dim;
  model.mlp_ratio = settings.mlp_ratio;
  model.activation = activation_from_name(settings.activation);
  model.qkv_bias = settings.qkv_bias;
  model.layer_norm_eps = settings.layer_norm_eps;
  SHERD_CHECK(settings.pooling == "cls" || settings.pooling == "mean",
              "unknown pooling '{}': expected cls or mean", settings.pooling);
  model.pooling = settings.pooling == "cls" ? Pooling::class_token : Pooling::mean;
  model.drop = settings.drop;
  model.drop_path = settings.drop_path;
  model.validate();
  return model;
}

LrSchedule lr_schedule(const TrainSettings& settings, std::int64_t steps_per_epoch,
                       std::int64_t total_steps) {
  LrSchedule schedule;
  schedule.base_lr = settings.lr;
  schedule.min_lr = settings.min_lr;
  schedule.decay = decay_from_name(settings.schedule);
  schedule.total_steps = total_steps;
  SHERD_CHECK(settings.warmup_epochs >= 0.0 && settings.warmup_epochs < 1e9,
              "--warmup-epochs: must be from 0 on, got {}", settings.warmup_epochs);
  SHERD_CHECK(settings.warmup_steps >= -1, "--warmup-steps: must be from 0 on, or -1, got {}",
              settings.warmup_steps);
  schedule.warmup_steps = settings.warmup_steps;
  if (settings.warmup_steps < 0) {
    schedule.warmup_steps =
        std::lround(settings.warmup_epochs * static_cast<double>(steps_per_epoch));
    // A run of one epoch or less decays in its second half.
    if (settings.warmup_epochs <= 1.0) {
      schedule.warmup_steps = std::min(schedule.warmup_steps, total_steps / 2);
    }
  }
  schedule.validate();
  return schedule;
}

}  // namespace sherd
