// SPDX-License-Identifier: Apache-2.0
// `sherd plan`, `sherd bench calibrate` and `sherd bench plan` as commands.
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "cli_support.h"

using namespace sherd::test;
using json = nlohmann::json;

namespace {

bool says(const Output& output, const std::string& piece) {
  return output.text.find(piece) != std::string::npos;
}

const std::string kSmall =
    " --dataset synthetic --image-size 3x32x32 --classes 4 --patch 8 --dim 64 --depth 2 --heads 4 "
    "--batch-size 8 --threads 1 ";

}  // namespace

TEST_CASE("cli: plan tells memory, traffic and units of any number of ranks") {
  const TempDirectory folder;
  const Output text = sherd_run(
      "plan --preset vit_huge_patch14_224 --world 512 --batch-size 512 "
      "--shard zero3 --precision bf16");
  REQUIRE_MESSAGE(text.status == 0, text.text);
  for (const char* piece : {"512 ranks, zero3", "peak memory", "reached in", "reduce_scatter",
                            "blocks.31", "nothing was allocated"}) {
    CHECK_MESSAGE(says(text, piece), piece);
  }
  CHECK(!says(text, "images/s"));  // there is no system
  CHECK(!says(text, "does NOT fit"));
  const Output tight = sherd_run(
      "plan --preset vit_base_patch16_224 --batch-size 8 --memory-limit "
      "1GiB");
  CHECK(says(tight, "does NOT fit 1.0 GiB"));
  const Output picture = sherd_run("plan --ranks 2 --timeline " + folder.path("memory.svg"));
  REQUIRE_MESSAGE(picture.status == 0, picture.text);
  const std::string svg = text_of(folder.path("memory.svg"));
  CHECK(svg.starts_with("<svg"));
  CHECK(svg.find("gathered parameters") != std::string::npos);
  const Output output = sherd_run(
      "plan --json --preset vit_base_patch16_224 --ranks 4 --shard "
      "zero3 --batch-size 8 --system dgx-h100 --precision bf16");
  REQUIRE_MESSAGE(output.status == 0, output.text);
  const json plan = json::parse(output.out);
  CHECK(plan["ranks"] == 4);
  CHECK(plan["sharding"] == "zero3");
  CHECK(plan["units"].size() == 13);
  CHECK(plan["events"].size() > 100);
  CHECK(plan["step"]["seconds"].get<double>() > 0.0);
  CHECK(plan["step"]["mfu"].get<double>() < 1.0);
  std::int64_t gathers = 0;
  for (const json& row : plan["collectives"]) {
    if (row["purpose"] == "unshard") gathers += row["calls"].get<std::int64_t>();
  }
  CHECK(gathers == 26);  // 13 units, twice
  // The peak that `bench step` plans by itself.
  const Output step = sherd_run(
      "bench step --json --device meta --dataset synthetic --preset "
      "vit_base_patch16_224 --ranks 4 --shard zero3 --batch-size 8");
  REQUIRE_MESSAGE(step.status == 0, step.text);
  const Output cpu = sherd_run(
      "plan --json --preset vit_base_patch16_224 --ranks 4 --shard zero3 "
      "--batch-size 8");
  CHECK(json::parse(cpu.out)["memory"]["peak_bytes"] == json::parse(step.out)["peak_bytes"]);
}

TEST_CASE("cli: plan of a trillion parameters on 16,384 ranks") {
  const Output output = sherd_run(
      "plan --world 16384 --dim 25600 --depth 128 --heads 160 --image-size 3x224x224 --patch 14 "
      "--mlp-ratio 4 --batch-size 16384 --shard zero3 --precision bf16 --recompute block "
      "--system gb200-nvl72 --json");
  REQUIRE_MESSAGE(output.status == 0, output.text);
  const json plan = json::parse(output.out);
  CHECK(plan["parameters"].get<double>() > 1.0e12);
  CHECK(plan["planned_in_seconds"].get<double>() < 60.0);
}

TEST_CASE("cli: plan --explain walks through the step") {
  const Output output = sherd_run(
      "plan --ranks 4 --shard zero3 --system dgx-a100 --precision bf16 "
      "--explain");
  REQUIRE_MESSAGE(output.status == 0, output.text);
  for (const char* piece :
       {"The model in units", "Between steps", "Forward", "prefetch blocks.1", "Backward",
        "reduce blocks.3", "Update", "Why the peak is where it is", "In time, on dgx-a100",
        "What each option would change", "--shard zero1"}) {
    CHECK_MESSAGE(says(output, piece), piece);
  }
}

TEST_CASE("cli: plan --convention counts as others do") {
  const Output paper = sherd_run("plan --convention zero-paper --parameters 7.5e9 --ranks 64");
  REQUIRE_MESSAGE(paper.status == 0, paper.text);
  for (const char* total : {"120.00", "31.41", "16.64", "1.88"}) CHECK(says(paper, total));
  const Output deepspeed =
      sherd_run("plan --convention deepspeed --parameters 2851e6 --largest-layer 32e6 --ranks 8");
  REQUIRE_MESSAGE(deepspeed.status == 0, deepspeed.text);
  for (const char* total : {"15.93", "6.09"}) CHECK(says(deepspeed, total));
  const Output own = sherd_run("plan --convention sherd --ranks 2");
  CHECK_MESSAGE(own.status == 0, own.text);
}

TEST_CASE("cli: plan --explain says how gradients of each policy are summed") {
  const auto page = [](const std::string& flags) {
    const Output output =
        sherd_run("plan --explain --dataset synthetic --ranks 8 --batch-size 64 " + flags);
    REQUIRE_MESSAGE(output.status == 0, output.text);
    std::string text;  // without line breaks
    std::stringstream words(output.out);
    for (std::string word; words >> word;) text += word + " ";
    return text;
  };
  const auto has = [](const std::string& text, const char* piece) {
    return text.find(piece) != std::string::npos;
  };
  const std::string same = page("--shard none"), rounded = page("--shard none --precision bf16"),
                    hybrid = page("--shard hybrid --mesh replicate=2,shard=4 --micro-batch 4"),
                    gpu = page("--shard zero3 --device cuda"),
                    exact = page("--shard zero3 --device cuda --exact-sums yes");
  CHECK(has(same, "(an all-reduce: each sends twice"));
  CHECK(has(rounded, "(a reduce-scatter and an all-gather of the sums in f32: each sends"));
  CHECK(has(hybrid, "(an all-reduce in f32: each sends twice"));
  CHECK(has(hybrid, "--shard zero1 without --mesh"));
  CHECK(has(hybrid, "--micro-batch 2 "));
  CHECK(has(gpu, "in NCCL's order"));
  for (const std::string* text : {&same, &rounded, &exact}) CHECK(has(*text, "in one fixed tree"));
}

TEST_CASE("cli: plan --auto ranks what fits, and keeps what is given") {
  const Output output = sherd_run(
      "plan --auto --preset vit_huge_patch14_224 --ranks 8 --batch-size 512 --precision "
      "bf16 --system dgx-h100 --memory-limit 8GiB --prefetch 1 --offload-optimizer none");
  REQUIRE_MESSAGE(output.status == 0, output.text);
  CHECK(says(output, "the fastest that fits"));
  CHECK(says(output, "does not fit 8.0 GiB"));
  CHECK(!says(output, "--prefetch 0"));
  // Recomputation that is left to --memory-limit is left to the search.
  const Output left = sherd_run(
      "plan --auto --ranks 4 --batch-size 64 --system dgx-a100 --precision "
      "bf16 --recompute auto");
  CHECK_MESSAGE(says(left, "the fastest that fits"), left.text);
  const Output machine =
      sherd_run("plan --auto --json --ranks 4 --batch-size 64 --system dgx-a100 --precision bf16");
  REQUIRE_MESSAGE(machine.status == 0, machine.text);
  const json choices = json::parse(machine.out)["choices"];
  REQUIRE(choices["ranked"].size() > 5);
  for (std::size_t i = 1; i < choices["ranked"].size(); ++i) {
    CHECK(choices["ranked"][i - 1]["seconds"].get<double>() <=
          choices["ranked"][i]["seconds"].get<double>());
  }
  CHECK(choices["ranked"][0]["seconds"] == json::parse(machine.out)["step"]["seconds"]);
  // A 256th of the batch, once nothing larger fits.
  const Output small = sherd_run("plan --auto --memory-limit 60MiB --system dgx-a100" + kSmall +
                                 "--patch 4 --batch-size 16384 --device cuda");
  REQUIRE_MESSAGE(small.status == 0, small.text);
  CHECK_MESSAGE(says(small, "--micro-batch 64 "), small.text);
  const Output none = sherd_run(
      "plan --auto --preset vit_huge_patch14_224 --ranks 1 --batch-size 512 --precision bf16 "
      "--system dgx-h100 --memory-limit 100MiB");
  CHECK(none.status == 1);
  CHECK(says(none, "combinations fits 100.0 MiB; the smallest is"));
}

TEST_CASE("cli: plan refuses what cannot be, in one line") {
  const TempDirectory folder;
  const auto refused = [](const std::string& arguments, const std::string& message) {
    const Output output = sherd_run("plan " + arguments);
    CAPTURE(arguments);
    CHECK(output.status == 1);
    CHECK_MESSAGE(says(output, message), output.text);
    CHECK(std::ranges::count(output.err, '\n') == 1);
  };
  refused("--system dgx-h10", "did you mean 'dgx-h100'");
  refused("--system " + folder.path("none.json"), "none.json");
  std::ofstream(folder.path("bad.json")) << R"({"name": "x", "about": ["y"], "device": "tpu"})";
  refused("--system " + folder.path("bad.json"), "device is 'tpu': expected cuda, cpu");
  refused("--ranks 6 --shard hybrid --mesh replicate=4,shard=2", "mesh");
  refused("--ranks 0", "--ranks");
  refused("--ranks 2 --world 4", "--world and --ranks are the same");
  refused("--rank 4 --ranks 4", "--rank");
  refused("--world large", "--world: expected INT, got 'large'");
  refused("--world 0", "--world: expected 1 to");
  refused("--weights x", "--weights: has no effect here");
  refused("--convention sherd --parameters nan", "--parameters: expected 1 to 1e15");
  const std::string both = folder.path("both");
  refused("--system dgx-a100 --timeline " + both + " --trace " + both, "is there already");
  CHECK(!std::filesystem::exists(both));
  refused("--dim 50 --heads 4", "heads");
  refused("--auto", "give a --system");
  refused("--auto --system dgx-h100 --dim 50 --heads 4", "heads");
  refused("--explain --json", "--explain: --json would have no effect beside it");
  refused("--convention sherd --system dgx-h100", "--convention: --system would have no effect");
  refused("--published --json", "--published: --json would have no effect");
  refused("--published --depth 3", "--published: has settings of its own");
  refused("--compare x.json --explain --system dgx-a100", "--compare: --explain would have");
  refused("--system dgx-a100 --device cpu", "is of device cuda, and --device says cpu");
  refused("--convention sherd --parameters 1e9 --depth 3", "leave flags of [model] out");
  refused("--convention sherd --largest-layer 1e6", "--largest-layer: needs --parameters");
  std::ofstream(folder.path("mine")) << "mine";
  refused("--system dgx-a100 --trace " + folder.path("mine"), "mine");
  refused("--timeline " + folder.path("mine"), "mine");
  CHECK(text_of(folder.path("mine")) == "mine");
  refused("--trace " + folder.path("t.json"), "give a --system");
  refused("--compare " + folder.path("t.json"), "give a --system");
  refused("--parameters 1e9", "--parameters: needs --convention");
  refused("--convention megatron", "expected sherd, zero-paper or deepspeed");
  refused("--system ac922-v100 --precision bf16", "has no products of bf16");
}

TEST_CASE("cli: a calibrated machine: times, choice, and a trace beside the plan") {
  const TempDirectory folder;
  const std::string system = folder.path("here.json");
  const Output calibrated = sherd_run(
      "bench calibrate --quick --precisions fp32,bf16 --tables "
      "1x1,1x2 --repeat 3 --out " +
      system);
  REQUIRE_MESSAGE(calibrated.status == 0, calibrated.text);
  CHECK(says(calibrated, "1 thread x 2 ranks"));
  // Stopped, it leaves nothing.
  const std::string half = folder.path("half.json");
  Child child("exec " SHERD_PROGRAM " bench calibrate --tables 1x1 --repeat 9 --out " + half);
  CHECK(comes_true([&] { return std::filesystem::exists(half); }));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  kill(child.pid(), SIGINT);
  const Output stopped = child.wait(60.0);
  CHECK_MESSAGE(says(stopped, "stopped by a signal; nothing was written"), stopped.text);
  CHECK(!std::filesystem::exists(half));
  const Output again = sherd_run("bench calibrate --quick --out " + system);
  CHECK(again.status == 1);
  CHECK(says(again, "here.json"));

  // Every kernel of every step has been measured.
  for (const char* flags :
       {"--ranks 2 --shard zero3", "--ranks 2 --shard none",
        "--ranks 2 --shard zero1 --precision bf16", "--recompute block --drop 0.1 --drop-path 0.1",
        "--pooling mean --optimizer sgd", "--activation relu --micro-batch 2",
        "--ranks 2 --shard zero3 --precision bf16 --micro-batch 1 "
        "--reduce-every micro",
        "--offload-optimizer cpu --precision bf16",
        "--recompute selective --offload-activations cpu",
        "--ranks 2 --shard zero3 "
        "--reshard-after-forward 2",
        "--label-smoothing 0.1"}) {
    const Output output = sherd_run("plan --json --system " + system + kSmall + flags);
    CAPTURE(flags);
    REQUIRE_MESSAGE(output.status == 0, output.text);
    CHECK(json::parse(output.out)["step"]["seconds"].get<double>() > 0.0);
  }
  const Output many =
      sherd_run("plan --system " + system + kSmall + "--ranks 512 --batch-size 512");
  CHECK(many.status == 1);
  CHECK_MESSAGE(says(many, "512 ranks, and it is one machine of"), many.text);
  const Output lacking = sherd_run("plan --system " + system + kSmall + "--precision fp64");
  CHECK(lacking.status == 1);
  CHECK(says(lacking, "was measured; make the file again with that type"));

  // The very events of a run, on every rank.
  const std::string settings = kSmall + "--ranks 2 --shard zero3 --depth 3 ";
  const std::string trace = folder.path("run.json");
  const Output run =
      sherd_run("bench step --json --steps 1 --matrix 0 --trace " + trace + settings);
  REQUIRE_MESSAGE(run.status == 0, run.text);
  CHECK(json::parse(run.out)["ranks"] == 2);  // one line, with a trace too
  const Output compared =
      sherd_run("plan --json --system " + system + settings + "--compare " + trace);
  REQUIRE_MESSAGE(compared.status == 0, compared.text);
  const json comparison = json::parse(compared.out);
  CHECK(comparison["differences"].empty());
  const Output larger =
      sherd_run("plan --system " + system + settings + "--batch-size 6 --compare " + trace);
  CHECK(larger.status == 1);
  CHECK_MESSAGE(says(larger, "samples, not 6"), larger.text);
  // Another plan is noticed.
  const Output other =
      sherd_run("plan --json --system " + system + settings + "--prefetch 0 --compare " + trace);
  CHECK(other.status == 1);
  CHECK(!json::parse(other.out)["differences"].empty());
  // And the plan's own trace can be read as one.
  const std::string planned = folder.path("plan.json");
  const Output written = sherd_run("plan --system " + system + settings + "--trace " + planned);
  REQUIRE_MESSAGE(written.status == 0, written.text);
  const Output itself = sherd_run("plan --system " + system + settings + "--compare " + planned);
  CHECK_MESSAGE(itself.status == 0, itself.text);

  const Output chosen =
      sherd_run("train --auto --system " + system + kSmall +
                "--images 16 --epochs 1 --workers 0 --ranks 2 --out " + folder.path("run"));
  REQUIRE_MESSAGE(chosen.status == 0, chosen.text);
  CHECK(says(chosen, "the fastest that fits"));
}

TEST_CASE("cli: calibration of GPUs adds tables to the description of their system") {
  const TempDirectory folder;
  const std::string system = folder.path("gpu.json");
  const std::string calibrate =
      "bench calibrate --device cuda --quick --precisions fp32 --tables 1x1,1x2 --repeat 3 --out " +
      system;
  const Output baseless = sherd_run(calibrate);
  CHECK(baseless.status == 1);
  CHECK(says(baseless, "such as --base dgx-h100"));
  const Output output = sherd_run(calibrate + " --base dgx-a100");
  if (!says(sherd_run("--version"), "emulated CUDA")) {
    // Without GPUs there is nothing to measure, and nothing is left behind.
    CHECK(output.status == 1);
    CHECK(!std::filesystem::exists(system));
    return;
  }
  REQUIRE_MESSAGE(output.status == 0, output.text);
  for (const char* flags : {"--ranks 2 --shard zero3", "--recompute block --drop 0.1",
                            "--pooling mean --optimizer sgd", "--offload-optimizer cpu"}) {
    const Output plan = sherd_run("plan --json --device cuda --system " + system + kSmall + flags);
    CAPTURE(flags);
    REQUIRE_MESSAGE(plan.status == 0, plan.text);
    const json step = json::parse(plan.out)["step"];
    // The emulator is slow, and its times are those of the tables.
    CHECK(step["seconds"].get<double>() > 1e-3);
    CHECK(step["mfu"].get<double>() < 0.01);
  }
  // A trace of GPUs has the times of their streams, of the very events of the plan.
  const std::string settings = kSmall + "--device cuda --ranks 2 --shard zero3 ";
  const std::string trace = folder.path("run.json");
  const Output run = sherd_run("bench step --steps 1 --matrix 0 --trace " + trace + settings);
  REQUIRE_MESSAGE(run.status == 0, run.text);
  const Output compared =
      sherd_run("plan --json --system " + system + settings + "--compare " + trace);
  REQUIRE_MESSAGE(compared.status == 0, compared.text);
  const json comparison = json::parse(compared.out);
  CHECK(comparison["differences"].empty());
  std::set<std::string> tracks;
  for (const json& kind : comparison["kinds"]) tracks.insert(kind["track"]);
  CHECK(tracks == std::set<std::string>{"compute stream", "communication stream of the device"});
}
