// SPDX-License-Identifier: Apache-2.0
// `sherd convert`, and weights of every format where weights are taken.
#include <doctest/doctest.h>
#include <sherd/runtime/io/file.h>

#include <filesystem>

#include "cli_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

std::string results(const Output& eval) {
  CHECK_MESSAGE(eval.status == 0, eval.text);
  return eval.text.substr(std::min(eval.text.find("top-1"), eval.text.size()));
}

void converts(const std::string& arguments) {
  const Output output = sherd_run("convert " + arguments);
  CHECK_MESSAGE(output.status == 0, arguments, "\n", output.text);
}

}  // namespace

TEST_CASE("cli: convert a run to every format, and train and eval take them all") {
  const TempDirectory folder;
  const auto at = [&](const char* name) { return folder.path(name); };
  const std::string run = at("run");
  REQUIRE(
      sherd_run("train " + kTiny + "--epochs 2 --ranks 2 --shard zero3 --save-every 3 --out " + run)
          .status == 0);
  const auto whole = read_file(run + "/model.safetensors");
  const Output first = sherd_run("convert " + run + " " + at("a.safetensors"));
  CHECK(first.status == 0);
  for (const char* piece : {"checkpoints/step-00000008 (sharded checkpoint)",
                            "(safetensors, 1 file)", "the optimizer's state was left out"}) {
    CHECK_MESSAGE(contains(first, piece), first.text);
  }
  CHECK(read_file(at("a.safetensors")) == whole);
  converts(run + " " + at("split") + " --to split --max-file-size 4KB");
  converts(at("split") + " " + at("theirs.safetensors") + " --names transformers");
  converts(at("theirs.safetensors") + " " + at("pieces") + " --to checkpoint --pieces 3");
  converts(at("pieces") + " " + at("back.safetensors") + " --names timm");
  CHECK(read_file(at("back.safetensors")) == whole);

  const std::string own = results(sherd_run("eval " + run));
  const std::string on =
      "train " + kTiny + "--epochs 1 --lr 1e-3 --ranks 2 --shard zero3 --weights ";
  REQUIRE(sherd_run(on + run + "/model.safetensors --out " + at("on")).status == 0);
  const auto expected = read_file(at("on/model.safetensors"));
  const std::pair<const char*, const char*> sources[]{
      {"run", "taken from"},
      {"split", "model.safetensors.index.json"},
      {"split/model.safetensors.index.json", ""},
      {"theirs.safetensors", "2 of them joined from q, k and v"},
      {"pieces", "names of transformers mapped to timm's"}};
  int count = 0;
  for (const auto& [name, note] : sources) {
    const std::string source = at(name);
    CAPTURE(source);
    const Output eval = sherd_run("eval " + run + " --weights " + source);
    CHECK(results(eval) == own);
    CHECK_MESSAGE(contains(eval, note), eval.text);
    const std::string out = at(("on" + std::to_string(count++)).c_str());
    const Output train = sherd_run(on + source + " --out " + out);
    CHECK_MESSAGE(train.status == 0, train.text);
    CHECK_MESSAGE(contains(train, note), train.text);
    CHECK(read_file(out + "/model.safetensors") == expected);
    CHECK(contains(sherd_run("inspect weights " + source), " tensors, "));
  }
  // A run that was killed has no model.safetensors.
  std::filesystem::remove(run + "/model.safetensors");
  CHECK(results(sherd_run("eval " + run)) == own);
  std::filesystem::remove_all(run + "/checkpoints");
  refuses("eval " + run, {"no model.safetensors and no checkpoint"});
}

TEST_CASE("cli: a run goes on from a converted checkpoint, if all of it is there") {
  const TempDirectory folder;
  const std::string run = folder.path("run"), whole = folder.path("whole");
  const std::string train = "train " + kTiny + "--epochs 3 --ranks 2 --shard zero3 --save-every 5 ";
  REQUIRE(sherd_run(train + "--out " + whole).status == 0);
  REQUIRE(sherd_run(train + "--keep 9 --out " + run).status == 0);
  const std::string step = run + "/checkpoints/step-00000005";
  REQUIRE(std::filesystem::exists(step));
  const std::string pieces = folder.path("pieces");
  const Output output = sherd_run("convert " + step + " " + pieces + " --to checkpoint --pieces 5");
  CHECK_MESSAGE(contains(output, "sherd train --resume " + pieces + " goes on from it"),
                output.text);
  const Output resumed = sherd_run("train --resume " + pieces + " --out " + folder.path("on"));
  CHECK_MESSAGE(resumed.status == 0, resumed.text);
  CHECK(read_file(folder.path("on/model.safetensors")) == read_file(whole + "/model.safetensors"));

  const std::string weights = folder.path("weights");
  converts(step + " " + weights + " --to checkpoint --optimizer no");
  refuses("train --resume " + weights + " --out " + folder.path("x"),
          {"--resume", weights, "no run to go on from", "--weights " + weights});
  refuses("train " + kTiny + "--resume " + weights + " --out " + folder.path("x"),
          {weights, "--weights"});
  const std::string renamed = folder.path("renamed");
  converts(step + " " + renamed + " --to checkpoint --names transformers");
  refuses("train --resume " + renamed + " --out " + folder.path("x"), {"no run to go on from"});
  CHECK_FALSE(std::filesystem::exists(folder.path("x")));
}

TEST_CASE("cli: convert says what to change") {
  const TempDirectory folder;
  const std::string file = std::string(SHERD_TEST_DATA) + "/golden/torch/vit.pt ";
  refuses("convert", {"SOURCE and DEST", "--help"});
  refuses("convert " + file, {"SOURCE and DEST"});
  refuses("convert " + file + folder.path("x"), {"--to split", "--to checkpoint"});
  refuses("convert " + file + folder.path("x.pt"), {".safetensors", "load_file"});
  refuses("convert " + file + folder.path("x.safetensors") + " --pieces 2", {"--to checkpoint"});
  refuses("convert " + file + folder.path("x") + " --to checkpoint --pieces 0",
          {"--pieces", "got 0"});
  refuses("convert " + file + folder.path("x") + " --to split --max-file-size much",
          {"--max-file-size", "much"});
  refuses("convert " + file + folder.path("x.safetensors") + " --dtype fp8", {"--dtype", "fp8"});
  refuses("convert " + file + folder.path("x.safetensors") + " --nams timm", {"--names"});
  refuses("convert " + folder.path("none") + " " + folder.path("x.safetensors"), {"none"});
  CHECK(folder.file_count() == 0);
  const Output help = sherd_run("convert --help");
  CHECK(help.status == 0);
  for (const char* piece : {"--names transformers", "--to split --max-file-size 1GB", "SOURCE"}) {
    CHECK_MESSAGE(contains(help, piece), help.text);
  }
}
