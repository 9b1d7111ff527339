// SPDX-License-Identifier: Apache-2.0
// Checkpoints as a user meets them: a run that goes on has the bits of one that was never stopped,
// and what cannot go on is one clear error that changes nothing. Kills and failing disks at random
// instants are in tests/kill.
#include <nlohmann/json.hpp>
#include <set>

#include "cli_support.h"

using namespace sherd;
using namespace sherd::test;
namespace fs = std::filesystem;

namespace {

using Json = nlohmann::json;
using Names = std::set<std::string>;

const std::string kSherd = SHERD_PROGRAM;
// Two epochs of five steps.
const std::string kRun =
    "train " + kTinyModel + "--images 80 --epochs 2 --log-every 1 --save-every 3 --keep 9 ";

Names names_in(const std::string& folder) {
  Names names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

Names checkpoints_in(const std::string& out) {
  Names names;
  for (const std::string& name : names_in(out + "/checkpoints")) {
    if (name.starts_with("step-")) names.insert(name);
  }
  return names;
}

// Everything below a folder, by path: to see that nothing was changed.
std::map<std::string, std::string> tree(const std::string& folder) {
  std::map<std::string, std::string> all;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string path = entry.path().string();
    all[path] = entry.is_symlink()        ? fs::read_symlink(path).string()
                : entry.is_regular_file() ? text_of(path)
                                          : "";
  }
  return all;
}

std::string step(int number) {
  return fmt::format("step-{:08}", number);
}

// Ends well, without a warning.
void succeeds(const std::string& arguments) {
  const Output output = sherd_run(arguments);
  CAPTURE(arguments);
  CAPTURE(output.text);
  CHECK(output.status == 0);
  CHECK(output.err.empty());
}

std::string weights_of(const std::string& out) {
  return text_of(out + "/model.safetensors");
}

// A run that others go on from.
class SavedRun {
 public:
  explicit SavedRun(const std::string& flags = "") {
    succeeds(kRun + flags + " --out " + out());
    REQUIRE(checkpoints_in(out()) == Names{step(3), step(5), step(6), step(9), step(10)});
  }
  std::string out() const { return folder_.path("run"); }
  std::string path(const std::string& name) const { return folder_.path(name); }
  std::string checkpoint(int number) const { return out() + "/checkpoints/" + step(number); }
  // As if it had been killed after that step.
  void forget_after(int number) const {
    for (const std::string& name : checkpoints_in(out())) {
      if (name > step(number)) fs::remove_all(out() + "/checkpoints/" + name);
    }
    fs::remove(out() + "/model.safetensors");
  }

 private:
  TempDirectory folder_;
};

void flip(const std::string& path, std::uint64_t at) {
  std::string text = text_of(path);
  REQUIRE(at < text.size());
  text[at] = static_cast<char>(text[at] ^ 1);
  put_file(path, bytes_of(text));
}

}  // namespace

TEST_CASE("checkpoints: a run that goes on has the bits of one that was never stopped") {
  for (const char* flags :
       {"", "--drop-path 0.3 --ranks 2 --shard zero3", "--optimizer sgd --nesterov yes --lr 0.1",
        "--precision fp16 --loss-scale-window 3 --ranks 2",
        "--micro-batch 3 --ranks 2 --shard zero2",
        "--checkpoint-async yes --ranks 2 --shard zero1 --precision bf16",
        "--ranks 2 --shard zero3 --offload-optimizer cpu --offload-parameters cpu",
        "--ranks 4 --shard hybrid --mesh replicate=2,shard=2 --recompute block",
        "--shuffle no --eval-every 0 --save-every 1"}) {
    CAPTURE(flags);
    const TempDirectory folder;
    const std::string out = folder.path("run");
    succeeds(kRun + flags + " --out " + out);
    // Saving changes nothing.
    const std::string plain = folder.path("plain");
    std::string without = kRun + flags;
    for (const char* flag :
         {"--save-every 3 ", "--keep 9 ", "--checkpoint-async yes ", "--save-every 1"}) {
      const auto at = without.find(flag);
      if (at != std::string::npos) without.erase(at, std::string(flag).size());
    }
    succeeds(without + " --out " + plain);
    CHECK(weights_of(plain) == weights_of(out));
    // In the middle of an epoch, at its end, and just before the end.
    for (const int from : {3, 5, 9}) {
      const std::string checkpoint = out + "/checkpoints/" + step(from);
      if (!fs::exists(checkpoint)) continue;  // at 5 where there is no evaluation
      CAPTURE(from);
      const std::string other = folder.path("from-" + step(from));
      succeeds("train --resume " + checkpoint + " --out " + other);
      CHECK(weights_of(other) == weights_of(out));
      // And what it saved then.
      CHECK(fs::read_symlink(other + "/checkpoints/last") == step(10));
      const std::string tail = "/checkpoints/last/rank-00000-of-0000";
      for (const char* ranks : {"1", "2", "4"}) {
        const std::string file = tail + ranks + ".safetensors";
        CHECK(fs::exists(other + file) == fs::exists(out + file));
        CHECK(text_of(other + file) == text_of(out + file));
      }
    }
  }
}

TEST_CASE("checkpoints: another number of ranks, policy, precision or place goes on, and warns") {
  const SavedRun run("--ranks 2 --shard zero3");
  struct Change {
    const char* flags;
    std::vector<std::string> warnings;  // none: the bits stay
  };
  const std::string rounding = "results go on within rounding, not bit for bit";
  for (const Change& change : std::vector<Change>{
           {"--shard none", {}},
           {"--shard grad_op --checkpoint-async yes", {}},
           {"--offload-optimizer cpu", {}},
           {"--offload-parameters cpu --depth 1 --save-every 0 --keep 2", {}},
           {"--ranks 1 --shard none", {"the number of ranks is 1 now and was 2: " + rounding}},
           {"--ranks 4 --shard zero2", {"the number of ranks is 4 now and was 2: " + rounding}},
           {"--ranks 4 --shard hybrid --mesh replicate=2,shard=2",
            {"the number of ranks is 4 now"}},
           {"--threads 2", {"the number of threads a rank is 2 now and was 1: " + rounding}},
           {"--micro-batch 3", {"--micro-batch is 3 now and was 0: " + rounding}},
           {"--precision bf16", {"the precision is bf16", "and was f32"}},
           {"--precision fp16", {"the precision is f16", "and was f32"}},
           {"--batch-size 8", {"--batch-size is 8 now and was 16: "}},
           {"--seed 7", {"--seed is 7 now and was 0: "}},
       }) {
    CAPTURE(change.flags);
    const std::string out = run.path("other");
    std::string flags = change.flags;
    // A setting without effect is refused elsewhere.
    if (flags.find("--save-every 0") != std::string::npos) flags.erase(flags.find(" --keep 2"));
    const Output output =
        sherd_run("train --resume " + run.checkpoint(3) + " " + flags + " --out " + out);
    CAPTURE(output.text);
    CHECK(output.status == 0);
    CHECK(contains(output, "goes on from " + run.checkpoint(3) + " after 3 steps"));
    for (const std::string& warning : change.warnings) {
      CHECK(output.err.find(warning) != std::string::npos);
    }
    CHECK(std::ranges::count(output.err, '\n') == (change.warnings.empty() ? 0 : 1));
    // More threads may add up in another order; here they have too little to do.
    if (change.flags != std::string("--threads 2")) {
      CHECK((weights_of(out) == weights_of(run.out())) == change.warnings.empty());
    }
    fs::remove_all(out);
  }
}

TEST_CASE("checkpoints: --resume auto goes on, finishes what was not finished, and tidies up") {
  const SavedRun run("--ranks 2 --shard zero3");
  const std::string out = run.out(), auto_run = "train --resume auto --out " + out;
  const std::string weights = weights_of(out);
  const auto best = fs::read_symlink(out + "/checkpoints/best");
  const auto links_are_right = [&] {
    CHECK(fs::read_symlink(out + "/checkpoints/last") == step(10));
    CHECK(fs::read_symlink(out + "/checkpoints/best") == best);
  };
  // What killed runs leave.
  const auto leave = [&] {
    for (const char* name :
         {"/checkpoints/.step-00000004.partial", "/checkpoints/.step-00000002.removed"}) {
      fs::create_directory(out + name);
      put_file(out + name + "/index.json", bytes_of("{}"));
    }
    fs::create_symlink("step-00000001", out + "/checkpoints/last.tmp");
    for (const char* name : {"/config.toml.tmp-7-0", "/model.safetensors.tmp-7-0"}) {
      put_file(out + name, bytes_of("half"));
    }
    std::ofstream(out + "/log.jsonl", std::ios::app) << "{\"event\":\"st";
  };
  const auto nothing_left = [&] {
    CHECK(names_in(out) == Names{"checkpoints", "config.toml", "log.jsonl", "model.safetensors"});
    Names in_folder = checkpoints_in(out);
    in_folder.insert({".lock", "last", "best"});
    CHECK(names_in(out + "/checkpoints") == in_folder);
  };
  run.forget_after(6);
  leave();
  succeeds(auto_run);
  CHECK(weights_of(out) == weights);
  CHECK(text_of(out + "/log.jsonl").find("{\"event\":\"st\n{\"event\":\"start\"") !=
        std::string::npos);
  nothing_left();
  links_are_right();
  // Nothing is left to train, but the weights or the links were not written.
  fs::remove(out + "/model.safetensors");
  for (const char* link : {"/checkpoints/last", "/checkpoints/best"}) fs::remove(out + link);
  leave();
  succeeds(auto_run);
  CHECK(weights_of(out) == weights);
  nothing_left();
  links_are_right();
  // The weights of an earlier end, while the run has gone on.
  put_file(out + "/model.safetensors", bytes_of("old"));
  fs::last_write_time(
      out + "/model.safetensors",
      fs::last_write_time(run.checkpoint(10) + "/index.json") - std::chrono::seconds(1));
  succeeds(auto_run);
  CHECK(weights_of(out) == weights);
  // A run that is finished stays as it is.
  const auto before = tree(out);
  for (const std::string& from : {std::string("auto"), out, out + "/checkpoints/last"}) {
    refuses("train --resume " + from + " --out " + out,
            {"' is of step 10 of 10", "nothing left to train", "raise --epochs"});
  }
  CHECK(tree(out) == before);
  succeeds(auto_run + " --epochs 3");
  CHECK(fs::exists(run.checkpoint(15)));
}

TEST_CASE("checkpoints: --resume auto without one starts, by the settings of the folder") {
  const TempDirectory folder;
  const std::string out = folder.path("run"), fresh = folder.path("fresh");
  succeeds(kRun + "--seed 5 --out " + fresh);
  succeeds(kRun + "--seed 5 --resume auto --out " + out);
  CHECK(weights_of(out) == weights_of(fresh));
  // Killed before its first checkpoint.
  fs::remove_all(out);
  fs::create_directories(out + "/checkpoints/.step-00000003.partial");
  fs::copy(fresh + "/config.toml", out + "/config.toml");
  put_file(out + "/log.jsonl", bytes_of("{\"event\":\"start\"}\n"));
  succeeds("train --resume auto --out " + out);
  CHECK(weights_of(out) == weights_of(fresh));
  CHECK(text_of(out + "/log.jsonl").starts_with("{\"event\":\"start\"}\n{\"event\":\"start\","));
  refuses("train --resume auto",
          {"--resume auto: goes on with the run in OUT; give it with --out"});
}

TEST_CASE("checkpoints: what is no checkpoint, or of another run, is refused") {
  const SavedRun run("--ranks 2 --shard zero3");
  const std::string out = run.out(), last = run.checkpoint(10), other = run.path("other");
  const auto before = tree(run.path(""));
  const auto refused = [&](const std::string& flags, const std::vector<std::string>& pieces) {
    refuses("train --resume " + flags + " --out " + other, pieces);
    CHECK(tree(run.path("")) == before);
  };
  refused(run.path("none"), {"there is no checkpoint '" + run.path("none") + "'"});
  refused(out + "/config.toml", {"'" + out + "/config.toml' is no checkpoint", "index.json"});
  refused(out + "/checkpoints/best/config.toml", {"is no checkpoint"});
  refused(run.path(""), {"is no checkpoint and has none", "RUN/checkpoints/step-00001000"});
  refused(last + " --epochs 4 --dim 32",
          {"checkpoint '" + last + "'", "has shape", "the model needs",
           "are the settings of [model] those of the run?"});
  refused(last + " --epochs 4 --depth 2", {"has no parameter 'blocks.1.", "that the model needs"});
  refused(last + " --epochs 4 --qkv-bias no",
          {"has a parameter 'blocks.0.attn.qkv.bias' that the model lacks"});
  refused(last + " --epochs 4 --classes 5", {"'head.", "has shape"});
  refused(last + " --epochs 4 --optimizer sgd",
          {"has no optimizer state 'momentum' of", "--weights"});
  refused(run.checkpoint(6) + " --max-steps 5", {"is of step 6 of 5", "nothing left to train"});
  // In the run's own folder.
  const auto refused_here = [&](const std::string& flags, const std::vector<std::string>& pieces) {
    refuses(flags + " --out " + out, pieces);
    CHECK(tree(run.path("")) == before);
  };
  refused_here(kRun,
               {"there are checkpoints of a run already", "--resume auto", "nothing was changed"});
  refused_here("train " + kTiny, {"there are checkpoints of a run already"});
  refused_here("train --resume " + run.checkpoint(6),
               {"--resume " + run.checkpoint(6) + ": its run has a later checkpoint", step(10)});
  // Without its checkpoints it is still a run's.
  fs::remove_all(out + "/checkpoints");
  for (const char* flags : {"--resume auto ", "--resume auto --save-every 0 "}) {
    refuses(std::string("train ") + flags + "--out " + out,
            {"model.safetensors' is there, but no checkpoint to go on from"});
  }
  refuses(kRun + "--out " + out, {"log.jsonl' is there already", "nothing was changed"});
}

TEST_CASE("checkpoints: one that is damaged is refused where it is damaged") {
  const SavedRun run("--ranks 2 --shard zero3");
  const std::string out = run.out(), path = run.checkpoint(6);
  run.forget_after(6);
  const std::string shard = path + "/rank-00001-of-00002.safetensors", index = path + "/index.json";
  const std::string text = text_of(index), data = text_of(shard);
  const Json description = Json::parse(text);
  const auto header = description["files"][1]["header_bytes"].get<std::uint64_t>();
  const auto before = tree(out);
  const auto refused = [&](const std::vector<std::string>& pieces, bool at_once) {
    const auto damaged = tree(out);
    refuses("inspect checkpoint " + out + " --verify", pieces);
    refuses("inspect checkpoint " + path + " --verify --json", pieces);
    CHECK((sherd_run("inspect checkpoint " + path).status != 0) == at_once);
    for (const char* ranks : {"", " --ranks 1 --shard none"}) {
      const Output output = sherd_run("train --resume auto --out " + out + ranks);
      check_refusal(output, {path});
    }
    CHECK(tree(out) == damaged);
    put_file(index, bytes_of(text));
    put_file(shard, bytes_of(data));
    REQUIRE(tree(out) == before);
  };
  fs::remove(shard);
  refused({path, "rank-00001-of-00002.safetensors", "No such file", "use another checkpoint"},
          true);
  fs::resize_file(shard, data.size() - 5);
  refused({"rank-00001-of-00002.safetensors has", "it is not whole, use another checkpoint"}, true);
  for (const char* bad : {"", "{", "{}", "nothing"}) {
    put_file(index, bytes_of(bad));
    refused({"checkpoint index '" + index + "': it is"}, true);
  }
  std::string edited = text;
  edited.replace(edited.find("\"step\":6"), 8, "\"step\":7");
  put_file(index, bytes_of(edited));
  refused({index, "its checksum is wrong, so it is damaged or was edited"}, true);
  std::string newer = text;
  newer.replace(newer.find("\"version\":1"), 11, "\"version\":9");
  put_file(index, bytes_of(newer));
  refused({index, "it has format version 9, this program reads up to 1", "newer version"}, true);
  // The ranks read every byte of the tensors, and none of the headers.
  flip(shard, header + 40);
  refused({"rank-00001-of-00002.safetensors is damaged between bytes", "(in tensor ",
           "use another checkpoint"},
          false);
  flip(shard, header - 9);
  refuses("inspect checkpoint " + out + " --verify",
          {"rank-00001-of-00002.safetensors is damaged in its header"});
}

TEST_CASE("checkpoints: inspect says what one holds") {
  const SavedRun run("--ranks 2 --shard zero3 --seed 3");
  const std::string out = run.out();
  const Output text = sherd_run("inspect checkpoint " + out + "/checkpoints/step-00000006");
  CAPTURE(text.text);
  CHECK(text.status == 0);
  CHECK(text.err.empty());
  for (const char* piece :
       {"producer        sherd ", "step            6\n", "epoch 2, 16 of its samples used",
        "data synthetic", "2 ranks (zero3), 1 thread each; batch size 16, seed 3",
        "parameters      ", "exp_avg         ", "exp_avg_sq      ",
        "rank-00000-of-00002.safetensors  ", "rank-00001-of-00002.safetensors  ",
        "all files are there with their sizes"}) {
    CAPTURE(piece);
    CHECK(contains(text, piece));
  }
  CHECK_FALSE(contains(text, "head.weight"));
  CHECK_FALSE(contains(text, "loss scale"));
  const Output table = sherd_run("inspect checkpoint --tensors " + out);
  CHECK(contains(table, "step            10\n"));
  for (const char* piece : {"\nhead.weight ", "\noptimizer.head.weight.exp_avg_sq ", "[3, 16]"}) {
    CHECK(contains(table, piece));
  }
  const Output checked = sherd_run("inspect checkpoint --verify " + out + "/checkpoints/best");
  CHECK(checked.status == 0);
  CHECK(contains(checked, "have their checksums ("));
  CHECK_FALSE(contains(checked, "verifying"));  // not on a terminal
  // Its own configuration says which model it is.
  const Output evaluated = sherd_run("eval " + out + "/checkpoints/last");
  CHECK_MESSAGE(evaluated.status == 0, evaluated.text);
  const Output json = sherd_run("inspect checkpoint --json --verify --tensors " + out);
  REQUIRE(json.status == 0);
  CHECK(std::ranges::count(json.out, '\n') == 1);
  const Json value = Json::parse(json.out);
  CHECK(value["step"] == 10);
  CHECK(value["verified"] == true);
  CHECK(value["run"]["ranks"] == 2);
  CHECK(value["files"].size() == 2);
  std::uint64_t bytes = 0;
  for (const Json& file : value["files"]) {
    bytes += fs::file_size(out + "/checkpoints/last/" + file["name"].get<std::string>());
  }
  CHECK(value["file_bytes"] == bytes);
  CHECK(value["parameters"]["elements"] == value["optimizer_states"]["exp_avg"]["elements"]);
  CHECK(value["tensors"].size() == 3 * value["parameters"]["tensors"].get<std::size_t>());
  refuses("inspect checkpoint " + run.path("none"), {"there is no checkpoint"});
  refuses("inspect checkpoint --verfy " + out,
          {"unknown flag '--verfy'", "did you mean '--verify'"});
}

TEST_CASE("checkpoints: the newest and the best stay") {
  for (const int keep : {1, 2, 3}) {
    CAPTURE(keep);
    const TempDirectory folder;
    const std::string out = folder.path("run");
    // Labels of the synthetic images cannot be learnt much at this rate: the best is an early one.
    succeeds("train " + kTiny + "--epochs 6 --save-every 2 --lr 0.5 --warmup-epochs 0 --keep " +
             std::to_string(keep) + " --out " + out);
    std::set<int> saved;
    int best = -1;
    std::ifstream log(out + "/log.jsonl");
    for (std::string line; std::getline(log, line);) {
      const Json event = Json::parse(line);
      if (event["event"] != "checkpoint") continue;
      saved.insert(event["steps"].get<int>());
      if (event["best"] == true) best = event["steps"].get<int>();
    }
    REQUIRE(saved.size() == 12);
    Names expected{step(best)};
    for (int i = 0; i < keep; ++i) expected.insert(step(24 - 2 * i));
    CHECK(checkpoints_in(out) == expected);
    CHECK(fs::read_symlink(out + "/checkpoints/best") == step(best));
    CHECK(fs::read_symlink(out + "/checkpoints/last") == step(24));
    CHECK(best < 20);  // else this test says nothing
  }
}

TEST_CASE("checkpoints: of two runs in one folder the second is told who has it") {
  const TempDirectory folder;
  const std::string out = folder.path("run");
  const std::string endless = kRun + "--ranks 2 --out " + out + " --resume auto --epochs 1000000";
  Child first("exec " + kSherd + " " + endless);
  REQUIRE(comes_true([&] { return fs::exists(out + "/checkpoints/last"); }));
  char host[256]{};
  REQUIRE(gethostname(host, sizeof host - 1) == 0);
  const std::string who = fmt::format("(process {} on {})", first.pid(), host);
  for (const std::string& second : {"train --resume auto --out " + out, endless}) {
    refuses(second, {"'" + out + "/checkpoints' is being written by a training run " + who,
                     "wait until that has ended"});
  }
  const auto lines = [&] { return std::ranges::count(text_of(out + "/log.jsonl"), '\n'); };
  const auto now = lines();
  CHECK(comes_true([&] { return lines() > now + 5; }));
  kill(first.pid(), SIGKILL);
  CHECK(first.wait(30).status == 128 + SIGKILL);
  // The lock went with it.
  Child next("exec " + kSherd + " train --resume auto --out " + out);
  CHECK(
      comes_true([&] { return text_of(out + "/log.jsonl").find("resume") != std::string::npos; }));
  kill(next.pid(), SIGINT);
  CHECK(next.wait(30).status == 130);
  CHECK(sherd_run("inspect checkpoint --verify " + out).status == 0);
}

TEST_CASE(
    "checkpoints: a disk that is full or read-only ends the run, and takes no checkpoint away") {
  const TempDirectory folder;
  const std::string disk = folder.path("disk"), out = disk + "/run";
  fs::create_directory(disk);
  for (const char* async : {"no", "yes"}) {
    CAPTURE(async);
    const std::string start = with_disk(disk, "size=4m");
    if (start.empty()) return;
    put_file(
        folder.path("script"),
        bytes_of(fmt::format(
            R"({0} {1} --ranks 2 --shard zero3 --epochs 1000000 --keep 2 --checkpoint-async {4} --out {2} >{3}/out 2>{3}/err &
run=$!
while kill -0 $run && ! [ -e {2}/checkpoints/last ]; do sleep 0.02; done
dd if=/dev/zero of={2}/../filler bs=4k >/dev/null 2>&1
wait $run
echo "ended $?"
{0} inspect checkpoint {2} --verify >/dev/null && echo verified
ls -A {2}/checkpoints | grep -c partial
rm {2}/../filler
step=$({0} inspect checkpoint {2} --json | sed "s/.*\"step\":\([0-9]*\).*/\1/")
mount -o remount,ro {2}/..
{0} train --resume auto --out {2} --max-steps $((step + 4)) >/dev/null 2>{3}/err-ro
echo "ended $?"
mount -o remount,rw {2}/..
{0} train --resume auto --out {2} --max-steps $((step + 4)) --epochs 1000000 >/dev/null && echo went on
)",
            kSherd, kRun, out, folder.path(), async)));
    const Output output = run(start + "sh " + folder.path("script") + "'");
    CAPTURE(output.text);
    CHECK(output.out == "ended 1\nverified\n0\nended 1\nwent on\n");
    const std::string full = text_of(folder.path("err")),
                      read_only = text_of(folder.path("err-ro"));
    check_refusal({1, "", full, full, 0.0, false}, {out, "No space left on device"});
    check_refusal({1, "", read_only, read_only, 0.0, false}, {out, "Read-only file system"});
  }
}

TEST_CASE("checkpoints: what does not fit on the disk is refused before the first step") {
  const TempDirectory folder;
  const std::string disk = folder.path("disk");
  fs::create_directory(disk);
  const std::string start = with_disk(disk, "size=1100k");
  if (start.empty()) return;
  const Output output = run(start + kSherd + " " + kRun + "--out " + disk +
                            "/run; status=$?; ls -A " + disk + "/run; exit $status'");
  CHECK(output.out.empty());
  check_refusal(output,
                {"--out " + disk + "/run", "10 checkpoints and the log need", "lower --keep"});
}
