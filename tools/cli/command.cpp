// SPDX-License-Identifier: Apache-2.0
#include "command.h"

#include <sherd/runtime/io/file.h>
#include <sherd/tools/trainer/ranks.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>

namespace sherd::cli {

SettingFlags::SettingFlags(CLI::App* app, const std::vector<std::string>& what) {
  const TrainSettings defaults;
  for (const Setting& setting : setting_table()) {
    const auto named = [&](const std::string& name) {
      return std::ranges::find(what, name) != what.end();
    };
    if (!named(setting.section()) && !named(setting.key)) continue;
    const std::string value = value_text(defaults, setting);
    const std::string help =
        value.empty() ? setting.help : fmt::format("{} [{}]", setting.help, value);
    app->add_option_function<std::string>(
           setting.flag(),
           [flags = flags_, key = setting.key](const std::string& given) {
             flags->emplace_back(key, given);
           },
           help)
        ->type_name(setting.type())
        ->group("[" + setting.section() + "]")
        ->trigger_on_parse();
  }
}

TrainSettings SettingFlags::resolve(const std::optional<std::string>& toml_path) const {
  SHERD_CHECK(!gives("sharding.ranks") || !under_launcher(),
              "--ranks: makes threads of one process, but a launcher started several processes "
              "already; leave it out, or start sherd without the launcher");
  return resolve_over(toml_path ? read_toml_settings(*toml_path) : Assignments{});
}

TrainSettings SettingFlags::resolve_over(const Assignments& file) const {
  return resolve_settings(file, *flags_);
}

bool SettingFlags::gives(const std::string& key) const {
  return std::ranges::any_of(*flags_, [&](const auto& flag) { return flag.first == key; });
}

std::vector<std::string> SettingFlags::given() const {
  std::vector<std::string> keys;
  for (const auto& [key, value] : *flags_) keys.push_back(key);
  return keys;
}

std::string SettingFlags::value(const std::string& key) const {
  std::string last;
  for (const auto& [name, value] : *flags_) {
    if (name == key) last = value;
  }
  return last;
}

std::string SettingFlags::other_than(const std::vector<std::string>& keys) const {
  for (const auto& [key, value] : *flags_) {
    if (std::ranges::find(keys, key) != keys.end()) continue;
    return std::ranges::find(setting_table(), key, &Setting::key)->flag();
  }
  return {};
}

void SettingFlags::refuse(const std::string& key, const char* why) const {
  SHERD_CHECK(!gives(key), "{}: has no effect here, {}; leave it out",
              std::ranges::find(setting_table(), key, &Setting::key)->flag(), why);
}

ClaimedFile::ClaimedFile(std::string path) : path_(std::move(path)) {
  create_new_file(path_, "");
}

ClaimedFile::~ClaimedFile() {
  std::error_code ignored;
  if (std::filesystem::file_size(path_, ignored) == 0 && !ignored)
    std::filesystem::remove(path_, ignored);
}

void check_tolerance(const char* flag, const CLI::App& app, double value, bool may_be_zero) {
  const bool good = std::isfinite(value) && (may_be_zero ? value >= 0.0 : value > 0.0);
  SHERD_CHECK(app.count(flag) == 0 || good, "{}: expected a number {}, got {}", flag,
              may_be_zero ? "from 0 on" : "above 0", value);
}

void check_one_process(const char* command) {
  SHERD_CHECK(!under_launcher(),
              "{}: works in one process, but a launcher started several; start it without",
              command);
}

std::int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
}

ProgressLine::ProgressLine() : terminal_(isatty(STDOUT_FILENO) != 0) {}

void ProgressLine::show(const std::string& text) {
  if (!terminal_) return;
  const double now =
      std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  if (now - last_ < 0.1) return;
  last_ = now;
  shown_ = true;
  fmt::print("\r\033[K{}", text);
  std::fflush(stdout);
}

void ProgressLine::clear() {
  if (shown_) fmt::print("\r\033[K");
  shown_ = false;
  last_ = 0.0;
}

std::string bar(double fraction, int width) {
  const int full = std::clamp(static_cast<int>(fraction * width), 0, width);
  return "[" + std::string(static_cast<std::size_t>(full), '#') +
         std::string(static_cast<std::size_t>(width - full), '-') + "]";
}

}  // namespace sherd::cli
