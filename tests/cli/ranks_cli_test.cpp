// SPDX-License-Identifier: Apache-2.0
// `sherd` on several ranks, threads and processes, as a user meets it: the same weights whatever
// the policy, one message when something goes wrong, and an end to every run.
#include <sherd/comm/mpi.h>
#include <sherd/runtime/exact_sum.h>
#include <sherd/tools/planner/compare.h>
#include <sherd/tools/planner/traced_step.h>
#include <sherd/tools/trainer/trace_gather.h>
#include <sys/resource.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "cli_support.h"

using namespace sherd;
using namespace sherd::test;
using json = nlohmann::json;

namespace {

#ifdef __SANITIZE_ADDRESS__
// MPICH leaves memory behind at its end.
const std::string kMpiexec = "exec env ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 mpiexec -n ";
#else
const std::string kMpiexec = "exec mpiexec -n ";
#endif
const std::string kSherd = SHERD_PROGRAM;

// One block more than kTiny, so that units are prefetched.
const std::string kModel =
    "--dataset synthetic --image-size 1x8x8 --classes 3 --patch 4 --dim 16 --depth 2 --heads 2 "
    "--threads 1 ";
const std::string kRun = kModel + "--batch-size 16 --images 64 --epochs 1 ";
// Batches of 16, 16 and 2: uneven on 3 ranks, and the last has fewer samples than 3 or 4 ranks.
const std::string kUneven = kModel +
                            "--batch-size 16 --images 34 --epochs 2 --drop 0.1 --drop-path 0.1 "
                            "--workers 0 --eval-every 0 --log-every 1 ";
// Until it is stopped.
const std::string kEndless = kModel + "--batch-size 16 --images 64 --epochs 1000000 ";

bool have_mpi() {
  static const bool have = [] {
    const bool launcher = std::system("command -v mpiexec >/dev/null 2>&1") == 0;
    if (!mpi_built() || !launcher) MESSAGE("no MPI here: tests of processes are skipped");
    return mpi_built() && launcher;
  }();
  return have;
}

Output on_processes(int ranks, const std::string& arguments) {
  return run(kMpiexec + std::to_string(ranks) + " " + kSherd + " " + arguments);
}

// As threads and, where there is MPI, as processes.
std::vector<Output> on_ranks(int ranks, const std::string& arguments) {
  std::vector<Output> both{sherd_run(arguments + " --ranks " + std::to_string(ranks))};
  if (have_mpi()) both.push_back(on_processes(ranks, arguments));
  return both;
}

void refused_on(int ranks, const std::string& arguments, const std::vector<std::string>& pieces) {
  CAPTURE(arguments);
  for (const Output& output : on_ranks(ranks, arguments)) check_refusal(output, pieces);
}

// Runs that succeed, each in a folder of its own.
class Runs {
 public:
  // The folder of the run.
  std::string train(const std::string& arguments, int processes = 0) {
    const std::string out = folder_.path("run" + std::to_string(count_++));
    const std::string all = "train " + arguments + " --out " + out;
    const Output output = processes > 0 ? on_processes(processes, all) : sherd_run(all);
    CHECK_MESSAGE(output.status == 0, all, "\n", output.text);
    CHECK(output.err.empty());
    return out;
  }
  std::string path(const std::string& name) const { return folder_.path(name); }

 private:
  TempDirectory folder_;
  int count_ = 0;
};

std::string weights_of(const std::string& run) {
  const std::string text = text_of(run + "/model.safetensors");
  CHECK(text.size() > 1000);
  return text;
}

std::vector<json> log_of(const std::string& run) {
  std::vector<json> lines;
  std::ifstream file(run + "/log.jsonl");
  for (std::string line; std::getline(file, line);) lines.push_back(json::parse(line));
  return lines;
}

std::vector<json> events(const std::vector<json>& log, const std::string& kind) {
  std::vector<json> found;
  for (const json& line : log) {
    if (line.at("event") == kind) found.push_back(line);
  }
  return found;
}

// What must not depend on the kind of ranks.
std::vector<std::string> results_of(const std::string& run) {
  std::vector<std::string> all;
  for (const json& line : log_of(run)) {
    std::string text = line.at("event");
    for (const char* key : {"epoch", "step", "loss", "lr", "grad_norm", "train_loss", "test_loss",
                            "test_accuracy", "steps", "ranks", "peak_bytes"}) {
      if (line.contains(key)) text += std::string(" ") + key + " " + line.at(key).dump();
    }
    all.push_back(text);
  }
  return all;
}

std::vector<std::string> files_under(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

using Names = std::vector<std::string>;

// Policies, and what goes with them on so many ranks.
std::vector<std::string> variants(int ranks) {
  std::vector<std::string> all{"--shard zero1",
                               "--shard zero2 --unit params:500",
                               "--shard grad_op --prefetch 0",
                               "--shard zero3",
                               "--shard fsdp --unit model",
                               "--shard full_shard --prefetch 5 --persist-below 100",
                               "--shard zero3 --reshard-after-forward no --unit params:3000"};
  if (ranks % 2 == 0) {
    const std::string mesh = " --mesh replicate=2,shard=" + std::to_string(ranks / 2);
    all.push_back("--shard hybrid" + mesh);
    all.push_back("--shard hsdp --prefetch 2" + mesh);
    all.push_back("--shard zero3 --reshard-after-forward 2");
  }
  return all;
}

}  // namespace

TEST_CASE("ranks: every policy, unit rule and option ends in the weights of plain data parallel") {
  Runs runs;
  for (int ranks = 1; ranks <= 4; ++ranks) {
    const std::string arguments = kUneven + "--ranks " + std::to_string(ranks) + " ";
    const std::string plain = runs.train(arguments + "--shard none");
    const std::string weights = weights_of(plain);
    const auto losses = events(log_of(plain), "step");
    REQUIRE(losses.size() == 6);
    for (const std::string& variant : variants(ranks)) {
      CAPTURE(ranks);
      CAPTURE(variant);
      const std::string run = runs.train(arguments + variant);
      CHECK(weights_of(run) == weights);
      const auto steps = events(log_of(run), "step");
      REQUIRE(steps.size() == 6);
      for (std::size_t i = 0; i < 6; ++i) {
        CHECK(steps[i].at("loss") == losses[i].at("loss"));
        CHECK(steps[i].at("grad_norm") == losses[i].at("grad_norm"));
      }
    }
  }
  CHECK(weights_of(runs.train(kUneven + "--ranks 2 --shard ddp")) ==
        weights_of(runs.train(kUneven + "--ranks 2 --shard no_shard")));
  CHECK(weights_of(runs.train(kUneven + "--ranks 2 --shard shard_grad_op")) ==
        weights_of(runs.train(kUneven + "--ranks 2")));
}

TEST_CASE("ranks: micro-batches, summed over ranks once a step or each time") {
  Runs runs;
  for (const int ranks : {2, 3}) {
    const std::string arguments =
        kUneven + "--micro-batch 2 --ranks " + std::to_string(ranks) + " --shard ";
    const std::string weights = weights_of(runs.train(arguments + "none"));
    for (const std::string policy : {"zero1", "zero2", "grad_op", "zero3"}) {
      CAPTURE(ranks);
      CAPTURE(policy);
      CHECK(weights_of(runs.train(arguments + policy + " --reduce-every step")) == weights);
    }
    // The other way the sums are rounded otherwise.
    const std::string each = weights_of(runs.train(arguments + "zero3 --reduce-every micro"));
    CHECK(each.size() == weights.size());
    for (const std::string policy : {"zero2", "grad_op"}) {
      CAPTURE(ranks);
      CAPTURE(policy);
      CHECK(weights_of(runs.train(arguments + policy + " --reduce-every micro")) == each);
    }
    refuses("train " + arguments + "zero1 --reduce-every micro",
            {"--reduce-every micro", "zero1", "use zero2 or above"});
  }
}

TEST_CASE("ranks: precision, recomputation and offloading with each other, threads and processes") {
  Runs runs;
  const test::TempDirectory scratch;
  const std::string files = "nvme:" + scratch.path();
  const std::string everything =
      "--recompute block --offload-optimizer " + files + " --offload-parameters " + files;
  for (const std::string precision : {"fp32", "bf16", "fp16", "fp32 --reduce-dtype bf16"}) {
    for (const int ranks : {1, 2, 3}) {
      CAPTURE(precision);
      CAPTURE(ranks);
      const std::string arguments = kUneven + "--precision " + precision + " ";
      const std::string on_threads = arguments + "--ranks " + std::to_string(ranks) + " ";
      const std::string weights = weights_of(runs.train(on_threads + "--shard none"));
      for (const std::string& more : std::vector<std::string>{
               "--shard zero2 --recompute selective --offload-optimizer cpu",
               "--shard zero3 " + everything, "--shard grad_op --offload-optimizer " + files}) {
        CAPTURE(more);
        CHECK(weights_of(runs.train(on_threads + more)) == weights);
      }
      if (!have_mpi()) continue;
      CHECK(weights_of(runs.train(arguments + "--shard zero3 " + everything, ranks)) == weights);
    }
  }
  CHECK(std::filesystem::is_empty(scratch.path()));
}

TEST_CASE("ranks: processes end in the weights, losses and memory of threads") {
  if (!have_mpi()) return;
  Runs runs;
  const struct {
    int ranks;
    const char* arguments;
  } cases[] = {{1, "--shard none"},
               {2, "--shard none"},
               {2, "--shard hybrid --mesh replicate=2,shard=1"},
               {3, "--shard zero2"},
               {3, "--shard zero3 --micro-batch 2 --reduce-every micro"},
               {4, "--shard hybrid --mesh replicate=2,shard=2"},
               {4, "--shard zero3 --reshard-after-forward 2 --persist-below 100"}};
  for (const auto& one : cases) {
    const int ranks = one.ranks;
    const std::string arguments = one.arguments;
    CAPTURE(ranks);
    CAPTURE(arguments);
    const std::string threads =
        runs.train(kUneven + arguments + " --ranks " + std::to_string(ranks));
    const std::string processes = runs.train(kUneven + arguments, ranks);
    CHECK(weights_of(threads) == weights_of(processes));
    CHECK(results_of(threads) == results_of(processes));
    CHECK(results_of(threads).size() == 1 + 6 + 2 + 1);  // each line once
    CHECK(files_under(processes) == Names{"config.toml", "log.jsonl", "model.safetensors"});
  }
}

TEST_CASE("ranks: processes end in the weights of threads under every policy") {
  if (!have_mpi()) return;
  Runs runs;
  const std::string odd =
      "--dataset synthetic --image-size 1x9x6 --classes 5 --patch 3 --dim 18 --depth 2 --heads 3 "
      "--mlp-ratio 1.5 --threads 1 --batch-size 15 --images 32 --epochs 1 --drop 0.1 --drop-path "
      "0.1 --workers 0 --eval-every 0 ";
  for (const int ranks : {1, 2, 3, 4, 8}) {
    std::vector<std::string> all{"none",
                                 "zero1",
                                 "zero2",
                                 "grad_op",
                                 "zero3",
                                 "zero3 --persist-below 100",
                                 "zero3 --unit params:500",
                                 "zero3 --prefetch 0",
                                 "zero3 --prefetch 3"};
    if (ranks % 2 == 0) {
      all.emplace_back("hybrid --mesh replicate=2,shard=" + std::to_string(ranks / 2));
      all.emplace_back("zero3 --reshard-after-forward 2");
    }
    std::string weights;
    for (const std::string& policy : all) {
      CAPTURE(ranks);
      CAPTURE(policy);
      const std::string arguments = odd + "--shard " + policy;
      const std::string threads =
          weights_of(runs.train(arguments + " --ranks " + std::to_string(ranks)));
      CHECK(threads == weights_of(runs.train(arguments, ranks)));
      if (weights.empty()) weights = threads;
      CHECK(threads == weights);
    }
  }
}

namespace {

// Processes that meet over TCP, by a file in `folder`, and are started together; the output of all.
// arguments: of each rank.
Output over_tcp(const std::vector<std::string>& arguments, const std::string& folder) {
  std::string command = "export SHERD_RENDEZVOUS=file:" + folder + "/meet SHERD_TOKEN=" + folder +
                        " SHERD_WORLD_SIZE=" + std::to_string(arguments.size()) + "; pids=; ";
  for (std::size_t r = 1; r < arguments.size(); ++r) {
    command += "SHERD_RANK=" + std::to_string(r) + " " + kSherd + " " + arguments[r] +
               " & pids=\"$pids $!\"; ";
  }
  command += "SHERD_RANK=0 " + kSherd + " " + arguments[0] +
             "; status=$?; for pid in $pids; do wait $pid || test $status -ne 0 || status=99; "
             "done; exit $status";
  return run(command);
}

}  // namespace

TEST_CASE("ranks: processes over TCP end in the weights, losses and memory of threads") {
  Runs runs;
  const struct {
    std::size_t ranks;
    const char* arguments;
  } cases[] = {{2, "--shard zero3 --unit params:500"},
               {2, "--shard none"},
               {4, "--shard hybrid --mesh replicate=2,shard=2"}};
  for (const auto& one : cases) {
    const std::string arguments = kUneven + one.arguments;
    CAPTURE(arguments);
    const std::string threads = runs.train(arguments + " --ranks " + std::to_string(one.ranks));
    const TempDirectory folder;
    const std::string processes = folder.path("run");
    const Output output =
        over_tcp(std::vector<std::string>(one.ranks, "train " + arguments + " --out " + processes),
                 folder.path());
    CHECK_MESSAGE(output.status == 0, output.text);
    CHECK(output.err.empty());
    CHECK(contains(output, "as processes over TCP"));
    CHECK(weights_of(threads) == weights_of(processes));
    CHECK(results_of(threads) == results_of(processes));
    CHECK(files_under(folder.path()) == Names{"config.toml", "log.jsonl", "model.safetensors"});
  }
}

TEST_CASE("ranks: what is wrong with a run over TCP is one message of one process") {
  const TempDirectory folder;
  const std::string train = "train " + kRun + "--out " + folder.path("run") + " ";
  check_refusal(over_tcp({train, train + "--lr 0.5"}, folder.path()),
                {"ranks 0 and 1 were started with different data or settings", "lr = 0.5"});
  check_refusal(over_tcp({train, train + "--lr fast"}, folder.path()),
                {"--lr: expected a number, got 'fast'"});
  check_refusal(over_tcp({train + "--shard zero4", train + "--shard zero4"}, folder.path()),
                {"unknown sharding policy 'zero4'"});
  check_refusal(over_tcp({train + "--ranks 2", train + "--ranks 2"}, folder.path()), {"--ranks"});
  check_refusal(over_tcp({"eval x", "eval x"}, folder.path()), {"works in one process"});
  CHECK(files_under(folder.path()).empty());
  const auto alone = [&](const std::string& variables) {
    return ::run("exec env " + variables + " " + kSherd + " " + train, 20);
  };
  check_refusal(alone("SHERD_RANK=1"), {"SHERD_RANK=1 is set, but not where the ranks meet"});
  check_refusal(alone("SHERD_RENDEZVOUS=127.0.0.1 SHERD_RANK=0 SHERD_WORLD_SIZE=2"),
                {"expected host:port"});
  check_refusal(alone("SHERD_JOIN_SECONDS=1 SHERD_RENDEZVOUS=file:" + folder.path("meet") +
                      " SHERD_RANK=0 SHERD_WORLD_SIZE=3"),
                {"ranks 1, 2 of 3 did not come"});
  CHECK(files_under(folder.path()).empty());
  CHECK(alone("MASTER_ADDR=127.0.0.1 MASTER_PORT=1 RANK=0 WORLD_SIZE=1").status == 0);
  const Output bench = over_tcp(
      std::vector<std::string>(3, "bench comm --max-bytes 16KiB --repeat 2 --json"), folder.path());
  CHECK(bench.status == 0);
  CHECK(contains(bench, "\"ranks\":3,\"automatic\":\"TCP\""));
}

TEST_CASE("ranks: a process over TCP that is killed ends the others, who say so") {
  for (const int killed : {0, 1}) {
    CAPTURE(killed);
    const TempDirectory folder;
    const std::string train = "train " + kEndless + "--log-every 1 --out " + folder.path("run");
    const auto rank = [&](int r) {
      return "export SHERD_RENDEZVOUS=file:" + folder.path("meet") +
             " SHERD_WORLD_SIZE=2 SHERD_RANK=" + std::to_string(r) + "; exec " + kSherd + " " +
             train;
    };
    Child first(rank(0)), second(rank(1));
    CHECK(comes_true([&] {
      return text_of(folder.path("run/log.jsonl")).find("\"step\"") != std::string::npos;
    }));
    kill((killed == 0 ? first : second).pid(), SIGKILL);
    const Output output = (killed == 0 ? second : first).wait(20);
    CHECK_FALSE(output.hung);
    check_refusal(output, {fmt::format("rank {} of 2 (127.0.0.1) has died", killed)});
  }
}

TEST_CASE("ranks: evaluation counts and sums the same on any number of ranks") {
  Runs runs;
  const std::string start = runs.train(kRun + "--epochs 3 --lr 3e-3 --ranks 3");
  const json trained = log_of(start).back();
  const Output eval = sherd_run("eval " + start);
  CHECK(eval.status == 0);
  const auto matches = [&](const json& end) {
    CHECK(
        contains(eval, fmt::format("loss            {:.6f}\n", end.at("test_loss").get<double>())));
    const int correct = static_cast<int>(std::lround(8 * end.at("test_accuracy").get<double>()));
    CHECK(contains(eval, fmt::format("({} of 8)", correct)));
  };
  matches(trained);
  // A step with a rate of nothing keeps the weights.
  const std::string same = kRun + "--weights " + start +
                           "/model.safetensors --max-steps 1 --lr 0 --weight-decay 0 "
                           "--warmup-steps 0 ";
  for (int ranks = 1; ranks <= 4; ++ranks) {
    CAPTURE(ranks);
    const std::string run = runs.train(same + "--ranks " + std::to_string(ranks));
    CHECK(weights_of(run) == weights_of(start));
    const json end = log_of(run).back();
    CHECK(end.at("test_accuracy") == trained.at("test_accuracy"));
    CHECK(end.at("test_loss").get<double>() ==
          doctest::Approx(trained.at("test_loss").get<double>()).epsilon(1e-6));
    matches(end);
  }
}

TEST_CASE("ranks: golden runs are repeated by every policy") {
  const std::string golden = "train --precision fp64 --tolerance 1e-9 --threads 1 --golden " +
                             std::string(SHERD_TEST_DATA) + "/golden/";
  const auto passes = [](const Output& output) {
    CAPTURE(output.text);
    const std::ptrdiff_t steps = contains(output, "golden/cls") ? 8 : 6;
    CHECK(output.status == 0);
    CHECK(contains(output, "\npassed\n"));
    CHECK(contains(output, "final weights"));
    // Said by one rank alone.
    CHECK(output.text.find("golden run") == output.text.rfind("golden run"));
    CHECK(std::ranges::count(output.text, '\n') == 6 + steps);
  };
  for (const std::string name : {"cls", "mean"}) {
    for (const int ranks : {2, 4}) {
      for (const std::string policy : {"none", "zero1", "zero2", "grad_op", "zero3", "hybrid"}) {
        std::string arguments = golden + name + " --shard " + policy;
        if (policy == "hybrid")
          arguments += " --mesh replicate=2,shard=" + std::to_string(ranks / 2);
        passes(sherd_run(arguments + " --ranks " + std::to_string(ranks)));
        if (have_mpi() && name == "cls" && ranks == 4) passes(on_processes(ranks, arguments));
      }
      if (have_mpi()) passes(on_processes(ranks, golden + name));
    }
  }
  refused_on(3, "train --golden /nonexistent", {"rank ", "/nonexistent/golden.json"});
}

TEST_CASE("ranks: the configuration of a sharded run repeats it, as threads or as processes") {
  Runs runs;
  const std::string first = runs.train(
      kUneven + "--ranks 3 --shard zero2 --unit params:500 --micro-batch 2 --reduce-every micro");
  const std::string again = runs.train(first + "/config.toml");
  CHECK(weights_of(again) == weights_of(first));
  CHECK(text_of(again + "/config.toml") == text_of(first + "/config.toml"));
  CHECK(sherd_run("eval " + again).status == 0);
  if (!have_mpi()) return;
  CHECK(weights_of(runs.train(first + "/config.toml", 3)) == weights_of(first));
  const std::string launched = runs.train(kUneven, 2);
  CHECK(text_of(launched + "/config.toml").find("\nranks = 2\n") != std::string::npos);
  CHECK(weights_of(runs.train(launched + "/config.toml")) == weights_of(launched));
  check_refusal(on_processes(2, "train " + first + "/config.toml"), {"--ranks 3", "2 processes"});
}

namespace {

// What the ranks of a trace are: each has every step, with its work, inside the others' steps.
void check_trace(const std::string& path, std::size_t ranks, std::size_t steps) {
  CAPTURE(path);
  const TraceFile file = read_trace(path);
  CHECK(file.incomplete.empty());
  REQUIRE(file.ranks.size() == ranks);
  std::vector<std::vector<TracedStep>> all;
  for (const TraceFile::Rank& rank : file.ranks) {
    all.push_back(steps_of(file, rank));
    REQUIRE(all.back().size() == steps);
    CHECK(rank.clock_offset == 0.0);
    CHECK((rank.clock_uncertainty > 0.0) == (rank.rank > 0));
    CHECK(rank.dropped == 0);
  }
  // Who calls a collective last lets the others go on: it lies inside all of their calls.
  const auto overlap = [](double start, double end, double other_start, double other_end) {
    CHECK(start < other_end);
    CHECK(other_start < end);
  };
  for (const std::vector<TracedStep>& rank : all) {
    for (std::size_t i = 0; i < steps; ++i) {
      const TracedStep &step = rank[i], &first = all[0][i];
      REQUIRE(step.note.has_value());
      CHECK(step.number == all[0][i].number);
      CHECK(step.note->samples == 16);
      overlap(step.start, step.start + step.duration, first.start, first.start + first.duration);
      const std::vector<TraceFile::Event>& calls = step.tracks.at("communication stream").events;
      const auto& theirs = first.tracks.at("communication stream").events;
      CHECK(calls.size() > 3);
      REQUIRE(calls.size() == theirs.size());
      for (std::size_t c = 0; c < calls.size(); ++c) {
        CHECK(calls[c].name == theirs[c].name);
        overlap(calls[c].start, calls[c].end(), theirs[c].start, theirs[c].end());
      }
      std::set<std::string> names;
      for (const auto& event : step.tracks.at("main").events) names.insert(file.text(event.name));
      CHECK(names.contains("gradient_norm"));
      CHECK(names.contains("blocks.1"));
    }
  }
  // A run beside itself is what was planned, if anything is.
  const Comparison same = compare(file, file);
  CHECK(same.compared_steps() > 0);
  CHECK(std::ranges::all_of(same.steps, [](const Comparison::Step& step) {
    return !step.left_out.empty() || step.same_events;
  }));
}

}  // namespace

TEST_CASE("ranks: a trace is one file of all ranks, on one line of time") {
  const TempDirectory folder;
  const auto command = [&](const std::string& name) {
    return "train " + kRun + "--out " + folder.path(name) + " --trace " +
           folder.path(name + ".json");
  };
  CHECK(sherd_run(command("two") + " --ranks 2").status == 0);
  check_trace(folder.path("two.json"), 2, 4);
  CHECK(sherd_run(command("three") + " --ranks 3").status == 0);
  check_trace(folder.path("three.json"), 3, 4);
  CHECK(sherd_run("bench step " + kModel +
                  "--batch-size 16 --steps 1 --warmup 0 --matrix 0 --trace " +
                  folder.path("bench.json") + " --ranks 2")
            .status == 0);
  check_trace(folder.path("bench.json"), 2, 3);
  CHECK(over_tcp(std::vector<std::string>(3, command("tcp")), folder.path()).status == 0);
  check_trace(folder.path("tcp.json"), 3, 4);
  CHECK_FALSE(std::filesystem::exists(folder.path("tcp-rank1.json")));
  check_refusal(over_tcp({command("other"), "train " + kRun + "--out " + folder.path("other")},
                         folder.path()),
                {"no --trace", "a --trace"});
  CHECK_FALSE(std::filesystem::exists(folder.path("other.json")));
  if (!have_mpi()) return;
  CHECK(on_processes(3, command("processes")).status == 0);
  check_trace(folder.path("processes.json"), 3, 4);
}

TEST_CASE("ranks: of a run that fails each rank keeps its own part of the trace") {
  const TempDirectory folder;
  // Never in place of another's file.
  put_file(folder.path("processes-rank1.json"), bytes_of("mine"));
  for (const bool processes : {false, true}) {
    if (processes && !have_mpi()) continue;
    const std::string name = processes ? "processes" : "threads";
    const std::string command = SHERD_FAILING_PROGRAM " train " + kRun + "--out " +
                                folder.path(name) + " --trace " + folder.path(name + ".json");
    const Output output =
        processes ? run(kMpiexec + "2 " + command) : run("exec " + command + " --ranks 2");
    check_refusal(output, {"rank 1: this rank has had enough"});
    for (const int rank : {0, 1}) {
      if (processes && rank == 1) continue;
      CAPTURE(rank);
      const TraceFile file = read_trace(trace_part_path(folder.path(name + ".json"), rank));
      CHECK(file.incomplete.find("this rank has had enough") != std::string::npos);
      REQUIRE(file.ranks.size() == 1);
      CHECK(file.ranks[0].rank == rank);
      CHECK(steps_of(file, file.ranks[0]).size() == 3);  // the last one up to the error
    }
  }
  CHECK(text_of(folder.path("processes-rank1.json")) == "mine");

  // All know of it: the weights are no longer finite. So they write one file.
  const Output output = sherd_run("train " + kRun + "--out " + folder.path("together") +
                                  " --trace " + folder.path("together.json") +
                                  " --ranks 2 --lr 1e30 --clip-grad-norm 0 --warmup-steps 0");
  check_refusal(output, {"not finite"});
  CHECK(read_trace(folder.path("together.json")).ranks.size() == 2);
  CHECK_FALSE(std::filesystem::exists(folder.path("together-rank1.json")));
}

namespace {

// A run that goes on until something happens to it.
class Endless {
 public:
  // processes: 0 for two threads.
  // before: of the shell; as: the start of another command.
  explicit Endless(int processes, const std::string& arguments = "", const std::string& before = "",
                   const std::string& as = "")
      : child_(command(processes, arguments, before, as)) {
    CHECK(comes_true([&] {
      return text_of(path("run/log.jsonl")).find("\"step\"") != std::string::npos &&
             (processes == 0 || std::filesystem::exists(pid_file(processes - 1)));
    }));
  }
  Child& child() { return child_; }
  std::string path(const std::string& name) const { return folder_.path(name); }
  pid_t rank(int rank) const { return std::stoi(text_of(pid_file(rank))); }

 private:
  std::string pid_file(int rank) const { return path("pid" + std::to_string(rank)); }
  std::string command(int processes, const std::string& arguments, const std::string& before,
                      const std::string& as) {
    std::filesystem::permissions(path(""), std::filesystem::perms::all);  // of another user too
    const std::string train = "train " + kEndless + arguments + " --out " + path("run");
    if (processes == 0) return before + "exec " + as + kSherd + " " + train + " --ranks 2";
    return before + "exec " + as + kMpiexec.substr(kMpiexec.find("exec") + 5) +
           std::to_string(processes) + " sh -c 'echo $$ >" + path("pid") + "$PMI_RANK; exec " +
           kSherd + " " + train + "'";
  }

  TempDirectory folder_;
  Child child_;
};

void check_stopped(Endless& run, const Output& output) {
  CAPTURE(output.text);
  CHECK_FALSE(output.hung);
  CHECK(output.err.empty());
  CHECK(contains(output, "stopped by a signal after"));
  CHECK(output.text.find("stopped by") == output.text.rfind("stopped by"));
  CHECK(files_under(run.path("run")) == Names{"config.toml", "log.jsonl", "model.safetensors"});
  const std::vector<json> log = log_of(run.path("run"));
  CHECK(log.back().at("stopped") == true);
  CHECK(events(log, "start").size() == 1);
  CHECK(events(log, "end").size() == 1);
  std::set<std::int64_t> seen;
  for (const json& epoch : events(log, "epoch")) {
    CHECK(epoch.at("train_loss").get<double>() > 0.0);  // an epoch of no step is none
    CHECK(seen.insert(epoch.at("epoch").get<std::int64_t>()).second);
  }
  CHECK(sherd_run("eval " + run.path("run")).status == 0);
}

}  // namespace

TEST_CASE("ranks: a signal ends the run with its weights saved once") {
  {
    Endless run(0, "--log-every 1");
    kill(run.child().pid(), SIGTERM);
    const Output output = run.child().wait(30);
    CHECK(output.status == 130);
    check_stopped(run, output);
  }
  if (!have_mpi()) return;
  {
    Endless run(2, "--log-every 1");
    kill(run.child().pid(), SIGTERM);  // hydra passes it on, and ends with a status of its own
    check_stopped(run, run.child().wait(30));
  }
  for (const int rank : {0, 1}) {
    CAPTURE(rank);
    Endless run(2, "--log-every 1");
    kill(run.rank(rank), SIGTERM);
    const Output output = run.child().wait(30);
    CHECK(output.status == 130);
    check_stopped(run, output);
  }
}

TEST_CASE("ranks: a process that is killed ends all, and leaves no half of a weights file") {
  if (!have_mpi()) return;
  for (const int rank : {0, 2}) {
    CAPTURE(rank);
    Endless run(3, "--log-every 1");
    const pid_t other = run.rank(1);
    kill(run.rank(rank), SIGKILL);
    const Output output = run.child().wait(20);
    CHECK_FALSE(output.hung);
    CHECK(output.status != 0);
    CHECK(files_under(run.path("run")) == Names{"config.toml", "log.jsonl"});
    CHECK(comes_true([&] { return kill(other, 0) != 0; }, 10));
  }
}

namespace {

void limit(pid_t process, decltype(RLIMIT_FSIZE) what, std::size_t bytes) {
  const rlimit both{bytes, bytes};
  CHECK(prlimit(process, what, &both, nullptr) == 0);
}

// A file that may not grow is a full disk that needs no permission to make.
const std::string kFullDisk = "trap '' XFSZ; ";

}  // namespace

TEST_CASE("ranks: where the log's disk is full the run ends with its weights saved") {
  const auto check = [](Endless& run, pid_t first) {
    limit(first, RLIMIT_FSIZE, 48 << 10);
    const Output output = run.child().wait(60);
    CHECK_FALSE(output.hung);
    const std::string rescue = run.path("run/model-before-error.safetensors");
    check_refusal(output, {"rank 0: cannot write '" + run.path("run/log.jsonl"), "File too large",
                           "the weights after", "are in " + rescue});
    CHECK(files_under(run.path("run")) ==
          Names{"config.toml", "log.jsonl", "model-before-error.safetensors"});
    CHECK(sherd_run("eval " + run.path("run") + " --weights " + rescue).status == 0);
  };
  {
    Endless run(0, "--log-every 1", kFullDisk);
    check(run, run.child().pid());
  }
  if (!have_mpi()) return;
  Endless run(2, "--log-every 1", kFullDisk);
  check(run, run.rank(0));
}

TEST_CASE("ranks: weights that cannot be written at the end are an error of all") {
  const auto check = [](Endless& run, pid_t first, pid_t stop) {
    limit(first, RLIMIT_FSIZE, 12 << 10);
    kill(stop, SIGTERM);
    const Output output = run.child().wait(60);
    CHECK_FALSE(output.hung);
    check_refusal(output, {"rank 0: cannot write '" + run.path("run/model.safetensors"),
                           "File too large", "the weights could not be saved"});
    CHECK(files_under(run.path("run")) == Names{"config.toml", "log.jsonl"});
  };
  // One epoch without an end, so that the log hardly grows.
  const std::string quiet = "--log-every 1000 --images 1000000 ";
  {
    Endless run(0, quiet, kFullDisk);
    check(run, run.child().pid(), run.child().pid());
  }
  if (!have_mpi()) return;
  Endless run(2, quiet, kFullDisk);
  check(run, run.rank(0), run.rank(1));
}

TEST_CASE("ranks: a loader that fails on one rank ends all, with its message and the weights") {
  // A process that may start no more threads cannot begin its next evaluation. Root always may.
  std::string nobody;
  if (geteuid() == 0) {
    nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups ";
    if (std::system((nobody + "test -x " + kSherd + " 2>/dev/null").c_str()) != 0) {
      MESSAGE("skipped: root cannot run ", kSherd, " as another user here");
      return;
    }
  }
  const auto check = [&](Endless& run, pid_t process, const std::string& rank) {
    const Output limited =
        ::run("exec " + nobody + "prlimit --nproc=0:0 --pid " + std::to_string(process));
    REQUIRE_MESSAGE(limited.status == 0, limited.text);
    const Output output = run.child().wait(60);
    CHECK_FALSE(output.hung);
    const std::string rescue = run.path("run/model-before-error.safetensors");
    check_refusal(output, {rank, "batch loader: cannot start worker 1 of 2", "the weights after",
                           "are in " + rescue});
    CHECK(files_under(run.path("run")) ==
          Names{"config.toml", "log.jsonl", "model-before-error.safetensors"});
    CHECK(sherd_run("eval " + run.path("run") + " --weights " + rescue).status == 0);
  };
  const std::string arguments = "--log-every 1 --workers 2";
  {
    // LeakSanitizer, in builds that have it, needs a thread of its own at the end.
    Endless run(0, arguments, "export ASAN_OPTIONS=\"$ASAN_OPTIONS:detect_leaks=0\"; ", nobody);
    check(run, run.child().pid(), "rank ");
  }
  if (!have_mpi()) return;
  Endless run(3, arguments, "", nobody);
  check(run, run.rank(1), "rank 1: ");
}

TEST_CASE("ranks: one that fails alone ends all, who keep the weights where each has them") {
  const TempDirectory folder;
  const std::string train = "train " + kRun + "--schedule constant --warmup-steps 0 --out ";
  CHECK(sherd_run(train + folder.path("two") + " --max-steps 2 --ranks 2").status == 0);
  const std::string weights = weights_of(folder.path("two"));
  for (const std::string policy : {"none", "zero1", "zero2", "grad_op", "zero3", "hybrid"}) {
    for (const bool processes : {false, true}) {
      if (processes && !have_mpi()) continue;
      CAPTURE(policy);
      CAPTURE(processes);
      const std::string out = folder.path(policy + (processes ? "-processes" : "-threads"));
      std::string command = SHERD_FAILING_PROGRAM " " + train + out;
      command += " --shard " + policy;
      if (policy == "hybrid") command += " --mesh replicate=1,shard=2";
      const Output output =
          processes ? ::run(kMpiexec + "2 " + command) : ::run("exec " + command + " --ranks 2");
      const std::string rescue = out + "/model-before-error.safetensors";
      Names files{"config.toml", "log.jsonl"};
      if (policy == "none" || policy == "zero1" || policy == "zero2") {
        check_refusal(output, {"rank 1: this rank has had enough",
                               "(the weights after 2 steps are in " + rescue + ")"});
        files.emplace_back("model-before-error.safetensors");
        CHECK(text_of(rescue) == weights);
      } else {
        check_refusal(output, {"rank 1: this rank has had enough",
                               "(the weights of 2 steps are lost, they were spread over ranks that "
                               "have stopped)"});
      }
      CHECK(files_under(out) == files);
    }
  }
}

TEST_CASE("ranks: a loss that is not finite names the layer and saves the weights") {
  const TempDirectory folder;
  int count = 0;
  const std::string arguments = "train " + kRun + "--lr 1e30 --clip-grad-norm 0 --warmup-steps 0 ";
  for (const std::string policy : {"none", "zero2", "zero3"}) {
    for (const bool processes : {false, true}) {
      if (processes && !have_mpi()) continue;
      const std::string out = folder.path("run" + std::to_string(count++));
      const std::string all = arguments + "--shard " + policy + " --out " + out;
      const Output output = processes ? on_processes(3, all) : sherd_run(all + " --ranks 3");
      const std::string rescue = out + "/model-before-error.safetensors";
      check_refusal(output, {"step 1: the loss is not finite", "first seen in the output of layer ",
                             "lower learning rate", "the weights after 1 step are in " + rescue});
      CHECK(files_under(out) ==
            Names{"config.toml", "log.jsonl", "model-before-error.safetensors"});
      CHECK(sherd_run("inspect weights " + rescue).status == 0);
    }
  }
}

TEST_CASE("ranks: what cannot be honoured is one message, and leaves no file") {
  const TempDirectory folder;
  const std::string out = "--out " + folder.path("run") + " ";
  const std::string run = "train " + kRun + out;
  refused_on(3, run + "--batchsize 3", {"unknown flag '--batchsize'", "'--batch-size'"});
  refused_on(3, run + "--shard zero4", {"unknown sharding policy 'zero4'"});
  refused_on(3, run + "--shard hybrid", {"--mesh"});
  refused_on(3, run + "--shard hybrid --mesh replicate=2,shard=2",
             {"--mesh replicate=2,shard=2", "multiply to 4 ranks, there are 3"});
  refused_on(3, run + "--mesh replicate=3,sharp=1 --shard hybrid", {"sharp"});
  refused_on(3, run + "--unit blocks", {"--unit", "params:N", "'blocks'"});
  refused_on(3, run + "--unit params:0", {"--unit"});
  refused_on(3, run + "--reshard-after-forward 2", {"--reshard-after-forward 2", "divide the 3"});
  refused_on(3, run + "--reshard-after-forward maybe", {"--reshard-after-forward", "maybe"});
  refused_on(3, run + "--prefetch -1", {"--prefetch", "-1"});
  refused_on(3, run + "--persist-below -1", {"--persist-below", "-1"});
  refused_on(3, run + "--reduce-every micro", {"--reduce-every", "--micro-batch"});
  refused_on(3, run + "--batch-size 2",
             {"--batch-size 2: fewer samples than the 3 ranks that share them"});
  refused_on(3, run + "--micro-batch 7",
             {"--micro-batch 7: a rank has only 6 samples", "batch of 16 / 3 ranks"});
  refused_on(3, run + "--memory-limit 20KiB",
             {"out of memory before the start", "20.0 KiB", "on each rank", "lower --batch-size"});
  refused_on(3, run + "--weights " + folder.path("none"), {"cannot open '" + folder.path("none")});
  refused_on(3, run + "--trace " + folder.path("none/t.json"), {"none/t.json"});
  refused_on(3, "train " + kRun + "--out /proc/none", {"/proc/none: cannot make the folder"});
  refuses(run + "--ranks 0", {"--ranks: expected 1 to 4096, got 0"});
  refuses(run + "--ranks -2", {"--ranks"});
  refuses(run + "--ranks two", {"--ranks: expected a whole number, got 'two'"});
  refuses(run + "--ranks 17", {"--batch-size 16: fewer samples than the 17 ranks"});
  CHECK(files_under(folder.path()).empty());
}

TEST_CASE("ranks: what is in the folder already stays; of two runs into one folder one succeeds") {
  Runs runs;
  const std::string there = runs.train(kRun + "--ranks 2");
  const std::string weights = weights_of(there), log = text_of(there + "/log.jsonl");
  refused_on(2, "train " + kRun + "--out " + there, {"is there already", "nothing was changed"});
  CHECK(weights_of(there) == weights);
  CHECK(text_of(there + "/log.jsonl") == log);
  for (const bool processes : {false, true}) {
    if (processes && !have_mpi()) continue;
    const std::string out = runs.path(processes ? "processes" : "threads");
    const std::string command =
        processes ? kMpiexec + "2 " + kSherd + " train " + kRun + "--out " + out
                  : "exec " + kSherd + " train " + kRun + "--ranks 2 --out " + out;
    Child one(command), two(command);
    const Output first = one.wait(60), second = two.wait(60);
    CHECK(first.status + second.status == 1);
    check_refusal(first.status != 0 ? first : second, {"is there already"});
    CHECK(files_under(out) == Names{"config.toml", "log.jsonl", "model.safetensors"});
    CHECK(weights_of(out) == weights);
    CHECK(events(log_of(out), "end").size() == 1);
  }
}

TEST_CASE("ranks: a launcher and this program must agree on the ranks") {
  const TempDirectory folder;
  const std::string run = "train " + kRun + "--out " + folder.path("run");
  const auto launched = [&](const std::string& variables, const std::string& arguments = "") {
    return ::run("exec env " + variables + " " + kSherd + " " + run + arguments, 20);
  };
  // Left behind by another launcher, or set by hand.
  for (const char* variables : {"PMI_RANK=0 PMI_SIZE=4", "PMI_RANK=3 PMI_SIZE=4",
                                "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4",
                                "SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4"}) {
    CAPTURE(variables);
    const Output output = launched(variables);
    CHECK(output.seconds < 10.0);
    if (mpi_built()) {
      check_refusal(output, {"started 4 ranks, but MPI sees 1", "mpiexec of MPICH"});
    } else {
      check_refusal(output, {"started 4 processes, but this build has no MPI", "-Dmpi=enabled",
                             "--ranks 4 without a launcher"});
    }
  }
  check_refusal(::run("exec env PMI_RANK=0 PMI_SIZE=4 " + kSherd + " eval " + folder.path()),
                {mpi_built() ? "MPI sees 1" : "works in one process"});
  CHECK(files_under(folder.path()).empty());
  // One process is no launcher's.
  CHECK(launched("PMI_RANK=0 PMI_SIZE=1", " --ranks 2").status == 0);
  std::filesystem::remove_all(folder.path("run"));
  if (!have_mpi()) return;
  check_refusal(
      on_processes(3, run + " --ranks 2"),
      {"--ranks: makes threads of one process, but a launcher started several processes"});
  const auto two = [&](const std::string& more) {
    return ::run(kMpiexec + "1 " + kSherd + " " + run + " : -n 2 " + kSherd + " " + run + more);
  };
  check_refusal(two(" --lr 0.5"), {"ranks 0 and 1 were started with different data or settings",
                                   "rank 0 has lr = 0.001; rank 1 has lr = 0.5"});
  check_refusal(two(" --seed 7"), {"rank 0 has seed = 0; rank 1 has seed = 7"});
  check_refusal(two(" --shard zero2"), {"ranks 0 and 1"});
  check_refusal(two(" --depth 1"), {"rank 0 has depth = 2; rank 1 has depth = 1"});
  check_refusal(two(" --images 72"), {"ranks 0 and 1", "64 training and 8 test images",
                                      "72 training and 9 test images"});
  check_refusal(two(" --lr fast"), {"--lr: expected a number, got 'fast'"});
  check_refusal(two(" --micro-batch 9"), {"--micro-batch 9"});
  // Of commands whose ranks would wait for each other in different groups.
  const auto differ = [&](const std::string& arguments, const std::string& more) {
    return ::run(kMpiexec + "1 " + kSherd + " " + arguments + " : -n 2 " + kSherd + " " +
                 arguments + more);
  };
  const std::string bench = "bench step " + kModel + "--batch-size 16 --matrix 64 ";
  check_refusal(differ(bench + "--steps 3", " --warmup 5"), {"rank 1 has --steps 3 --warmup 5"});
  check_refusal(differ(bench, " --batch-size 8"), {"batch_size = 16", "batch_size = 8"});
  check_refusal(differ("bench comm --repeat 2", " --max-bytes 8KiB"),
                {"rank 0 has --max-bytes 64MiB", "rank 1 has --max-bytes 8KiB"});
  const std::string golden = std::string("train --precision fp64 --golden ") + SHERD_TEST_DATA;
  check_refusal(::run(kMpiexec + "1 " + kSherd + " " + golden + "/golden/cls : -n 1 " + kSherd +
                      " " + golden + "/golden/mean"),
                {"ranks 0 and 1 were started with different data"});
  check_refusal(differ(golden + "/golden/cls", " --precision fp32"), {"a golden run in f"});
  for (const char* one : {"eval ", "inspect model ", "bench step --device meta "}) {
    check_refusal(on_processes(3, one), {"works in one process, but a launcher started several"});
  }
  CHECK(files_under(folder.path()).empty());
  for (const auto& [arguments, status] : {std::pair{"--version", 0}, {"--help", 0}, {"bench", 2}}) {
    const Output many = on_processes(3, arguments), one = sherd_run(arguments);
    CHECK(many.status == status);
    CHECK(many.text == one.text);
  }
}

namespace {

std::int64_t number_of(std::string digits) {
  std::erase(digits, ',');
  return std::stoll(digits);
}

struct UnitRow {
  std::string name;
  std::int64_t parameters, padded, shard;
};

// The table at the end of `inspect events`.
std::vector<UnitRow> unit_rows(const Output& output) {
  std::istringstream lines(output.out);
  std::vector<UnitRow> rows;
  bool table = false;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name, parameters, padded, shard;
    if (table && words >> name >> parameters >> padded >> shard) {
      rows.push_back({name, number_of(parameters), number_of(padded), number_of(shard)});
    }
    table = table || line.starts_with("unit ");
  }
  return rows;
}

const std::string kStep = kModel + "--batch-size 16 ";
// kModel without what `inspect events` has no use for.
const std::string kShape =
    "--dataset synthetic --image-size 1x8x8 --classes 3 --patch 4 --dim 16 --depth 2 --heads 2 ";

json json_of(const Output& output) {
  CAPTURE(output.text);
  CHECK(output.status == 0);
  CHECK(output.err.empty());
  CHECK(std::ranges::count(output.out, '\n') == 1);
  const json line = json::parse(output.out, nullptr, false);
  REQUIRE(line.is_object());
  return line;
}

}  // namespace

TEST_CASE("inspect events lists what a step does, and its sizes are what a rank sends") {
  for (const int ranks : {1, 3, 4, 512}) {
    CAPTURE(ranks);
    const std::string arguments =
        kShape + "--batch-size 512 --shard zero3 --ranks " + std::to_string(ranks);
    const Output listed = sherd_run("inspect events " + arguments);
    CHECK(listed.status == 0);
    CHECK(contains(listed, fmt::format("rank 0 of {} rank", ranks)));
    const std::vector<UnitRow> rows = unit_rows(listed);
    REQUIRE(rows.size() == 3);
    std::int64_t parameters = 0, padded = 0;
    for (const UnitRow& row : rows) {
      CHECK(row.padded >= row.parameters);
      CHECK(row.padded == row.shard * ranks);
      parameters += row.parameters;
      padded += row.padded;
      if (ranks > 1) {
        for (const char* kind : {"wait ", "forward ", "backward ", "reshard ", "reduce "}) {
          CHECK(contains(listed, kind + row.name + "\n"));
        }
      }
    }
    const json plan = json_of(sherd_run("bench step --device meta --json " + arguments));
    CHECK(plan.at("device") == "meta");
    CHECK(plan.at("ranks") == ranks);
    CHECK(plan.at("sharding") == "zero3");
    CHECK(plan.at("batch_size") == 512);
    CHECK(plan.at("parameters") == parameters);
    CHECK(plan.at("peak_bytes").get<std::int64_t>() > 0);
    // Two exact sums and a count for each of the 32 parameters on which all agree.
    const std::int64_t message = (2 * ExactSum::kWords + 32) * 8;
    CHECK(plan.at("sent_bytes_per_step") ==
          3 * 4 * padded / ranks * (ranks - 1) + 2 * message * (ranks - 1) / ranks);
  }
  refuses("inspect events " + kShape + "--ranks 4 --batch-size 3", {"--batch-size 3", "4 ranks"});
  refuses("inspect events " + kShape + "--ranks 0", {"--ranks"});
}

TEST_CASE("bench step on ranks: what is measured is what is planned") {
  const std::string step = "bench step " + kStep + "--steps 3 --warmup 1 --matrix 64 ";
  for (const std::string policy : {"none", "zero2", "zero3"}) {
    const std::string sharded = "--ranks 2 --shard " + policy;
    const json real = json_of(sherd_run(step + sharded + " --json"));
    const json plan = json_of(sherd_run("bench step " + kStep + "--device meta --json " + sharded));
    for (const char* same : {"ranks", "sharding", "parameters", "batch_size", "peak_bytes",
                             "collectives_per_step", "sent_bytes_per_step"}) {
      CAPTURE(policy);
      CAPTURE(same);
      CHECK(real.at(same) == plan.at(same));
    }
    for (const char* positive : {"seconds_per_step", "images_per_second", "flops_per_second",
                                 "matrix_flops_per_second", "peak_resident_bytes"}) {
      CHECK(real.at(positive).get<double>() > 0.0);
    }
    CHECK(real.at("seconds_fastest") <= real.at("seconds_per_step"));
    CHECK(real.at("exposed_seconds_per_step").get<double>() >= 0.0);
  }
  const json slow =
      json_of(sherd_run(step + "--ranks 2 --shard zero3 --prefetch 0 --comm-delay 0.005 --json"));
  CHECK(slow.at("exposed_seconds_per_step").get<double>() > 0.005);
  CHECK(slow.at("seconds_slowest") > slow.at("exposed_seconds_per_step"));
  const Output words = sherd_run(step + "--ranks 2");
  for (const char* piece : {"2 ranks as threads, zero3", "collectives a step", "exposed", "a rank"})
    CHECK(contains(words, piece));
  refuses(step + "--comm-delay 0.1", {"--comm-delay", "several ranks"});
  refuses(step + "--ranks 2 --comm-delay -1", {"--comm-delay"});
  if (!have_mpi()) return;
  const json processes = json_of(on_processes(2, step + "--shard zero3 --json"));
  CHECK(processes.at("ranks") == 2);
  CHECK(processes.at("sent_bytes_per_step") == slow.at("sent_bytes_per_step"));
}

TEST_CASE("bench comm times each collective at each size") {
  const auto check = [](const json& report, const std::set<std::string>& transports) {
    CHECK(report.at("ranks") == 2);
    std::set<std::string> kinds, seen;
    for (const json& call : report.at("calls")) {
      kinds.insert(call.at("collective").get<std::string>());
      seen.insert(call.at("transport").get<std::string>());
      CHECK((call.at("bytes") == 4096 || call.at("bytes") == 16384));
      CHECK(call.at("seconds").get<double>() > 0.0);
      CHECK(call.at("memcpy_bytes_per_second").get<double>() > 0.0);
    }
    CHECK(kinds == std::set<std::string>{"all_gather", "reduce_scatter", "all_reduce"});
    CHECK(seen == transports);
    CHECK(report.at("calls").size() == 6 * transports.size());
    for (const std::string& transport : transports)
      CHECK(report.at("empty_call_seconds").at(transport).get<double>() > 0.0);
  };
  const std::string comm = "bench comm --max-bytes 16KiB --repeat 3 --json";
  check(json_of(sherd_run(comm + " --ranks 2")), {"threads"});
  if (have_mpi()) check(json_of(on_processes(2, comm)), {"shared", "messages"});
}
