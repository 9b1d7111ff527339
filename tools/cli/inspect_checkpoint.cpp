// SPDX-License-Identifier: Apache-2.0
// `sherd inspect checkpoint`.
#include "command.h"

#include <sherd/comm/checkpoint/store.h>
#include <sherd/runtime/ledger.h>
#include <sherd/tools/trainer/checkpoints.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>

namespace sherd::cli {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

struct Options {
  std::string path;
  bool tensors = false, verify = false, json = false;
};

std::int64_t bytes_of(const CheckpointTensor& tensor) {
  return tensor.shape.numel() * static_cast<std::int64_t>(size_of(tensor.dtype));
}

// The parameters, or one of the optimizer's states of them.
struct Kind {
  std::int64_t tensors = 0, elements = 0, bytes = 0;
  std::map<std::string, std::int64_t> dtypes;  // elements of each

  void add(const CheckpointTensor& tensor) {
    ++tensors;
    elements += tensor.shape.numel();
    bytes += bytes_of(tensor);
    dtypes[std::string(name_of(tensor.dtype))] += tensor.shape.numel();
  }
  // "fp32", or "fp32, fp64" where they are mixed
  std::string dtype_list() const {
    std::string all;
    for (const auto& [name, count] : dtypes) all += (all.empty() ? "" : ", ") + name;
    return all;
  }
  Json to_json() const {
    return {{"tensors", tensors}, {"elements", elements}, {"bytes", bytes}, {"dtypes", dtypes}};
  }
};

struct Summary {
  Kind parameters;
  std::map<std::string, Kind> states;
  std::uint64_t file_bytes = 0;

  explicit Summary(const CheckpointIndex& index) {
    for (const CheckpointTensor& tensor : index.tensors) {
      (tensor.state.empty() ? parameters : states[tensor.state]).add(tensor);
    }
    for (const CheckpointFile& file : index.files) file_bytes += file.bytes;
  }
};

// Seconds it took. What is damaged is an error.
double verify(const CheckpointReader& checkpoint, bool quiet) {
  ProgressLine line;
  const auto start = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  const auto show = [&](std::uint64_t done, std::uint64_t all) {
    if (quiet) return;
    line.show(fmt::format("verifying {} {} of {}, {}/s",
                          bar(static_cast<double>(done) / static_cast<double>(all), 20),
                          format_bytes(static_cast<std::int64_t>(done)),
                          format_bytes(static_cast<std::int64_t>(all)),
                          format_bytes(static_cast<std::int64_t>(static_cast<double>(done) /
                                                                 std::max(seconds(), 1e-3)))));
  };
  try {
    checkpoint.verify(show);
  } catch (...) {
    line.clear();
    throw;
  }
  line.clear();
  return seconds();
}

void print_json(const CheckpointReader& checkpoint, const Options& options, double seconds) {
  const CheckpointIndex& index = checkpoint.index();
  const Summary summary(index);
  Json value{{"path", checkpoint.directory()},
             {"producer", index.producer},
             {"step", index.step},
             {"run", Json::parse(index.run)},
             {"parameters", summary.parameters.to_json()}};
  Json& states = value["optimizer_states"] = Json::object();
  for (const auto& [name, kind] : summary.states) states[name] = kind.to_json();
  Json& files = value["files"] = Json::array();
  for (const CheckpointFile& file : index.files) {
    files.push_back({{"name", file.name}, {"bytes", file.bytes}});
  }
  value["file_bytes"] = summary.file_bytes;
  value["verified"] = options.verify;
  if (options.verify) value["verify_seconds"] = seconds;
  if (options.tensors) {
    Json& tensors = value["tensors"] = Json::array();
    for (const CheckpointTensor& tensor : index.tensors) {
      Json pieces = Json::array();
      for (const CheckpointPiece& piece : tensor.pieces) {
        pieces.push_back({{"file", index.files[piece.file].name},
                          {"first", piece.first},
                          {"numel", piece.numel},
                          {"offset", piece.offset}});
      }
      tensors.push_back({{"name", tensor.key()},
                         {"dtype", name_of(tensor.dtype)},
                         {"shape", std::vector<std::int64_t>(tensor.shape.dims().begin(),
                                                             tensor.shape.dims().end())},
                         {"pieces", pieces}});
    }
  }
  fmt::print("{}\n", value.dump(-1, ' ', false, Json::error_handler_t::replace));
}

void print_tensors(const CheckpointIndex& index) {
  std::size_t width = 6;
  for (const CheckpointTensor& tensor : index.tensors) width = std::max(width, tensor.key().size());
  fmt::print("{:<{}}  {:<5} {:<20} {:>12} {:>7}\n", "tensor", width, "dtype", "shape", "elements",
             "pieces");
  for (const CheckpointTensor& tensor : index.tensors) {
    fmt::print("{:<{}}  {:<5} {:<20} {:>12} {:>7}\n", tensor.key(), width, name_of(tensor.dtype),
               tensor.shape.to_string(), group_digits(tensor.shape.numel()), tensor.pieces.size());
  }
  fmt::print("\n");
}

// One of a program other than `sherd train` has no run that goes on.
void print_run(const CheckpointReader& checkpoint) {
  const Json run = Json::parse(checkpoint.index().run);
  if (!run.is_object() || !run.contains("samples")) {
    if (!run.empty()) fmt::print("run             {}\n", run.dump());
    return;
  }
  const RunProgress at = progress_of(checkpoint);
  fmt::print("position        epoch {}, {} of its samples used; data {}\n", at.epoch + 1,
             group_digits(at.samples), at.dataset);
  fmt::print("written by      {} rank{} ({}), {} thread{} each; batch size {}, seed {}\n", at.ranks,
             at.ranks == 1 ? "" : "s", at.sharding, at.threads, at.threads == 1 ? "" : "s",
             at.batch_size, at.seed);
  if (at.step.loss_scale.scale > 0.0) {
    fmt::print("loss scale      {} ({} steps skipped)\n", at.step.loss_scale.scale, at.skipped);
  }
  if (at.best_accuracy >= 0.0) {
    fmt::print("best accuracy   {:.2f}% so far\n", 100.0 * at.best_accuracy);
  }
}

void print_text(const CheckpointReader& checkpoint, const Options& options, double seconds) {
  const CheckpointIndex& index = checkpoint.index();
  const Summary summary(index);
  if (options.tensors) print_tensors(index);
  fmt::print("checkpoint      {}\nproducer        {}\nstep            {}\n", checkpoint.directory(),
             index.producer, group_digits(index.step));
  print_run(checkpoint);
  const auto print_kind = [](const std::string& name, const Kind& kind) {
    fmt::print("{:<15} {} elements in {} tensors, {} ({})\n", name, group_digits(kind.elements),
               kind.tensors, format_bytes(kind.bytes), kind.dtype_list());
  };
  print_kind("parameters", summary.parameters);
  for (const auto& [name, kind] : summary.states) print_kind(name, kind);
  for (const CheckpointFile& file : index.files) {
    fmt::print("file            {}  {} bytes\n", file.name,
               group_digits(static_cast<std::int64_t>(file.bytes)));
  }
  const std::string all = format_bytes(static_cast<std::int64_t>(summary.file_bytes));
  if (options.verify) {
    fmt::print("whole           all {} have their checksums ({}/s)\n", all,
               format_bytes(static_cast<std::int64_t>(static_cast<double>(summary.file_bytes) /
                                                      std::max(seconds, 1e-6))));
  } else {
    fmt::print("whole           all files are there with their sizes, {}; --verify reads them\n",
               all);
  }
}

int inspect(const Options& options) {
  SHERD_CHECK(!options.path.empty(),
              "inspect checkpoint: give a checkpoint, a link to one, or the folder of a run");
  const CheckpointReader checkpoint(resolve_checkpoint(options.path));
  const double seconds = options.verify ? verify(checkpoint, options.json) : 0.0;
  (options.json ? print_json : print_text)(checkpoint, options, seconds);
  return 0;
}

}  // namespace

Command add_inspect_checkpoint(CLI::App& inspect_app) {
  CLI::App* app = inspect_app.add_subcommand(
      "checkpoint",
      "What a checkpoint holds, of which run, and whether it is whole.\n\n"
      "  sherd inspect checkpoint runs/long              the newest of a run\n"
      "  sherd inspect checkpoint runs/long/checkpoints/best --verify\n");
  auto options = std::make_shared<Options>();
  app->add_option("path", options->path, "a checkpoint, a link to one, or a run's folder")
      ->type_name("PATH");
  app->add_flag("--tensors", options->tensors, "list every tensor")->disable_flag_override();
  app->add_flag("--verify", options->verify, "read everything and compare it with its checksums")
      ->disable_flag_override();
  app->add_flag("--json", options->json, "print one JSON object")->disable_flag_override();
  return {app, [options] { return inspect(*options); }};
}

}  // namespace sherd::cli
