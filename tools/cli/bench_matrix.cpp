// SPDX-License-Identifier: Apache-2.0
#include "bench_matrix.h"

#include "bench_matrix_options.h"
#include "child_process.h"
#include "command.h"
#include "matrix_report.h"

#include <sherd/models/vit.h>
#include <sherd/runtime/cuda/device.h>
#include <sherd/runtime/io/directory.h>
#include <sherd/runtime/io/file.h>
#include <sherd/tools/trainer/setup.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

// Note [A cell is a process]
// --------------------------
// Every cell is measured by a process of its own: `sherd bench step --json`, or
// tools/peers/cell.py. So a cell begins with the same empty memory whatever ran before it, and one
// that dies, hangs or is ended by the system for want of memory is one row with a reason, not the
// end of the matrix. A row is appended to results.jsonl when its process has ended; a matrix that
// was stopped goes on with what is missing there. The first line of that file has what all rows
// depend on, and a matrix with other settings, on another machine or by another build does not go
// on with it.
//
// Peers start from our weights, images, labels and learning rates, which are written once for each
// model (bench step --write-inputs) and removed when its cells are done: so the losses of all
// engines can be compared, step by step.

namespace sherd::cli {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr int kNotInstalled = 3;  // cell.py's exit status

std::string this_program() {
  return std::filesystem::read_symlink("/proc/self/exe").string();
}

std::string field_of(const char* file, const std::string& key) {
  std::ifstream stream(file);
  for (std::string line; std::getline(stream, line);) {
    if (line.starts_with(key) && line.find(':') != std::string::npos)
      return line.substr(line.find_first_not_of(" \t", line.find(':') + 1));
  }
  return "unknown";
}

std::int64_t memory_bytes() {
  return static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

// What all rows depend on.
ordered_json settings_of(const MatrixOptions& options, const ordered_json& versions) {
  ordered_json machine{{"processor", field_of("/proc/cpuinfo", "model name")},
                       {"processors", std::thread::hardware_concurrency()},
                       {"memory", memory_bytes()}};
  if (options.device == "cuda" && cuda::device_count() > 0) machine["gpu"] = cuda::device_name(0);
  return {{"sherd", version()},
          {"build", build_description()},
          {"machine", machine},
          {"device", options.device},
          {"threads", options.threads},
          {"steps", options.steps},
          {"warmup", options.warmup},
          {"classes", options.classes},
          {"image_size", options.image_size},
          {"product", options.product},
          {"peers", versions}};
}

// In the place of an earlier one of the same cell and round, which could not be started.
void put(std::vector<CellRun>& rows, CellRun row) {
  std::erase_if(rows, [&](const CellRun& other) {
    return other.cell == row.cell && other.round == row.round;
  });
  rows.push_back(std::move(row));
}

// Rows of a matrix that was stopped; empty where there is none.
std::vector<CellRun> rows_so_far(const std::string& path, const ordered_json& settings) {
  std::vector<CellRun> rows;
  std::ifstream file(path);
  std::size_t number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    const json row = json::parse(line, nullptr, false);
    if (row.is_discarded()) {
      // The last line of a run that was killed; the row is measured again.
      SHERD_CHECK(file.peek() == std::ifstream::traits_type::eof() || number > 1,
                  "{}: line {} is no JSON; give another --out, or --resume no", path, number);
      continue;
    }
    if (number > 1) {
      put(rows, run_from_json(row));
      continue;
    }
    SHERD_CHECK(row.contains("settings"),
                "{}: is no result of a matrix; give another --out, or --resume no", path);
    for (const auto& [key, value] : settings.items()) {
      // Peers may be added later; versions must stay.
      if (key == "peers") {
        for (const auto& [peer, version] : value.items()) {
          const json before = row["settings"][key].value(peer, json(version));
          SHERD_CHECK(before == json(version),
                      "{}: holds rows by {} {}, and here is {}; give another --out, or --resume no",
                      path, peer, before.dump(), version.dump());
        }
        continue;
      }
      const json before = row["settings"].value(key, json());
      SHERD_CHECK(before == json(value),
                  "{}: holds rows of a matrix with {} {}, and this one has {}; give another --out, "
                  "or --resume no",
                  path, key, before.dump(), value.dump());
    }
  }
  return rows;
}

// About how long a cell takes beside others of its engine: products of a step.
double weight_of(const Cell& cell) {
  const ViTSettings model = vit_preset(cell.model);
  return static_cast<double>(cell.micro_batch * cell.ranks * model.depth * model.dim * model.dim *
                             model.tokens());
}

// How long cells take, by those that were measured.
class Estimate {
 public:
  void add(const Cell& cell, double seconds) { seen_.emplace_back(cell, seconds); }

  // By cells of the same engine and size where there are any, else by others of that size, else by
  // all, in proportion to their products.
  double seconds(const Cell& cell) const {
    double sums[3] = {}, counts[3] = {};
    for (const auto& [other, seconds] : seen_) {
      const bool size = other.model == cell.model && other.micro_batch == cell.micro_batch;
      const int kind = !size ? 2 : other.engine == cell.engine ? 0 : 1;
      sums[kind] += seconds;
      counts[kind] += kind == 2 ? weight_of(other) / weight_of(cell) : 1.0;
    }
    for (int kind = 0; kind < 3; ++kind) {
      if (counts[kind] > 0.0) return sums[kind] / counts[kind];
    }
    return 0.0;
  }

 private:
  std::vector<std::pair<Cell, double>> seen_;
};

std::string last_line(const std::string& path) {
  std::ifstream file(path);
  std::string last;
  for (std::string line; std::getline(file, line);) {
    if (line.find_first_not_of(" \t\r") != std::string::npos) last = line;
  }
  return last.substr(0, 600);
}

std::string describe_seconds(double seconds) {
  if (seconds < 90.0) return fmt::format("{:.0f} s", seconds);
  if (seconds < 5400.0) return fmt::format("{:.0f} min", seconds / 60.0);
  return fmt::format("{:.1f} h", seconds / 3600.0);
}

// Measures what is missing.
class Matrix {
 public:
  Matrix(MatrixReport report, std::vector<Cell> cells, double timeout, bool resume)
      : report_(std::move(report)), cells_(std::move(cells)), timeout_(timeout) {
    const std::string& out = report_.options.out;
    const std::string path = out + "/results.jsonl";
    const bool there = std::filesystem::exists(out) && !std::filesystem::is_empty(out);
    SHERD_CHECK(!there || std::filesystem::exists(path),
                "--out {}: is not empty and holds no matrix; give another folder", out);
    make_directories(out + "/logs");
    lock_ = std::make_unique<DirectoryLock>(out, "written by a benchmark matrix");
    if (there && resume) rows_ = rows_so_far(path, report_.settings);
    remove_tree(out + "/inputs");
    log_ = std::make_unique<JsonLinesLog>(
        path, rows_.empty() ? JsonLinesLog::Mode::truncate : JsonLinesLog::Mode::append);
    if (rows_.empty()) log_->write(ordered_json{{"settings", report_.settings}}.dump());
  }

  // Returns the exit status.
  int run() {
    const InterruptGuard guard;
    for (const Cell& cell : cells_) {
      for (std::int64_t round = 0; round < report_.options.rounds; ++round) {
        if (!has(cell, round)) ++left_;
      }
    }
    total_ = static_cast<std::int64_t>(cells_.size()) * report_.options.rounds;
    if (left_ < total_)
      fmt::print("{} of {} are there already, from {}\n", total_ - left_, total_, log_->path());
    for (std::size_t begin = 0, end = 0; begin < cells_.size(); begin = end) {
      while (end < cells_.size() && cells_[end].same_place(cells_[begin])) ++end;
      if (!run_place(begin, end)) break;
    }
    remove_tree(report_.options.out + "/inputs");
    write_reports();
    print_end();
    return InterruptGuard::interrupted() ? 130 : 0;
  }

 private:
  bool has(const Cell& cell, std::int64_t round) const {
    const std::string name = cell.name();
    return std::ranges::any_of(rows_, [&](const CellRun& row) {
      return row.cell == name && row.round == round && row.status != "unavailable";
    });
  }

  // Engines take turns, round after round. False: the matrix is to end.
  bool run_place(std::size_t begin, std::size_t end) {
    bool measured = false;
    for (std::int64_t round = 0; round < report_.options.rounds; ++round) {
      for (std::size_t i = begin; i < end; ++i) {
        if (InterruptGuard::interrupted()) return false;
        if (has(cells_[i], round)) continue;
        const CellRun row = measure(cells_[i], round);
        if (InterruptGuard::interrupted()) return false;
        put(rows_, row);
        log_->write(to_json(row).dump());
        print_row(cells_[i], row);
        measured = true;
      }
    }
    if (measured) write_reports();  // to look at while the rest runs
    return true;
  }

  CellRun measure(const Cell& cell, std::int64_t round) {
    const std::string inputs = report_.options.out + "/inputs/" + cell.model;
    CellRun row{cell.name(), round, "failed", {}, 0.0, nullptr};
    if (cell.engine != "sherd" && !std::filesystem::exists(inputs)) {
      remove_tree(report_.options.out + "/inputs");  // of the model before
      ordered_json ignored;
      row.reason = start(inputs_command(cell.model, report_.options, program_, inputs),
                         "inputs-" + cell.model, row, ignored);
      if (!row.reason.empty()) {
        row.reason = "the inputs could not be written: " + row.reason;
        return row;
      }
    }
    const std::string name = fmt::format("{}-{}", cell.name(), round);
    ordered_json result;
    row.reason = start(command_of(cell, report_.options, program_, inputs), name, row, result);
    if (!row.reason.empty()) return row;
    if (!result.is_object() || !result.contains("seconds_per_step")) {
      row.reason = "it printed no result";
      return row;
    }
    row.status = "ok";
    row.result = result;
    return row;
  }

  // Runs it; sets what the row has of it. Returns why it failed.
  std::string start(const std::vector<std::string>& command, const std::string& name, CellRun& row,
                    ordered_json& result) {
    const std::string base = report_.options.out + "/logs/" + name;
    const auto since = std::chrono::steady_clock::now();
    ProcessEnd end;
    const auto waiting = [&] {
      const std::chrono::duration<double> now = std::chrono::steady_clock::now() - since;
      line_.show(fmt::format("{} {} of {}  {}  {:.0f} s", bar(done_share(), 20), total_ - left_ + 1,
                             total_, name, now.count()));
      return InterruptGuard::interrupted();
    };
    try {
      end = run_process(command, base + ".out", base + ".err", timeout_, waiting);
    } catch (const Error& error) {
      row.status = "unavailable";  // it was not even started: the next time it may be
      return error.what();
    }
    line_.clear();
    row.seconds += end.seconds;
    const std::string said = last_line(base + ".err");
    if (end.timed_out) return fmt::format("it ran longer than --timeout {} s", timeout_);
    if (end.status == kNotInstalled && row.cell.find("-sherd") == std::string::npos)
      row.status = "unavailable";
    if (end.signal != 0) {
      return fmt::format("signal {} ({}) ended it{}", end.signal, strsignal(end.signal),
                         end.signal == SIGKILL ? "; the system does so where memory runs out" : "");
    }
    if (end.status != 0) return said.empty() ? fmt::format("exit status {}", end.status) : said;
    result = ordered_json::parse(last_line_whole(base + ".out"), nullptr, false);
    return {};
  }

  static std::string last_line_whole(const std::string& path) {
    std::ifstream file(path);
    std::string last;
    for (std::string line; std::getline(file, line);) {
      if (line.starts_with('{')) last = line;
    }
    return last;
  }

  double done_share() const {
    return total_ == 0 ? 1.0 : static_cast<double>(total_ - left_) / static_cast<double>(total_);
  }

  void print_row(const Cell& cell, const CellRun& row) {
    --left_;
    estimate_.add(cell, row.seconds);
    std::string what = row.reason;
    if (row.status == "ok") {
      what = fmt::format("{:.4f} s ({:.4f} to {:.4f})", row.result.value("seconds_per_step", 0.0),
                         row.result.value("seconds_lower_quartile", 0.0),
                         row.result.value("seconds_upper_quartile", 0.0));
    } else {
      what = row.status + ": " + what;
    }
    fmt::print("[{}/{}] {}  {}", total_ - left_, total_, row.cell, what);
    if (left_ > 0) fmt::print("  about {} left", describe_seconds(seconds_left()));
    fmt::print("\n");
    std::fflush(stdout);
  }

  double seconds_left() const {
    double seconds = 0.0;
    for (const Cell& cell : cells_) {
      for (std::int64_t round = 0; round < report_.options.rounds; ++round) {
        if (!has(cell, round)) seconds += estimate_.seconds(cell);
      }
    }
    return seconds;
  }

  void write_reports() {
    report_.summaries = summarize(cells_, rows_);
    const std::string& out = report_.options.out;
    write_file_atomically(out + "/matrix.csv", matrix_csv(report_.summaries));
    write_file_atomically(out + "/matrix.json", matrix_json(report_).dump(1) + "\n");
    write_file_atomically(out + "/report.html", matrix_html(report_));
  }

  void print_end() const {
    const std::string& out = report_.options.out;
    std::int64_t failed = 0, missing = 0;
    for (const CellSummary& summary : report_.summaries) {
      failed += summary.rounds == 0 && summary.status != "not run" ? 1 : 0;
      missing += summary.status == "not run" ? 1 : 0;
    }
    if (missing > 0) {
      fmt::print("stopped: {} cell{} not run; the same command goes on\n", missing,
                 missing == 1 ? " was" : "s were");
    }
    if (failed > 0)
      fmt::print("{} cell{} failed; the reasons are in the tables\n", failed,
                 failed == 1 ? "" : "s");
    fmt::print("report          {}/report.html\n", out);
    fmt::print("tables          {0}/matrix.csv, {0}/matrix.json; every run: {0}/results.jsonl\n",
               out);
  }

  MatrixReport report_;
  std::vector<Cell> cells_;
  double timeout_;
  std::string program_ = this_program();
  std::unique_ptr<DirectoryLock> lock_;
  std::unique_ptr<JsonLinesLog> log_;
  std::vector<CellRun> rows_;
  ProgressLine line_;
  std::int64_t total_ = 0, left_ = 0;
  Estimate estimate_;
};

int bench_matrix(const MatrixFlags& flags) {
  check_one_process("bench matrix");
  MatrixReport report;
  ordered_json versions = ordered_json::object();
  report.options = matrix_options(flags, versions, report.left_out);
  MatrixCells list = list_cells(report.options);
  report.left_out.insert(report.left_out.end(), list.left_out.begin(), list.left_out.end());
  report.settings = settings_of(report.options, versions);
  for (const LeftOut& left : report.left_out)
    fmt::print("left out        {}: {}\n", left.what, left.reason);
  if (flags.list) {
    for (const Cell& cell : list.cells) {
      fmt::print("{}\n    {}\n", cell.name(),
                 shell_line(command_of(cell, report.options, this_program(), "INPUTS")));
    }
    fmt::print("{} cells\n", list.cells.size());
    return 0;
  }
  return Matrix(std::move(report), std::move(list.cells), flags.timeout, flags.resume == "yes")
      .run();
}

}  // namespace

Command add_bench_matrix(CLI::App& bench) {
  CLI::App* app = bench.add_subcommand(
      "matrix",
      "Times the same training steps for every model, policy, micro-batch, precision and number of "
      "ranks,\n"
      "and the same by PyTorch and DeepSpeed where they are installed. Weak scaling: a micro-batch "
      "is of one rank.\n"
      "Results are kept as they come; the same command goes on after a stop. Writes a report, CSV "
      "and JSON.\n\n"
      "  sherd bench matrix --out runs/matrix\n"
      "  sherd bench matrix --models vit_base_patch16_224 --ranks 2 --peers torch --python "
      "venv/bin/python --out runs/b\n"
      "  sherd bench matrix --list\n");
  auto flags = std::make_shared<MatrixFlags>();
  const auto text = [&](const char* name, std::string& value, const std::string& help) {
    return app->add_option(name, value, help + (value.empty() ? "" : " [" + value + "]"))
        ->type_name("TEXT");
  };
  const auto count = [&](const char* name, std::int64_t& value, const std::string& help) {
    app->add_option(name, value, help)->type_name("INT");
  };
  text("--models", flags->models, "timm names");
  text("--shards", flags->policies, "policies");
  text("--micro-batches", flags->micro_batches, "images of one rank in a step");
  text("--precisions", flags->precisions, "fp32, bf16, and without peers fp16");
  text("--ranks", flags->ranks, "numbers of ranks; ours are threads of a process");
  count("--threads", flags->threads, "of every rank [processors / the most ranks]");
  count("--steps", flags->steps, "steps that are timed, in each round [10]");
  count("--warmup", flags->warmup, "steps before them, in each round [3]");
  count("--rounds", flags->rounds,
        "how often each cell is measured; engines take turns, medians count [1]");
  count("--classes", flags->classes, "of the images [101]");
  text("--image-size", flags->image_size, "channels x height x width of the images");
  text("--device", flags->device, "cpu or cuda");
  count("--matrix", flags->product,
        "side of the product that is timed beside each cell [8192 on cuda, else 2048]");
  text("--peers", flags->peers,
       "torch, deepspeed or both; none; auto: those that --python can import");
  const CLI::Option* python = text("--python", flags->python, "the Python that has the peers");
  const CLI::Option* script =
      app->add_option("--peer-script", flags->peer_script,
                      "tools/peers/cell.py [that of the sources of this build]")
          ->type_name("FILE");
  app->add_option("--timeout", flags->timeout, "a cell that runs longer is ended; 0: none [14400]")
      ->type_name("SECONDS");
  text("--out", flags->out, "folder of the results")->type_name("DIR");
  text("--resume", flags->resume,
       "yes: go on with what is in the folder; no: throw it away and begin anew");
  app->add_flag("--list", flags->list, "show the cells and their commands, and run nothing")
      ->disable_flag_override();
  return {app, [flags, python, script] {
            flags->python_given = python->count() > 0;
            flags->script_given = script->count() > 0;
            return bench_matrix(*flags);
          }};
}

}  // namespace sherd::cli
