// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/checkpoint/store.h>

#include <sherd/comm/agreement.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/file.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <functional>
#include <optional>

namespace sherd {
namespace {

namespace fs = std::filesystem;

std::string name_of_step(std::int64_t step) {
  return fmt::format("step-{:08}", step);
}

std::optional<std::int64_t> step_of_name(const std::string& name) {
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix)) return {};
  std::int64_t step = 0;
  const char* end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  if (error != std::errc() || rest != end || step < 0) return {};
  return step;
}

std::string message_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

// Everybody's text, on rank 0.
std::vector<std::string> gather_texts(Communicator& world, const std::string& text) {
  const auto size = static_cast<std::int64_t>(text.size());
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(world.size()));
  world.all_gather(&size, sizes.data(), 1, DType::i64, "checkpoint: sizes of tables");
  std::vector<std::string> all;
  if (world.rank() != 0) {
    world.send(text.data(), size, DType::u8, 0, "checkpoint: table");
    return all;
  }
  all.push_back(text);
  for (int r = 1; r < world.size(); ++r) {
    all.emplace_back(static_cast<std::size_t>(sizes[static_cast<std::size_t>(r)]), '\0');
    world.recv(all.back().data(), std::ssize(all.back()), DType::u8, r, "checkpoint: table");
  }
  return all;
}

}  // namespace

std::vector<FoundCheckpoint> find_checkpoints(const std::string& directory) {
  std::vector<FoundCheckpoint> found;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const std::optional<std::int64_t> step = step_of_name(it->path().filename().string());
    std::error_code ignored;
    if (step && fs::exists(it->path() / "index.json", ignored)) {
      found.push_back({*step, it->path().string()});
    }
  }
  std::ranges::sort(found, {}, &FoundCheckpoint::step);
  return found;
}

std::string resolve_checkpoint(const std::string& path) {
  std::error_code error;
  SHERD_CHECK(fs::exists(path, error), "there is no checkpoint '{}'", path);
  if (fs::exists(fs::path(path) / "index.json", error)) return path;
  for (const char* below : {"", "checkpoints"}) {
    const std::vector<FoundCheckpoint> found = find_checkpoints((fs::path(path) / below).string());
    if (!found.empty()) return found.back().path;
  }
  fail(
      "'{}' is no checkpoint and has none: expected a directory with an index.json, such as "
      "RUN/checkpoints/step-00001000, or RUN for the newest of a run",
      path);
}

CheckpointStore::CheckpointStore(Communicator& world, std::string directory, int keep)
    : world_(world), directory_(std::move(directory)), keep_(keep) {
  const auto prepare = [&] {
    make_directories(directory_);
    lock_ = std::make_unique<DirectoryLock>(directory_, "written by a training run");
    std::vector<fs::path> left;
    for (const auto& entry : fs::directory_iterator(directory_)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with(".step-") || name.ends_with(".tmp")) left.push_back(entry.path());
    }
    for (const fs::path& path : left) remove_tree(path.string());
  };
  agree_on_errors(world_, world_.rank() == 0 ? message_of(prepare) : std::string());
}

CheckpointStore::~CheckpointStore() = default;

void CheckpointStore::tidy_up(std::int64_t best_step) {
  const auto work = [&] {
    const std::vector<FoundCheckpoint> found = find_checkpoints(directory_);
    if (found.empty()) return;
    const bool there = std::ranges::find(found, best_step, &FoundCheckpoint::step) != found.end();
    point_links(found.back().step, there ? best_step : -1);
    remove_old();
  };
  agree_on_errors(world_, world_.rank() == 0 ? message_of(work) : std::string());
}

std::string CheckpointStore::path(const std::string& name) const {
  return (fs::path(directory_) / name).string();
}

std::string CheckpointStore::begin(std::int64_t step) {
  step_ = step;
  partial_ = path("." + name_of_step(step) + ".partial");
  const auto make = [&] {
    remove_tree(partial_);
    make_new_directory(partial_);
  };
  agree_on_errors(world_, world_.rank() == 0 ? message_of(make) : std::string());
  return partial_;
}

std::string CheckpointStore::finish(const std::string& table, const std::string& failure,
                                    const Content& content) {
  const auto on_first = [&](const std::function<void()>& work) {
    return world_.rank() == 0 ? message_of(work) : std::string();
  };
  const auto agree = [&](const std::string& error) {
    agree_on_errors(world_, error.empty()
                                ? error
                                : fmt::format("cannot save a checkpoint of step {}: {}; the "
                                              "checkpoints that were there are untouched",
                                              step_, error));
  };
  try {
    agree(failure);
    const std::vector<std::string> tables = gather_texts(world_, table);
    agree(on_first([&] { publish(tables, content); }));
  } catch (...) {
    abandon();
    throw;
  }
  const std::string error = on_first([&] {
    point_links(step_, content.best ? step_ : -1);
    remove_old();
  });
  agree_on_errors(world_, error.empty() ? error
                                        : fmt::format("the checkpoint of step {} is saved, but {}",
                                                      step_, error));
  return path(name_of_step(step_));
}

// See Note [A checkpoint appears].
void CheckpointStore::publish(const std::vector<std::string>& tables, const Content& content) {
  CheckpointIndex index = merge_checkpoint_tables(tables);
  index.producer = content.producer;
  index.step = step_;
  index.run = content.run;
  index.config_checksum = checkpoint_checksum(content.config);
  const auto in_partial = [&](const char* name) { return (fs::path(partial_) / name).string(); };
  constexpr auto kWithin = AtomicFile::Appears::within_directory;
  write_file_atomically(in_partial("config.toml"), content.config, kWithin);
  write_file_atomically(in_partial("index.json"), to_json(index), kWithin);
  sync_directory(partial_);
  rename_directory(partial_, path(name_of_step(step_)));
}

// `best` -1: as it was.
void CheckpointStore::point_links(std::int64_t newest, std::int64_t best) {
  point_link(path("last"), name_of_step(newest));
  if (best >= 0) point_link(path("best"), name_of_step(best));
}

void CheckpointStore::remove_old() {
  std::error_code error;
  const std::string best = fs::read_symlink(path("best"), error).string();
  const std::vector<FoundCheckpoint> all = find_checkpoints(directory_);
  // The one just written stays even where a run that was taken back has later ones: those are of
  // steps that this run will write again.
  std::size_t surplus = all.size() - std::min(all.size(), static_cast<std::size_t>(keep_));
  for (const FoundCheckpoint& checkpoint : all) {
    if (surplus == 0) break;
    const std::string name = fs::path(checkpoint.path).filename().string();
    if (checkpoint.step == step_) continue;
    --surplus;
    if (name == best) continue;
    remove_directory(checkpoint.path, path("." + name + ".removed"));
  }
}

void CheckpointStore::abandon() {
  std::error_code ignored;
  if (world_.rank() == 0 && !partial_.empty()) fs::remove_all(partial_, ignored);
}

}  // namespace sherd
