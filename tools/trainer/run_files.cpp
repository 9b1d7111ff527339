// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/run_files.h>

#include <sherd/comm/sharding/options.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/file.h>

#include <ctime>
#include <filesystem>

namespace sherd {
namespace {

namespace fs = std::filesystem;

// Makes a folder of its own for a run that was given none; runs started in the same second get
// different ones.
std::string make_default_out(const TrainSettings& settings) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char stamp[32];
  std::strftime(stamp, sizeof stamp, "%Y%m%d-%H%M%S", &local);
  const std::string name = fmt::format("runs/{}-{}", settings.dataset, stamp);
  std::error_code error;
  fs::create_directories("runs", error);
  for (int i = 1; !error; ++i) {
    const std::string candidate = i == 1 ? name : fmt::format("{}-{}", name, i);
    if (fs::create_directory(candidate, error)) return candidate;
  }
  fail("cannot make the folder {}: {}; choose one with --out", name, error.message());
}

bool same_path(const std::string& a, const std::string& b) {
  return fs::weakly_canonical(a) == fs::weakly_canonical(b);
}

}  // namespace

void RunFiles::choose() {
  if (settings_.out.empty()) {
    out_ = make_default_out(settings_);
  } else {
    out_ = settings_.out;
    std::error_code error;
    fs::create_directories(out_, error);
    SHERD_CHECK(!error, "--out {}: cannot make the folder: {}", out_, error.message());
  }
  SHERD_CHECK(resume_.same_run || find_checkpoints(path("checkpoints")).empty(),
              "--out {}: there are checkpoints of a run already; go on with it by --resume auto, "
              "or choose another folder; nothing was changed",
              out_);
}

void RunFiles::share() {
  auto size = static_cast<std::int64_t>(out_.size());
  world_.broadcast(&size, 1, DType::i64, 0, "the length of the folder's name");
  out_.resize(static_cast<std::size_t>(size));
  world_.broadcast(out_.data(), size, DType::u8, 0, "the folder's name");
}

std::string RunFiles::path(std::string_view name) const {
  return (fs::path(out_) / name).string();
}

std::string RunFiles::config() const {
  TrainSettings resolved = settings_;
  for (std::string* path : {&resolved.data_dir, &resolved.weights}) {
    if (!path->empty()) *path = fs::absolute(*path).string();
  }
  for (std::string* to : {&resolved.offload_optimizer, &resolved.offload_parameters}) {
    const OffloadTo parsed = OffloadTo::parse(*to, "--offload");
    if (parsed.directory.empty()) continue;
    *to = "nvme:" + fs::absolute(parsed.directory).string();
  }
  resolved.ranks = world_.size();  // a launcher's too
  return settings_to_toml(resolved);
}

void RunFiles::make(const std::string& path, std::string_view text) {
  create_new_file(path, text);
  add(path);
}

void RunFiles::claim(std::int64_t bytes, const std::string& what) {
  if (world_.rank() != 0) return;
  claim_out(bytes, what);
  if (!settings_.trace.empty()) make(settings_.trace, "");
}

void RunFiles::claim_out(std::int64_t bytes, const std::string& what) {
  SHERD_CHECK(
      !resume_.same_run || !resume_.checkpoint.empty() || !fs::exists(weights_path()),
      "--resume auto: '{}' is there, but no checkpoint to go on from; choose another folder, "
      "or remove that one; nothing was changed",
      weights_path());
  for (const std::string& path : {log_path(), weights_path()}) {
    SHERD_CHECK(resume_.same_run || !fs::exists(path),
                "--out: '{}' is there already; choose another folder, or go on with that run by "
                "--resume auto; nothing was changed",
                path);
    SHERD_CHECK(settings_.trace.empty() || !same_path(settings_.trace, path),
                "--trace {}: that is where the run's own file goes; choose another name",
                settings_.trace);
  }
  // The weights are written at the very end, when it would be late to find the disk full.
  std::error_code error;
  const fs::space_info space = fs::space(out_, error);
  SHERD_CHECK(error || space.available >= static_cast<std::uintmax_t>(bytes),
              "--out {}: {} free, but {} need {}; free some space{} or choose another folder", out_,
              format_bytes(static_cast<std::int64_t>(space.available)), what, format_bytes(bytes),
              settings_.save_every > 0 ? ", lower --keep" : "");
  if (resume_.same_run) remove_left_over();
  const bool there = fs::exists(config_path());
  const bool ours = there ? resume_.same_run : settings_.save_every > 0;
  if (!ours) return make(config_path(), config());
  // Whole or not at all: --resume auto reads it where there is no checkpoint yet.
  write_file_atomically(config_path(), config());
  if (!there) add(config_path());
}

// What a killed run was writing.
void RunFiles::remove_left_over() const {
  for (const auto& entry : fs::directory_iterator(out_)) {
    const std::string name = entry.path().filename().string();
    std::error_code ignored;
    for (const std::string& of : {config_path(), weights_path()}) {
      if (name.starts_with(fs::path(of).filename().string() + ".tmp-")) {
        fs::remove(entry.path(), ignored);
      }
    }
  }
}

bool RunFiles::log_goes_on() const {
  return resume_.same_run && fs::exists(log_path());
}

void RunFiles::remove() {
  for (const std::string& path : claimed_) {
    std::error_code ignored;
    fs::remove(path, ignored);
  }
}

}  // namespace sherd
