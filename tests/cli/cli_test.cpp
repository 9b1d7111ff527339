// SPDX-License-Identifier: Apache-2.0
// The `sherd` program as a user meets it: what it prints, what it refuses, what it leaves behind.
#include <sherd/runtime/cuda/device.h>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "cli_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

// IDX files of four images of 8 x 8.
struct IdxFolder : test::TempDirectory {
  void write(const std::vector<std::uint8_t>& labels = {0, 1, 2, 0}) const {
    for (const char* split : {"train", "t10k"}) {
      test::Bytes images{0, 0, 8, 3, 0, 0, 0, 4, 0, 0, 0, 8, 0, 0, 0, 8},
          all{0, 0, 8, 1, 0, 0, 0, 4};
      for (int i = 0; i < 4 * 64; ++i) images.push_back(static_cast<std::uint8_t>(i));
      all.insert(all.end(), labels.begin(), labels.end());
      test::put_file(images_path(split), images);
      test::put_file(path(std::string(split) + "-labels-idx1-ubyte"), all);
    }
  }
  std::string images_path(const std::string& split) const {
    return path(split + "-images-idx3-ubyte");
  }
  std::string arguments() const {
    return "train --dataset mnist --patch 4 --dim 16 --depth 1 --heads 2 --batch-size 4 --threads "
           "1 "
           "--epochs 1 --data-dir " +
           path() + " --out " + path("run") + " ";
  }
};

}  // namespace

TEST_CASE("cli: help teaches, version tells") {
  const Output top = sherd_run("--help");
  CHECK(top.status == 0);
  for (const char* word : {"train", "eval", "inspect", "bench", "sherd train run.toml"})
    CHECK(contains(top, word));
  const Output train = sherd_run("train --help");
  CHECK(train.status == 0);
  for (const char* word : {"--batch-size", "--golden", "[model]", "--lr NUMBER", "[0.001]"})
    CHECK(contains(train, word));
  CHECK(contains(sherd_run("--version"), "sherd 0."));
  CHECK(sherd_run("").status == 2);
  CHECK(sherd_run("bench").status == 2);
  CHECK(contains(sherd_run("bench"), "step"));
  CHECK(contains(sherd_run("bench comm --help"), "mpiexec -n 4 sherd bench comm"));
  const Output comm = sherd_run("bench comm --ranks 3 --max-bytes 16KiB --repeat 2");
  CHECK(comm.status == 0);
  CHECK(contains(comm, "reduce_scatter"));
  CHECK(contains(comm, "an empty call (compare, meet) takes"));
  CHECK(contains(sherd_run("bench comm --ranks 2 --max-bytes 4KiB --repeat 1 --json"),
                 "\"automatic\":\"threads\""));
  CHECK(sherd_run("inspect").status == 2);
}

TEST_CASE("cli: train, eval, inspect and bench work together") {
  const test::TempDirectory folder;
  const std::string out = folder.path("run");
  const Output train = sherd_run("train " + kTiny + "--epochs 6 --lr 3e-3 --out " + out +
                                 " --trace " + folder.path("trace.json"));
  CHECK(train.status == 0);
  for (const char* word : {"test accuracy", "images/s", "peak memory", "model.safetensors",
                           "log.jsonl", "config.toml"}) {
    CHECK_MESSAGE(contains(train, word), train.text);
  }
  CHECK(std::filesystem::file_size(folder.path("trace.json")) > 1000);
  const Output eval = sherd_run("eval " + out);
  CHECK(eval.status == 0);
  // The same accuracy as the run printed.
  const auto at = train.text.find("test accuracy   ") + 16;
  CHECK(contains(eval, "top-1           " + train.text.substr(at, train.text.find('%', at) - at)));
  CHECK(contains(sherd_run("inspect weights " + out + "/model.safetensors"),
                 "blocks.0.attn.qkv.weight"));
  CHECK(contains(sherd_run("inspect model"), "vit_huge_patch14_224"));
  CHECK(contains(sherd_run("inspect model vit_large_patch16_224 --classes 101"),
                 "303,405,157 parameters"));
  const Output bench = sherd_run("bench step " + kTinyModel + "--steps 2 --matrix 128");
  CHECK(bench.status == 0);
  CHECK(contains(bench, "limit"));
  CHECK(contains(sherd_run("bench step " + kTinyModel + "--steps 2 --matrix 64 --json"),
                 "\"images_per_second\":"));
  CHECK(contains(
      sherd_run("bench step --preset vit_huge_patch14_224 --dataset synthetic --device meta"),
      "nothing was allocated"));
}

TEST_CASE("cli: bench disk measures a disk and leaves nothing on it") {
  const test::TempDirectory folder;
  const std::string command = "bench disk --dir " + folder.path() + " ";
  const Output table = sherd_run(command + "--size 32MiB --rounds 1");
  CHECK(table.status == 0);
  for (const char* word : {"plain loop", "threads", "write", "read", "both", "32.0 MiB"}) {
    CHECK_MESSAGE(contains(table, word), table.text);
  }
  // The engine is in the table, or why it is not.
  CHECK(contains(table, "io_uring"));
  const Output json = sherd_run(command + "--size 16MiB --rounds 2 --json");
  CHECK(json.status == 0);
  const nlohmann::json line = nlohmann::json::parse(json.out);
  CHECK(line["bytes"] == 16 << 20);
  CHECK(line["rates"][0]["name"] == "plain loop");
  CHECK(line["rates"].size() == (line.contains("io_uring_not_possible") ? 2 : 3));
  for (const auto& row : line["rates"]) {
    CHECK(row["mode"] == line["rates"][0]["mode"]);
    for (const char* work : {"write", "read", "both"}) {
      const double rate = row[std::string(work) + "_bytes_per_second"];
      const double plain = line["rates"][0][std::string(work) + "_bytes_per_second"];
      CHECK(rate > 0.0);
      CHECK(row[std::string(work) + "_ratio"] == doctest::Approx(rate / plain));
    }
  }
  refuses("bench disk", {"--dir"});
  refuses("bench disk --dir " + folder.path("no"), {folder.path("no"), "does not exist"});
  refuses(command + "--size 900TiB",
          {"no room for", folder.path(), "bytes free", "free some space"});
  refuses(command + "--size 1MiB", {"--size: expected a multiple of 16MiB", "1MiB"});
  refuses(command + "--rounds 0", {"--rounds: expected 1"});
  CHECK(folder.file_count() == 0);

  // Ended by a signal, it removes its file too.
  test::Child child("exec " SHERD_PROGRAM " " + command + "--size 64MiB --rounds 1000");
  CHECK(comes_true([&] { return folder.file_count() > 0; }));
  kill(child.pid(), SIGTERM);
  check_refusal(child.wait(60.0), {"stopped by a signal"});
  CHECK(folder.file_count() == 0);
}

TEST_CASE("cli: bench step and bench checkpoint that are stopped leave nothing on the disk") {
  const test::TempDirectory folder;
  for (const std::string& command :
       {"bench step " + kTinyModel + "--steps 1000000 --matrix 0 --offload-optimizer nvme:",
        std::string("bench checkpoint --image-size 1x8x8 --classes 3 --patch 4 --dim 16 --depth 1 "
                    "--heads 2 --rounds 1000 --dir ")}) {
    CAPTURE(command);
    test::Child child("exec " SHERD_PROGRAM " " + command + folder.path());
    CHECK(comes_true([&] { return folder.file_count() > 0; }));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    kill(child.pid(), SIGINT);
    check_refusal(child.wait(60.0), {"stopped by a signal"});
    CHECK(folder.file_count() == 0);
  }
}

TEST_CASE("cli: where nothing can be written, not even the error, the status tells") {
  for (const char* command : {"plan", "--version", "bench step --bad"}) {
    CAPTURE(command);
    CHECK(test::run(std::string(SHERD_PROGRAM " ") + command + " >/dev/full 2>/dev/full").status ==
          1);
  }
}

TEST_CASE("cli: bench step times the update from files beside a plain loop on their disk") {
  const test::TempDirectory folder;
  const std::string step = "bench step " + kTinyModel + "--steps 2 --matrix 0 ";
  const auto measured = [&](const std::string& arguments) {
    const Output out = sherd_run(step + "--json " + arguments);
    REQUIRE_MESSAGE(out.status == 0, out.text);
    return nlohmann::json::parse(out.out);
  };
  const std::string offload = "--offload-optimizer nvme:" + folder.path() + " ";
  const Output words = sherd_run(step + offload);
  CHECK(words.status == 0);
  for (const char* word : {"update  ", " read and ", " written, ",
                           "a plain loop here: ", "the update reaches ", "in the host's memory"}) {
    CHECK_MESSAGE(contains(words, word), words.text);
  }
  // AdamW's two numbers a parameter, in whole blocks; of all ranks.
  for (const std::string ranks : {"1", "2"}) {
    CAPTURE(ranks);
    const nlohmann::json line = measured(offload + "--shard zero3 --ranks " + ranks);
    const std::int64_t state = 2 * 4 * line["parameters"].get<std::int64_t>();
    const std::int64_t blocks = 2 * 2 * 4096 * std::stol(ranks);  // two units, padding
    CHECK(line["update_read_bytes"] >= state);
    CHECK(line["update_read_bytes"] <= state + blocks);
    CHECK(line["update_written_bytes"] == line["update_read_bytes"]);
    CHECK(line["update_seconds_per_step"] > 0.0);
    if (ranks == "1") CHECK(line["update_seconds_per_step"] < line["seconds_slowest"]);
    CHECK(line["disk_bytes_per_second"] > 0.0);
  }
  const std::string shards = "--shard zero3 --offload-parameters nvme:" + folder.path() + " ";
  CHECK(measured(shards)["disk_bytes_per_second"] > 0.0);
  // In two folders there is no one disk to compare with; without files none at all.
  const test::TempDirectory other;
  const std::string two = shards + "--offload-optimizer nvme:" + other.path();
  CHECK(measured(two)["disk_bytes_per_second"] == 0.0);
  CHECK(measured(two)["update_read_bytes"] > 0);
  const nlohmann::json none = measured("");
  CHECK(none["update_read_bytes"] == 0);
  CHECK(none["update_written_bytes"] == 0);
  CHECK(none["disk_bytes_per_second"] == 0.0);
  CHECK(none["update_seconds_per_step"] > 0.0);
  CHECK(!contains(sherd_run(step), "plain loop"));
  CHECK(folder.file_count() + other.file_count() == 0);
  const std::string trace = other.path("trace.json");
  CHECK(sherd_run(step + offload + "--trace " + trace).status == 0);
  for (const char* scope :
       {"\"wait for blocks.0\"", "\"update blocks.0\"", "\"settle blocks.0\""}) {
    CHECK_MESSAGE(test::text_of(trace).find(scope) != std::string::npos, scope);
  }
  refuses(step + "--offload-optimizer nvme:" + folder.path("no"),
          {folder.path("no"), "does not exist"});
}

TEST_CASE("cli: golden runs pass and fail by their tolerance") {
  const std::string golden = std::string(SHERD_TEST_DATA) + "/golden/cls";
  const Output pass = sherd_run("train --golden " + golden + " --precision fp64 --tolerance 1e-9");
  CHECK(pass.status == 0);
  CHECK(contains(pass, "passed"));
  const Output past = sherd_run("train --golden " + golden + " --precision fp32 --tolerance 1e-12");
  CHECK(past.status == 1);
  CHECK(contains(past, "past the tolerance"));
  CHECK(sherd_run("train --golden " + golden).status == 0);  // f32, 1e-4
  refuses("train --golden ''", {"golden.json"});
  refuses("train --golden " + golden + " --lr 1", {"--lr cannot be combined"});
  refuses("train --golden /nonexistent", {"/nonexistent/golden.json"});
}

TEST_CASE("cli: unknown words are errors with a suggestion") {
  refuses("train --batchsize 3", {"unknown flag '--batchsize'", "did you mean '--batch-size'"});
  refuses("train --lr=fast", {"--lr: expected a number, got 'fast'"});
  refuses("train --lr", {"--lr"});
  refuses("trian", {"unknown command 'trian'", "did you mean 'train'"});
  refuses("train a.toml b.toml", {"unexpected argument 'b.toml'"});
  refuses("train --dataset fashion-minst", {"fashion-minst", "did you mean 'fashion-mnist'"});
  refuses("train --preset vit_base", {"unknown model 'vit_base'"});
  refuses("bench comm --rank 3", {"unknown flag '--rank'", "did you mean '--ranks'"});
  refuses("bench comm --ranks 0", {"--ranks: expected 1 to 1024, got 0"});
  refuses("bench comm --max-bytes 1KiB", {"--max-bytes: expected 4096 to"});
  refuses("bench comm --repeat -1", {"--repeat", "got -1"});
  refuses("bench stp", {"unknown command 'stp'", "did you mean 'step'"});
  refuses("bench step --warmpu 3", {"unknown flag '--warmpu'", "did you mean '--warmup'"});
  refuses("inspect model --clases 3", {"did you mean '--classes'"});
  refuses("inspect chekpoint x", {"unknown command 'chekpoint'", "did you mean 'checkpoint'"});
  refuses("inspect checkpoint", {"give a checkpoint"});
  refuses("inspect weights", {"safetensors"});
  refuses("train ''", {"no such file"});
  refuses("train /tmp", {"expected a TOML file of settings, got a directory"});
  refuses("eval --lr 1", {"unknown flag '--lr'"});
  refuses("eval --drop 0.1", {"unknown flag '--drop'"});
  refuses("eval --weights x --seed 3", {"--seed: has no effect here"});
  refuses("train --momentum 0.5", {"--momentum: has no effect here"});
  const test::TempDirectory folder;
  test::put_file(folder.path("run.toml"), test::bytes_of("[optimizer]\nlearning-rate = 1\n"));
  refuses("train " + folder.path("run.toml"),
          {"run.toml", "unknown key 'optimizer.learning-rate'"});
  refuses("train " + folder.path("none.toml"), {"none.toml"});
}

TEST_CASE("cli: settings that cannot be honoured say what to change") {
  refuses("train " + kTiny + "--patch 3", {"8 x 8 is not divisible by the patch size 3"});
  refuses("train " + kTiny + "--precision int8",
          {"--precision int8: expected fp32, bf16, fp16 or fp64"});
  refuses("train " + kTiny + "--param-dtype fp64",
          {"--param-dtype fp64: expected fp32, bf16 or fp16; fp64 needs --precision fp64"});
  refuses("train " + kTiny + "--precision bf16 --loss-scale 1024",
          {"--loss-scale: has no effect here, it needs --precision fp16"});
  for (const std::string& command : {"train " + kTiny, "bench step " + kTinyModel}) {
    for (const char* ranks : {"", "--ranks 2 "}) {
      refuses(command + ranks + "--precision fp16 --loss-scale 3",
              {"sherd: --loss-scale: expected auto, or a power of two up to 16777216, got 3"});
    }
  }
  refuses("train " + kTiny + "--device tpu", {"'tpu'", "cpu, cuda or meta"});
  if (cuda::device_count() == 0) refuses("train " + kTiny + "--device cuda", {"se --device cpu"});
  refuses("train " + kTiny + "--graph yes", {"--graph: has no effect", "--device cuda"});
  refuses("train " + kTiny + "--exact-sums yes", {"--exact-sums: has no effect", "--device cuda"});
  refuses("train " + kTiny + "--device meta", {"meta", "cannot train"});
  refuses("train " + kTiny + "--batch-size 0", {"--batch-size"});
  refuses("train " + kTiny + "--micro-batch 17", {"--micro-batch", "16"});
  refuses("train " + kTiny + "--batch-size 9223372036854775807", {"--batch-size"});
  refuses("train " + kTiny + "--epochs 9223372036854775807", {"--epochs"});
  refuses("train " + kTiny + "--images 9223372036854775807", {"--images"});
  refuses("train " + kTiny + "--head-dim 9223372036854775807", {"head dim"});
  refuses("train " + kTiny + "--depth 1000000000", {"depth"});
  refuses("train " + kTiny + "--classes 100000000", {"--classes"});
  refuses("bench step " + kTinyModel + "--micro-batch 100", {"--micro-batch"});
  for (const char* command : {"train ", "bench step --device meta ", "bench step "}) {
    refuses(command + (command == std::string("train ") ? kTiny : kTinyModel) +
                "--batch-size 4 --memory-limit 20KiB",
            {"out of memory before the start", "--memory-limit is 20.0 KiB", "planned to be ",
             "(parameters ", "most of it ", "--micro-batch"});
  }
  refuses("train " + kTiny + "--optimizer lion", {"'lion'", "adamw or sgd"});
}

TEST_CASE("cli: bad data files") {
  const IdxFolder folder;
  folder.write();
  CHECK(sherd_run(folder.arguments()).status == 0);
  std::filesystem::remove_all(folder.path("run"));
  refuses(folder.arguments() + "--patch 5", {"not divisible by the patch size 5"});
  std::filesystem::resize_file(folder.images_path("train"), 100);
  refuses(folder.arguments(), {"train-images-idx3-ubyte", "need 256 bytes", "got 84"});
  test::put_file(folder.images_path("train"), test::bytes_of("not an IDX file at all"));
  refuses(folder.arguments(), {"train-images-idx3-ubyte", "magic"});
  folder.write({0, 1, 77, 0});
  refuses(folder.arguments(), {" 77 "});
  std::filesystem::remove(folder.images_path("t10k"));
  folder.write();
  std::filesystem::remove(folder.images_path("t10k"));
  refuses(folder.arguments(), {"t10k-images-idx3-ubyte"});
  CHECK_FALSE(std::filesystem::exists(folder.path("run")));
}

TEST_CASE("cli: bad weights") {
  const test::TempDirectory folder;
  const std::string weights = folder.path("w.safetensors");
  test::put_file(weights, test::bytes_of("short"));
  refuses("train " + kTiny + "--out " + folder.path("run") + " --weights " + weights,
          {"w.safetensors"});
  refuses("inspect weights " + weights, {"w.safetensors"});
  refuses("inspect weights " + folder.path("none"), {"none"});
  refuses("eval " + folder.path("none"), {"not the folder of a run"});
  refuses("eval", {"--weights"});
}

TEST_CASE("cli: outputs are never overwritten and must be writable") {
  const test::TempDirectory folder;
  test::put_file(folder.path("file"), test::bytes_of("x"));
  refuses("train " + kTiny + "--out " + folder.path("file/run"), {"cannot make the folder"});
  refuses("train " + kTiny + "--out /proc/none", {"/proc/none"});
  refuses("bench step " + kTinyModel + "--steps 1 --matrix 0 --trace " + folder.path("file"),
          {"is there already"});
  const std::string once = "train " + kTiny + "--epochs 1 --out " + folder.path("run");
  CHECK(sherd_run(once).status == 0);
  refuses(once, {"is there already", "nothing was changed"});
}

TEST_CASE("cli: a signal ends the run with its weights saved") {
  const test::TempDirectory folder;
  const std::string command = "timeout --foreground -s INT 1 " + std::string(SHERD_PROGRAM) +
                              " train " + kTiny + "--images 100000 --epochs 100 --out " +
                              folder.path("run") + " >" + folder.path("text") + " 2>&1";
  const int status = std::system(command.c_str());
  CHECK(WEXITSTATUS(status) == 124);  // timeout's own: it sent the signal
  CHECK(std::filesystem::exists(folder.path("run/model.safetensors")));
  CHECK(sherd_run("eval " + folder.path("run")).status == 0);
}

TEST_CASE("cli: output that cannot be written is an error; a reader that leaves costs no weights") {
  const test::TempDirectory folder;
  const auto status_of = [](const std::string& command) {
    return WEXITSTATUS(std::system(command.c_str()));
  };
  CHECK(status_of(std::string(SHERD_PROGRAM) + " inspect model >/dev/full 2>/dev/null") == 1);
  status_of(std::string(SHERD_PROGRAM) + " train " + kTiny + "--epochs 30 --out " +
            folder.path("run") + " 2>/dev/null | head -n 1 >/dev/null");
  CHECK(std::filesystem::exists(folder.path("run/model.safetensors")));
}

TEST_CASE("cli: a run in fp16 says how its loss scale went") {
  const test::TempDirectory folder;
  // The scale doubles with every good step, so that steps overflow.
  const std::string command = "train " + kTiny + "--epochs 3 --ranks 2 --precision fp16 ";
  const Output train =
      sherd_run(command + "--loss-scale-window 1 --log-every 1 --out " + folder.path("run"));
  CHECK(train.status == 0);
  int skipped = 0;
  std::istringstream log(text_of(folder.path("run/log.jsonl")));
  nlohmann::json end;
  for (std::string line; std::getline(log, line);) {
    end = nlohmann::json::parse(line);
    skipped += end["event"] == "step" && end.contains("skipped") ? 1 : 0;
  }
  CHECK(skipped > 0);
  CHECK(end["skipped"] == skipped);
  CHECK(contains(train, "f16, gradients sent in f16, output in f32, weights kept in f32"));
  CHECK(contains(train, fmt::format("loss scale      {} at the end; {} of 12 steps overflowed and "
                                    "were skipped\n",
                                    end["loss_scale"].get<double>(), skipped)));
  // It evaluates in the precision of the run.
  CHECK(sherd_run("eval " + folder.path("run")).status == 0);
  // A fixed scale has no answer to an overflow.
  refuses(command + "--loss-scale 16777216 --out " + folder.path("fixed"),
          {"the gradient is not finite", "loss scale 16777216, which cannot be lowered",
           "first seen in the gradient of ", "or --loss-scale auto"});
  CHECK_FALSE(std::filesystem::exists(folder.path("fixed/log.jsonl")));
  const Output plain =
      sherd_run("train " + kTiny + "--epochs 1 --precision bf16 --out " + folder.path("plain"));
  CHECK(plain.status == 0);
  CHECK_FALSE(contains(plain, "loss scale"));
}

TEST_CASE("cli: a loss that is not finite names step and layer") {
  const test::TempDirectory folder;
  refuses("train " + kTiny + "--lr 1e30 --clip-grad-norm 0 --warmup-steps 0 --out " +
              folder.path("run"),
          {"step ", "is not finite", "first seen in ", "lower learning rate"});
  CHECK_FALSE(std::filesystem::exists(folder.path("run/model.safetensors")));
}
