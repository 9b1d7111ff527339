// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/settings.h>

#include <sherd/runtime/suggest.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <sstream>
#include <toml++/toml.h>

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

const Setting& find_setting(const std::string& key, const std::string& source) {
  const auto& table = setting_table();
  const auto found = std::ranges::find(table, key, &Setting::key);
  SHERD_CHECK(found != table.end(), "{}: unknown key '{}'{}", source, key,
              did_you_mean(key, known_keys()));
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

std::string toml_text(const toml::node& node, const std::string& path, const std::string& key) {
  if (const auto text = node.value_exact<std::string>()) return *text;
  if (const auto flag = node.value_exact<bool>()) return *flag ? "yes" : "no";
  if (const auto whole = node.value_exact<std::int64_t>()) return std::to_string(*whole);
  if (const auto number = node.value_exact<double>()) return fmt::format("{}", *number);
  if (const toml::array* list = node.as_array()) {
    std::string text;
    for (const toml::node& item : *list) {
      if (!text.empty()) text += ",";
      text += toml_text(item, path, key);
    }
    return text;
  }
  fail("{}: '{}' has a value of a kind that no setting takes", path, key);
}

std::string toml_quoted(const std::string& text) {
  std::stringstream out;
  out << toml::value<std::string>(text);
  return out.str();
}

}  // namespace

const std::vector<Setting>& setting_table() {
  static const std::vector<Setting> table{
      {"model.preset", &T::preset, "a timm model name, see `sherd inspect model`; sets the rest of [model]"},
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
      {"model.weights", &T::weights, "start from this safetensors file (timm's keys)"},
      {"data.dataset", &T::dataset, "fashion-mnist, mnist or synthetic"},
      {"data.data_dir", &T::data_dir, "folder of the IDX files; empty: where Debian's package puts them"},
      {"data.image_size", &T::image_size, "channels x height x width of synthetic images"},
      {"data.images", &T::images, "how many synthetic images"},
      {"data.classes", &T::classes, "classes of synthetic images"},
      {"data.mean", &T::mean, "subtracted from pixels in [0, 1], one a channel; empty: the data set's"},
      {"data.stddev", &T::stddev, "divides them afterwards, one a channel; empty: the data set's"},
      {"data.shuffle", &T::shuffle, "a new order each epoch, from the seed; no: file order"},
      {"data.workers", &T::workers, "threads that prepare batches; 0: none. Never changes a result"},
      {"optimizer.optimizer", &T::optimizer, "adamw or sgd"},
      {"optimizer.lr", &T::lr, "learning rate after the warm-up"},
      {"optimizer.weight_decay", &T::weight_decay,
       "times lr; not on biases, norms, class token and position embedding"},
      {"optimizer.beta1", &T::beta1, "AdamW: decay of the gradient average"},
      {"optimizer.beta2", &T::beta2, "AdamW: decay of the squared gradient average"},
      {"optimizer.eps", &T::eps, "AdamW: added to the denominator"},
      {"optimizer.momentum", &T::momentum, "SGD: momentum"},
      {"optimizer.nesterov", &T::nesterov, "SGD: Nesterov's momentum"},
      {"optimizer.clip_grad_norm", &T::clip_grad_norm, "largest global gradient norm; 0: no clipping"},
      {"optimizer.label_smoothing", &T::label_smoothing, "of the cross-entropy targets"},
      {"schedule.schedule", &T::schedule, "cosine, linear or constant"},
      {"schedule.min_lr", &T::min_lr, "learning rate at the end"},
      {"schedule.warmup_epochs", &T::warmup_epochs, "length of the linear warm-up"},
      {"schedule.warmup_steps", &T::warmup_steps, "the same in steps; -1: by warmup_epochs"},
      {"run.epochs", &T::epochs, "passes over the training images"},
      {"run.max_steps", &T::max_steps, "stop (and end the schedule) after this many steps; 0: by epochs"},
      {"run.batch_size", &T::batch_size, "samples of one optimizer step"},
      {"run.micro_batch", &T::micro_batch, "samples of one forward pass; 0: the whole batch"},
      {"run.device", &T::device, "cpu"},
      {"run.dtype", &T::dtype, "f32 or f64"},
      {"run.memory_limit", &T::memory_limit, "most memory to reserve, such as 6GiB; empty: no limit"},
      {"run.threads", &T::threads, "CPU threads of the kernels; 0: all that this process may use"},
      {"run.seed", &T::seed, "of initial weights, data order and dropout"},
      {"run.out", &T::out, "folder of the results; empty: runs/DATASET-TIME"},
      {"run.trace", &T::trace, "write a Chrome trace of the first steps to this file"},
      {"run.log_every", &T::log_every, "steps between lines of the log"},
      {"run.eval_every", &T::eval_every, "epochs between evaluations on the test images; 0: at the end"},
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
          const bool yes = value == "yes" || value == "true", no = value == "no" || value == "false";
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
          for (const double item : value) text += fmt::format("{}{}", text.empty() ? "" : ",", item);
          return text;
        } else {
          return fmt::format("{}", value);
        }
      },
      setting.field);
}

Assignments read_toml_settings(const std::string& path) {
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
                did_you_mean(section_name, known_keys()));
    for (const auto& [name, value] : *keys) {
      const std::string key = section_name + "." + std::string(name.str());
      find_setting(key, path);
      assignments.emplace_back(key, toml_text(value, path, key));
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
  return settings;
}

std::string settings_to_toml(const TrainSettings& settings) {
  std::string text = "# Every setting of this run. `sherd train FILE` repeats it.\n", section;
  for (const Setting& setting : setting_table()) {
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

std::size_t parse_bytes(const std::string& text) {
  if (text.empty()) return 0;
  static constexpr std::pair<const char*, double> kUnits[] = {
      {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40},
      {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12},
      {"B", 1.0},      {"", 1.0}};
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
  fail("expected an amount of memory such as 6GiB or 512MiB, got '{}'", text);
}

ContextOptions context_options(const TrainSettings& settings) {
  SHERD_CHECK(settings.threads >= 0 && settings.threads <= 4096,
              "--threads: expected 0 to 4096, got {}", settings.threads);
  SHERD_CHECK(settings.seed >= 0, "--seed: expected a number from 0 on, got {}", settings.seed);
  ContextOptions options;
  options.device = device_from_name(settings.device);
  options.threads = static_cast<int>(settings.threads);
  options.seed = static_cast<std::uint64_t>(settings.seed);
  options.memory_limit = parse_bytes(settings.memory_limit);
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
              "--warmup-epochs: must not be negative, got {}", settings.warmup_epochs);
  // A short run keeps at least half of its steps for the decay.
  schedule.warmup_steps =
      settings.warmup_steps >= 0
          ? settings.warmup_steps
          : std::min(total_steps / 2,
                     std::lround(settings.warmup_epochs * static_cast<double>(steps_per_epoch)));
  schedule.validate();
  return schedule;
}

}  // namespace sherd
