// SPDX-License-Identifier: Apache-2.0
// `sherd bench matrix`, what it starts, and its page; the peers are a script that stands in for
// Python.
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/safetensors.h>
#include <sherd/tools/cli/bench_matrix.h>
#include <sherd/tools/cli/child_process.h>
#include <sherd/tools/cli/quantile.h>
#include <sherd/tools/cli/svg_plot.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "cli_support.h"

using namespace sherd;
using namespace sherd::test;
using json = nlohmann::json;

namespace {

// One patch and the class token: steps of milliseconds.
const std::string kModel = "--image-size 3x16x16 --classes 3 --steps 2 --warmup 1 ";
const std::string kMatrix =
    "bench matrix --models vit_tiny_patch16_224 --micro-batches 1 "
    "--precisions fp32 --matrix 64 --threads 1 " +
    kModel;

// RFC 4180: records of fields.
std::vector<std::vector<std::string>> parse_csv(const std::string& text) {
  std::vector<std::vector<std::string>> records{{""}};
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string& field = records.back().back();
    if (quoted && text[i] == '"' && text.substr(i + 1, 1) == "\"") {
      field += '"';
      ++i;
    } else if (text[i] == '"') {
      quoted = !quoted;
    } else if (!quoted && text[i] == ',') {
      records.back().emplace_back();
    } else if (!quoted && text.compare(i, 2, "\r\n") == 0) {
      records.push_back({""});
      ++i;
    } else {
      field += text[i];
    }
  }
  CHECK(!quoted);
  CHECK(records.back() == std::vector<std::string>{""});  // it ends with a line's end
  records.pop_back();
  return records;
}

// By name, of the cell of this engine and policy.
std::map<std::string, std::string> csv_row(const std::string& path, const std::string& policy,
                                           const std::string& engine) {
  const auto records = parse_csv(text_of(path));
  for (const auto& record : records) {
    REQUIRE(record.size() == records[0].size());
    std::map<std::string, std::string> row;
    for (std::size_t i = 0; i < record.size(); ++i) row[records[0][i]] = record[i];
    if (row["policy"] == policy && row["engine"] == engine) return row;
  }
  FAIL("no row of " << policy << " by " << engine);
  return {};
}

std::size_t count_of(const std::string& text, const std::string& piece) {
  std::size_t count = 0;
  for (std::size_t at = text.find(piece); at != std::string::npos; at = text.find(piece, at + 1))
    ++count;
  return count;
}

std::string write_script(const TempDirectory& folder, const std::string& body) {
  const std::string path = folder.path("python");
  std::ofstream(path) << "#!/bin/sh\n" << body << "\n";
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return path;
}

const std::string kProbe =
    "case \"$*\" in *--probe*) echo what it imports prints; "
    "echo '{\"torch\": \"9.9\", \"deepspeed\": \"1.1\"}'; exit 0;; esac\n";

}  // namespace

TEST_CASE("cli: bench matrix measures every cell, and goes on where it was stopped") {
  const TempDirectory folder;
  const std::string out = folder.path("matrix");
  const std::string command =
      kMatrix + "--shards none,zero2,hybrid --ranks 1,2 --peers none --out " + out;
  const Output first = sherd_run(command);
  REQUIRE_MESSAGE(first.status == 0, first.text);
  CHECK(contains(first, "zero2 on 1 rank: one rank has nothing to share"));
  CHECK(contains(first, "hybrid on 2 ranks: two groups"));
  CHECK(contains(first, "[3/3] vit_tiny_patch16_224-b1-fp32-r2-zero2-sherd"));

  const json whole = json::parse(text_of(out + "/matrix.json"));
  REQUIRE(whole["cells"].size() == 3);
  for (const json& cell : whole["cells"]) {
    CAPTURE(cell.dump());
    CHECK(cell["status"] == "ok");
    CHECK(cell["step_seconds"].get<double>() > 0.0);
    CHECK(cell["step_seconds_lower_quartile"] <= cell["step_seconds"]);
    CHECK(cell["step_seconds_upper_quartile"] >= cell["step_seconds"]);
    CHECK(cell["losses"].size() == 3);
    CHECK(cell["losses_equal_to_first_policy"] == true);
    CHECK(cell["resident_bytes"].get<double>() > 1e6);
    CHECK(cell["product_flops_per_second"].get<double>() > 0.0);
  }
  // The images of a second rank are others.
  CHECK(whole["cells"][0]["losses"] != whole["cells"][1]["losses"]);
  CHECK(whole["cells"][1]["losses"] == whole["cells"][2]["losses"]);
  const double single = whole["cells"][0]["step_seconds"];
  const auto row = csv_row(out + "/matrix.csv", "zero2", "sherd");
  CHECK(row.at("ranks") == "2");
  CHECK(std::stod(row.at("step_seconds")) == whole["cells"][2]["step_seconds"]);
  CHECK(std::stod(row.at("weak_scaling_efficiency")) ==
        doctest::Approx(single / std::stod(row.at("step_seconds"))));
  CHECK(std::stod(row.at("images_per_second")) ==
        doctest::Approx(2.0 / std::stod(row.at("step_seconds"))));
  CHECK(std::stod(row.at("sent_bytes_of_rank")) > 0.0);
  CHECK(row.at("version").find("sherd ") == 0);

  const std::string page = text_of(out + "/report.html");
  for (const char* piece :
       {"<h2>Time of a step</h2>", "<h2>Weak-scaling efficiency</h2>", "zero2 ×2", "none ×1",
        "<svg", "Left out", "two groups that shard inside", "prefers-color-scheme:dark",
        "3 of 3 cells of Sherd have, bit for bit"})
    CHECK_MESSAGE(page.find(piece) != std::string::npos, piece);
  for (const char* piece : {"<script", "http", "src=", "url(", "nan", "@import"})
    CHECK_MESSAGE(page.find(piece) == std::string::npos, piece);
  CHECK(count_of(page, "<svg") == count_of(page, "</svg>"));
  CHECK(count_of(page, "<td") == count_of(page, "</td>"));

  // All is there: nothing runs. One row lost, and half of another left by a kill: one cell runs.
  CHECK(contains(sherd_run(command), "3 of 3 are there already"));
  const std::string results = out + "/results.jsonl";
  std::string lines = text_of(results);
  CHECK(std::ranges::count(lines, '\n') == 4);
  const std::size_t last = lines.rfind('\n', lines.size() - 2) + 1;
  std::ofstream(results) << lines.substr(0, last + 20);
  const Output second = sherd_run(command);
  CHECK(second.status == 0);
  CHECK(contains(second, "2 of 3 are there already"));
  CHECK(contains(second, "[3/3]"));
  CHECK(!contains(second, "[2/3]"));
  CHECK(text_of(results).starts_with(lines.substr(0, last)));
  CHECK(json::parse(text_of(out + "/matrix.json"))["cells"][2]["status"] == "ok");

  std::string other = command;
  other.replace(other.find("--steps 2"), 9, "--steps 3");
  refuses(other, {out, "steps 2", "this one has 3", "--resume no"});
  CHECK(contains(sherd_run(other + " --resume no"), "[1/3]"));
}

TEST_CASE("cli: bench matrix measures peers beside ours, and a cell that fails is a row") {
  const TempDirectory folder;
  const std::string out = folder.path("matrix");
  const std::string python = write_script(folder, kProbe + R"(
test -f $5/weights.safetensors -a -f $5/inputs.safetensors || { echo no inputs in $5 >&2; exit 1; }
case "$*" in
*"--engine ddp"*) echo "chatter"; until grep -q 1000 /proc/$$/oom_score_adj; do sleep 0.05; done; echo '{"torch": "9.9", "seconds_per_step": 1e6, "seconds_lower_quartile": 1e6,
 "losses": []}' | tr -d '\n'; echo; echo "a last word";;
*"--engine fsdp2_full"*) kill -9 $$;;
*"--engine deepspeed3"*) echo "cell.py: deepspeed cannot be imported" >&2; exit 3;;
*"--engine deepspeed1"*) echo "Traceback" >&2; echo 'cell.py: rank 0 said "no", <b> and left' >&2; exit 1;;
*) echo nothing of use;;
esac)");
  const std::string command =
      kMatrix + "--shards none,zero1,grad_op,zero3 --ranks 2 --rounds 2 --peers auto --python " +
      python + " --out " + out;
  const Output output = sherd_run(command);
  REQUIRE_MESSAGE(output.status == 0, output.text);
  CHECK(contains(output, "[18/18]"));
  // Engines of a place take turns.
  CHECK(output.out.find("[2/18] vit_tiny_patch16_224-b1-fp32-r2-none-ddp") != std::string::npos);
  CHECK(output.out.find("[3/18] vit_tiny_patch16_224-b1-fp32-r2-none-sherd") != std::string::npos);
  CHECK(!std::filesystem::exists(out + "/inputs"));

  const std::string csv = out + "/matrix.csv";
  auto row = csv_row(csv, "none", "ddp");
  CHECK(row["status"] == "ok");
  CHECK(row["rounds"] == "2");
  CHECK(row["version"] == "PyTorch 9.9");
  CHECK(std::stod(row["step_seconds_over_sherd"]) ==
        doctest::Approx(1e6 / std::stod(csv_row(csv, "none", "sherd")["step_seconds"])));
  CHECK(row["largest_loss_difference"].empty());
  row = csv_row(csv, "zero3", "fsdp2_full");
  CHECK(row["status"] == "failed");
  CHECK(row["reason"].find("signal 9 (Killed) ended it; the system does so where memory") == 0);
  CHECK(row["step_seconds"].empty());
  row = csv_row(csv, "zero3", "deepspeed3");
  CHECK(row["status"] == "unavailable");
  row = csv_row(csv, "zero1", "deepspeed1");
  CHECK(row["reason"] == "cell.py: rank 0 said \"no\", <b> and left");
  CHECK(csv_row(csv, "grad_op", "fsdp2_grad_op")["reason"] == "it printed no result");
  CHECK(csv_row(csv, "zero3", "sherd")["status"] == "ok");
  const std::string page = text_of(out + "/report.html");
  CHECK(page.find("rank 0 said &quot;no&quot;, &lt;b&gt; and left") != std::string::npos);
  CHECK(page.find("4 of 9 cells failed") != std::string::npos);
  CHECK(page.find("PyTorch 9.9") != std::string::npos);

  // What was not installed is tried again; what failed is not.
  const Output again = sherd_run(command);
  CHECK(contains(again, "16 of 18 are there already"));
  CHECK(contains(again, "deepspeed3"));
  CHECK(!contains(again, "ddp"));
  write_script(folder, kProbe + "echo '{\"seconds_per_step\": 2.0}'");
  CHECK(contains(sherd_run(command), "[18/18]"));
  CHECK(contains(sherd_run(command), "18 of 18 are there already"));
  row = csv_row(csv, "zero3", "deepspeed3");
  CHECK(row["status"] == "ok");
  CHECK(row["reason"].empty());
  CHECK(row["step_seconds"] == "2");
}

TEST_CASE("cli: bench matrix is interrupted: it ends what it started, keeps its rows, says so") {
  const TempDirectory folder;
  const std::string out = folder.path("matrix"), mark = folder.path("mark");
  const std::string python =
      write_script(folder, kProbe + "sleep 1000 & echo $! > " + mark + ".new; mv " + mark +
                               ".new " + mark + "; wait");
  Child child("exec " SHERD_PROGRAM " " + kMatrix +
              "--shards none --ranks 1 --peers torch --python " + python + " --out " + out);
  REQUIRE(comes_true([&] { return std::filesystem::exists(mark); }));
  kill(child.pid(), SIGINT);
  const Output output = child.wait(60.0);
  CHECK(output.status == 130);
  CHECK(contains(output, "stopped: 1 cell was not run"));
  CHECK(csv_row(out + "/matrix.csv", "none", "ddp")["status"] == "not run");
  CHECK(csv_row(out + "/matrix.csv", "none", "sherd")["status"] == "ok");
  CHECK(text_of(out + "/report.html").find("1 of 2 cells are not measured yet") !=
        std::string::npos);
  // Empty of what has ended, even where nobody has asked for its status yet.
  const std::string sleeper = fmt::format("/proc/{}/cmdline", std::stoi(text_of(mark)));
  CHECK(comes_true([&] { return text_of(sleeper).empty(); }));
}

TEST_CASE("cli: bench matrix ends a cell that takes too long") {
  const TempDirectory folder;
  const std::string out = folder.path("matrix");
  const Output output = sherd_run(
      "bench matrix --models vit_base_patch16_224 --micro-batches 64 --precisions fp32 --ranks 1 "
      "--shards none "
      "--peers none --timeout 0.2 --out " +
      out);
  CHECK(output.status == 0);
  CHECK(output.seconds < 30.0);
  CHECK(csv_row(out + "/matrix.csv", "none", "sherd")["reason"] ==
        "it ran longer than --timeout 0.2 s");
}

TEST_CASE("cli: bench matrix lists, and refuses what contradicts itself") {
  const Output list = sherd_run(
      "bench matrix --list --peers none --ranks 4 --shards hybrid,none --micro-batches 2 "
      "--precisions bf16 --models vit_tiny_patch16_224");
  CHECK(list.status == 0);
  CHECK(contains(list, "vit_tiny_patch16_224-b2-bf16-r4-hybrid-sherd\n"));
  CHECK(contains(list, "--batch-size 8 --precision bf16 --shard hybrid"));
  CHECK(contains(list, "--mesh replicate=2,shard=2"));
  CHECK(contains(list, "2 cells"));

  const TempDirectory folder;
  const std::string quick = "bench matrix --list --peers none ";
  refuses("bench matrix --peers none", {"--out", "--list"});
  refuses(quick + "--out " + folder.path("x"), {"--list", "--out has no effect"});
  refuses(quick + "--models vit_larg_patch16_224",
          {"--models", "did you mean 'vit_large_patch16_224'"});
  refuses(quick + "--shards zero4", {"--shards", "'zero4'"});
  refuses(quick + "--shards none,none", {"--shards", "twice"});
  refuses(quick + "--ranks 1,,2", {"--ranks", "'1,,2'"});
  refuses(quick + "--ranks 2x", {"--ranks", "whole numbers", "'2x'"});
  refuses(quick + "--ranks 0", {"--ranks: expected 1 to"});
  refuses(quick + "--micro-batches -4", {"--micro-batches", "'-4'"});
  refuses(quick + "--precisions fp64", {"--precisions", "'fp64'"});
  refuses(quick + "--steps 0", {"--steps: expected 1 to"});
  refuses(quick + "--rounds 0", {"--rounds: expected 1 to"});
  refuses(quick + "--device meta", {"--device: expected cpu or cuda", "'meta'"});
  refuses(quick + "--resume maybe", {"--resume: expected yes or no"});
  refuses(quick + "--timeout -1", {"--timeout"});
  refuses(quick + "--python /usr/bin/python3", {"--python", "no effect with --peers none"});
  refuses(quick + "--ranks 1 --shards zero3", {"leave no cell", "zero3 on 1 rank", "add none"});
  refuses("bench matrix --list --peers jax", {"--peers", "'jax'"});
  refuses("bench matrix --list --peers torch,none", {"--peers", "none stands alone"});
  refuses("bench matrix --list --peers torch --python /no/python",
          {"--python /no/python", "cannot be started"});
  refuses("bench matrix --list --peers torch --peer-script /no/cell.py",
          {"/no/cell.py", "--peers none"});
  const std::string without =
      write_script(folder, "echo '{\"torch\": null, \"torch_missing\": \"ImportError: gone\"}'");
  refuses("bench matrix --list --peers torch --python " + without,
          {"--peers torch", "ImportError: gone"});
  CHECK(contains(sherd_run("bench matrix --list --peers auto --ranks 1 --python " + without),
                 "ImportError: gone"));
  const std::string with = write_script(folder, kProbe);
  refuses("bench matrix --list --precisions fp16 --peers torch --python " + with,
          {"--precisions fp16", "--peers none"});
  put_file(folder.path("file"), {1});
  refuses("bench matrix --peers none --out " + folder.path(), {folder.path(), "holds no matrix"});
}

TEST_CASE("cli: bench step writes what its steps start from") {
  const TempDirectory folder;
  const std::string step =
      "bench step --preset vit_tiny_patch16_224 --dataset synthetic --threads 1 --matrix 0 "
      "--batch-size 4 " +
      kModel;
  const Output output = sherd_run(step + "--write-inputs " + folder.path("inputs"));
  REQUIRE_MESSAGE(output.status == 0, output.text);
  const SafetensorsFile inputs = SafetensorsFile::open(folder.path("inputs/inputs.safetensors"));
  REQUIRE(inputs.find("images") != nullptr);
  CHECK(inputs.find("images")->shape == Shape{4, 3, 16, 16});
  std::vector<std::int64_t> labels(4);
  std::memcpy(labels.data(), inputs.bytes(*inputs.find("labels")).data(), 32);
  CHECK(labels == std::vector<std::int64_t>{0, 1, 2, 0});
  std::vector<double> rates(3);
  REQUIRE(inputs.find("learning_rates")->size == 24);
  std::memcpy(rates.data(), inputs.bytes(*inputs.find("learning_rates")).data(), 24);
  CHECK(rates[0] == 1e-3);
  CHECK(rates[2] < rates[1]);
  CHECK(inputs.metadata().at("heads") == "3");

  // From these weights come the same losses, bit for bit; on two ranks, of two images each, too.
  const json own = json::parse(sherd_run(step + "--json").out);
  const json read = json::parse(
      sherd_run(step + "--json --weights " + folder.path("inputs/weights.safetensors")).out);
  CHECK(own["losses"].size() == 3);
  CHECK(own["losses"] == read["losses"]);
  CHECK(own["seconds"].size() == 2);
  const json shared = json::parse(sherd_run(step + "--json --ranks 2 --shard zero1").out);
  CHECK(shared["losses"][0].get<double>() ==
        doctest::Approx(own["losses"][0].get<double>()).epsilon(1e-6));
  CHECK(shared["peak_resident_bytes_of_processes"].size() == 1);

  const std::string write = step + "--write-inputs " + folder.path("other") + " ";
  for (const char* flag :
       {"--json", "--ranks 2", "--precision bf16", "--device meta", "--micro-batch 2"})
    refuses(write + flag, {"--write-inputs", "one rank"});
}

TEST_CASE("cli: the peers' script says what is missing") {
  const std::string cell =
      "exec python3 -I -S " SHERD_SOURCE_ROOT "/tools/peers/cell.py ";  // no packages
  const Output probe = run(cell + "--probe");
  CHECK(probe.status == 0);
  const json found = json::parse(probe.out);
  CHECK(found["torch"].is_null());
  CHECK(found["deepspeed_missing"].get<std::string>().find("ModuleNotFoundError") == 0);
  const Output output = run(cell + "--engine ddp --inputs /nowhere");
  CHECK(output.status == 3);
  CHECK(contains(output, "torch cannot be imported"));
  CHECK(!contains(output, "Traceback"));
}

TEST_CASE("matrix: cells, their commands and their summaries") {
  cli::MatrixOptions options;
  options.models = {"vit_tiny_patch16_224"};
  options.policies = {"none", "zero3"};
  options.precisions = {"fp32"};
  options.micro_batches = {2, 4};
  options.ranks = {1, 2};
  options.threads = 1;
  options.peers = {"torch"};
  const cli::MatrixCells list = cli::list_cells(options);
  CHECK(list.cells.size() ==
        12);  // of 2 micro-batches: 1 rank ddp and ours; 2 ranks the same and zero3
  CHECK(list.left_out.size() == 1);
  std::set<std::string> names;
  for (const cli::Cell& cell : list.cells) names.insert(cell.name());
  CHECK(names.size() == list.cells.size());
  const auto inputs = cli::inputs_command("vit_tiny_patch16_224", options, "sherd", "DIR");
  CHECK(cli::shell_line(inputs).find("--batch-size 8") != std::string::npos);  // the largest cell's

  const auto run_of = [](const cli::Cell& cell, int round, double seconds,
                         std::vector<double> losses) {
    const bool ours = cell.engine == "sherd";
    json result{{"seconds_per_step", seconds},
                {"seconds_lower_quartile", seconds - 0.5},
                {"seconds_upper_quartile", seconds + 0.5},
                {"matrix_flops_per_second", 1e9 * seconds},
                {"losses", losses},
                {"peak_resident_bytes_of_processes", {10, 20}},
                {"sent_bytes_per_step", 7}};
    if (ours) result["exposed_seconds_per_step"] = seconds / 2;
    return cli::CellRun{cell.name(), round, "ok", "", 1.0, result};
  };
  std::vector<cli::CellRun> runs;
  for (const cli::Cell& cell : list.cells) {
    if (cell.micro_batch != 2) continue;
    const double seconds = static_cast<double>(cell.ranks) * (cell.engine == "sherd" ? 1.0 : 3.0);
    const double last = cell.engine == "sherd" ? 2.0 : 2.02;
    for (int round = 0; round < 3; ++round)
      runs.push_back(run_of(cell, round, seconds + 0.25 * round, {4.0, last}));
  }
  runs.push_back({list.cells.front().name(), 3, "failed", "late", 1.0, nullptr});
  for (const cli::CellRun& run : runs) {
    const cli::CellRun same = cli::run_from_json(json::parse(cli::to_json(run).dump()));
    CHECK(same.cell == run.cell);
    CHECK(same.result == run.result);
  }
  const auto all = cli::summarize(list.cells, runs);
  const auto find = [&](std::int64_t micro, std::int64_t ranks, const std::string& engine) {
    return *std::ranges::find_if(all, [&](const cli::CellSummary& s) {
      return s.cell.micro_batch == micro && s.cell.ranks == ranks && s.cell.engine == engine;
    });
  };
  const cli::CellSummary ours = find(2, 1, "sherd"), theirs = find(2, 2, "fsdp2_full");
  CHECK(ours.status == "ok");  // one round failed, three were measured
  CHECK(ours.rounds == 3);
  CHECK(ours.seconds == 1.25);
  CHECK(ours.lower == 0.5);
  CHECK(ours.upper == 2.0);
  CHECK(ours.product_rate == 1e9);
  CHECK(ours.images_per_second == doctest::Approx(2 / 1.25));
  CHECK(std::isnan(ours.exposed_seconds));  // one rank waits for nobody
  CHECK(find(2, 2, "sherd").exposed_seconds == doctest::Approx(1.125));
  CHECK(ours.equal_losses);
  CHECK(ours.resident_bytes == 30.0);
  CHECK(theirs.seconds == 6.25);
  CHECK(theirs.efficiency == doctest::Approx(3.25 / 6.25));     // DDP's one rank
  CHECK(theirs.against_sherd == doctest::Approx(6.25 / 2.25));  // of the same place
  CHECK(theirs.loss_difference == doctest::Approx(0.01));
  CHECK(std::isnan(theirs.exposed_seconds));
  CHECK(find(4, 2, "sherd").status == "not run");
  CHECK(std::isnan(find(4, 2, "sherd").seconds));
  const auto records = parse_csv(cli::matrix_csv(all));
  CHECK(records.size() == 13);
  for (const auto& record : records) CHECK(record.size() == records[0].size());
}

TEST_CASE("plots: axes are round, marks are where they belong, text is escaped") {
  CHECK(cli::axis_ticks(0.0, 0.93, 5) ==
        std::vector<double>{0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0});
  CHECK(cli::axis_ticks(-3.0, 10.0, 5).front() == -5.0);
  CHECK(cli::axis_ticks(0.0, 0.0, 5).size() > 1);
  CHECK(cli::axis_ticks(0.0, 7e9, 5).back() >= 7e9);
  const double mebibyte = 1024.0 * 1024.0;
  CHECK(cli::axis_ticks(0.0, 700 * mebibyte, 5, true)[1] == 200 * mebibyte);

  cli::PlotFrame frame;
  frame.title = "a < b & \"c\"";
  frame.reference_lines = {{20.0, "limit"}};
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::string bars =
      cli::bar_plot(frame, {"one", "two"},
                    {{"x", 0, {5.0, 10.0}, {4.0, nan}, {6.0, nan}}, {"y", 1, {nan, 2.0}, {}, {}}});
  CHECK(bars.find("a &lt; b &amp; &quot;c&quot;") != std::string::npos);
  CHECK(count_of(bars, "<title>") == 3);  // a value that is not known has no bar
  CHECK(count_of(bars, "class=\"whisker\"") == 1);
  CHECK(bars.find("limit") != std::string::npos);
  CHECK(bars.find("nan") == std::string::npos);
  CHECK(bars.find("<title>two, x: 10</title>") != std::string::npos);
  // Heights are in proportion.
  const auto height_of = [&](const std::string& mark) {
    const std::size_t at = bars.find(mark);
    const std::size_t begin = bars.rfind("height=\"", at) + 8;
    return std::stod(bars.substr(begin));
  };
  CHECK(height_of("<title>two, x: 10<") ==
        doctest::Approx(2 * height_of("<title>one, x: 5<")).epsilon(0.01));

  cli::PlotFrame plain;
  plain.title = "lines";
  const std::string lines = cli::line_plot(plain, {{"a", 2, {{0.0, 1.0}, {1.0, nan}, {2.0, 3.0}}}});
  CHECK(count_of(lines, "<circle") == 2);
  CHECK(lines.find("class=\"l2\"") != std::string::npos);
  const std::string areas = cli::area_plot(
      plain, {{"low", 0, {{0.0, 1.0}, {1.0, 2.0}}}, {"high", 1, {{0.0, 1.0}, {1.0, 2.0}}}}, true);
  CHECK(count_of(areas, "<path") == 2);
  CHECK(count_of(areas, "L") >= 8);
  for (const std::string& plot : {bars, lines, areas}) {
    CHECK(count_of(plot, "<svg") == 1);
    CHECK(count_of(plot, "<text") == count_of(plot, "</text>"));
  }
}

TEST_CASE("matrix: quantiles and lines for a shell") {
  const std::vector<double> values{1.0, 2.0, 4.0, 8.0};
  CHECK(cli::quantile(values, 0.0) == 1.0);
  CHECK(cli::quantile(values, 0.5) == 3.0);
  CHECK(cli::quantile(values, 0.25) == 1.75);
  CHECK(cli::quantile(values, 1.0) == 8.0);
  CHECK(cli::shell_line({"a", "b c", "d'e", ""}) == "a 'b c' 'd'\\''e' ''");
  CHECK(run(cli::shell_line({"printf", "%s|", "b c", "d'e", "$x"})).out == "b c|d'e|$x|");
}
