// SPDX-License-Identifier: Apache-2.0
// Offloading to files as a user meets it: one message when the disk is not what it should be, and
// no scratch file left behind.
#include <sherd/comm/mpi.h>

#include <sys/file.h>

#include <cstdlib>
#include <filesystem>
#include <set>

#include "cli_support.h"

using namespace sherd;
using namespace sherd::test;
namespace fs = std::filesystem;

namespace {

const std::string kSherd = SHERD_PROGRAM;
#ifdef __SANITIZE_ADDRESS__
const std::string kMpiexec = "env ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 mpiexec -n 2 ";
#else
const std::string kMpiexec = "mpiexec -n 2 ";
#endif

const std::string kModel =
    "train --dataset synthetic --image-size 1x8x8 --classes 3 --patch 4 --dim 16 --depth 2 "
    "--heads 2 --threads 1 --batch-size 16 --images 64 --log-every 1 ";
const std::string kRun = kModel + "--epochs 1 ";
const std::string kEndless = kModel + "--epochs 1000000 ";

using Names = std::set<std::string>;

Names files_in(const std::string& folder) {
  Names names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

bool have_mpi() {
  static const bool have = mpi_built() && std::system("command -v mpiexec >/dev/null 2>&1") == 0;
  if (!have) MESSAGE("no MPI here: tests of processes are skipped");
  return have;
}

enum class Ranks { one, threads, processes };

std::vector<Ranks> kinds() {
  std::vector<Ranks> all{Ranks::one, Ranks::threads};
  if (have_mpi()) all.push_back(Ranks::processes);
  return all;
}

std::string command(Ranks ranks, const std::string& arguments) {
  const std::string start = ranks == Ranks::processes ? kMpiexec : "";
  return start + kSherd + " " + arguments + (ranks == Ranks::threads ? " --ranks 2 " : " ");
}

// A run that goes on until something happens to it, with everything that can be in files there.
class Endless {
 public:
  explicit Endless(Ranks ranks, const std::string& scratch)
      : child_("exec " + command(ranks, kEndless + (ranks == Ranks::one ? "--shard zero3 " : "") +
                                            "--offload-optimizer nvme:" + scratch +
                                            " --offload-parameters nvme:" + scratch + " --out " +
                                            path("run"))) {
    CHECK(comes_true([&] { return steps() > 2; }));
  }
  Child& child() { return child_; }
  std::string path(const std::string& name) const { return folder_.path(name); }
  std::ptrdiff_t steps() const {
    const std::string log = text_of(path("run/log.jsonl"));
    return std::ranges::count(log, '\n');
  }
  bool goes_on() const {
    const std::ptrdiff_t now = steps();
    return comes_true([&] { return steps() > now + 2; });
  }

 private:
  TempDirectory folder_;
  Child child_;
};

// The scratch file of the last rank for "optimizer" or "parameters".
std::string scratch_file(const std::string& folder, const std::string& what, Ranks ranks) {
  const std::string rank = ranks == Ranks::one ? "rank0" : "rank1";
  for (const std::string& name : files_in(folder)) {
    if (name.find(what) != std::string::npos && name.find(rank) != std::string::npos) {
      return folder + "/" + name;
    }
  }
  FAIL("no scratch file");
  return {};
}

}  // namespace

TEST_CASE("offload: a folder that cannot hold the files is refused before anything is made") {
  const TempDirectory folder;
  const std::string out = folder.path("out"), file = folder.path("file");
  std::ofstream(file) << "mine";
  const auto refused = [&](const std::string& flag, const std::vector<std::string>& pieces) {
    for (const Ranks ranks : kinds()) {
      CAPTURE(static_cast<int>(ranks));
      const std::string shard = ranks == Ranks::one ? " --shard zero3" : "";
      check_refusal(run("exec " + command(ranks, kRun + flag + shard + " --out " + out)), pieces);
      CHECK_FALSE(fs::exists(out));
      CHECK(text_of(file) == "mine");
      CHECK(files_in(folder.path("")) == Names{"file"});
    }
  };
  const std::string nowhere = folder.path("nowhere");
  for (const char* what : {"--offload-optimizer nvme:", "--offload-parameters nvme:"}) {
    refused(what + nowhere, {what + nowhere, "expected a directory where files can be made, and",
                             "does not exist; create it, or choose another"});
    refused(what + file, {what + file, "'" + file + "' is a file; choose a directory"});
    // A file may not be as large as this one has to be. (MPI could not start; OpenMP needs a few
    // KiB.)
    for (const char* ranks : {"1", "2"}) {
      const Output output =
          run("ulimit -f 8; trap '' XFSZ; exec " + kSherd + " " + kRun + "--shard zero3 " + what +
              folder.path("") + " --ranks " + ranks + " --out " + out);
      check_refusal(output, {what + folder.path(""), "cannot reserve ", "ulimit -f"});
      CHECK(files_in(folder.path("")) == Names{"file"});
    }
    fs::create_directory(folder.path("disk"));
    const std::string disk = folder.path("disk");
    if (const std::string start = with_disk(disk, "size=64k,ro"); !start.empty()) {
      for (const Ranks ranks : kinds()) {
        const std::string shard = ranks == Ranks::one ? " --shard zero3" : "";
        check_refusal(
            run(start + command(ranks, kRun + what + disk + shard + " --out " + out) + "'"),
            {what + disk, "is on a file system that can only be read; choose another"});
        CHECK_FALSE(fs::exists(out));
      }
    }
    fs::remove(folder.path("disk"));
  }
}

TEST_CASE("offload: a disk without the room is refused with what is needed and what is free") {
  const TempDirectory folder;
  const std::string disk = folder.path("disk"), out = folder.path("out");
  fs::create_directory(disk);
  const std::string start = with_disk(disk, "size=64k");
  if (start.empty()) return;
  for (const Ranks ranks : kinds()) {
    CAPTURE(static_cast<int>(ranks));
    const std::string all =
        command(ranks, kRun + "--dim 64 --offload-optimizer nvme:" + disk + " --out " + out);
    const Output output = run(start + all + "; status=$?; ls " + disk + "; exit $status'");
    CHECK(output.out.empty());  // nothing is left there
    check_refusal(output, {"--offload-optimizer nvme:" + disk, "no room for '" + disk, "it needs ",
                           " bytes free for this user; free some space or choose another"});
    CHECK_FALSE(fs::exists(out));
  }
}

TEST_CASE("offload: a file that is deleted, cut short or replaced ends the run with one message") {
  struct Damage {
    const char* name;
    std::function<void(const std::string&)> make;
    std::vector<std::string> pieces;
  };
  const std::vector<Damage> all{
      {"deleted", [](const std::string& path) { fs::remove(path); }, {"was deleted or renamed"}},
      {"cut", [](const std::string& path) { (void)!truncate(path.c_str(), 4096); }, {}},
      {"replaced",
       [](const std::string& path) {
         std::ofstream(path + ".new") << "mine";  // never without a file of that name
         fs::rename(path + ".new", path);
       },
       {"was replaced", "leave it alone until the program ends"}}};
  for (const Ranks ranks : kinds()) {
    CAPTURE(static_cast<int>(ranks));
    for (const char* what : {"optimizer", "parameters"}) {
      CAPTURE(what);
      for (const Damage& damage : all) {
        CAPTURE(damage.name);
        const TempDirectory scratch;
        Endless endless(ranks, scratch.path(""));
        const std::string path = scratch_file(scratch.path(""), what, ranks);
        damage.make(path);
        // What is cut off while all of it is in memory is written again, and nothing is lost.
        const bool cut = std::string(damage.name) == "cut";
        for (int i = 0; cut && i < 500 && !endless.child().ends_within(0.02); ++i)
          damage.make(path);
        const Output output = endless.child().wait(30);
        CHECK_FALSE(output.hung);
        std::vector<std::string> pieces = damage.pieces;
        pieces.push_back(fs::path(path).filename().string());
        check_refusal({output.status, output.out, output.text, output.err, 0.0, false}, pieces);
        const bool replaced = std::string(damage.name) == "replaced";
        CHECK(files_in(scratch.path("")) ==
              (replaced ? Names{fs::path(path).filename().string()} : Names{}));
        if (replaced) CHECK(text_of(path) == "mine");
        // What is there of weights is whole, and says that it is not the run's end.
        const std::string run = endless.path("run");
        Names files = files_in(run);
        if (files.erase("model-before-error.safetensors") > 0) {
          CHECK(output.err.find("model-before-error.safetensors") != std::string::npos);
          const Output weights =
              sherd_run("inspect weights " + run + "/model-before-error.safetensors");
          CHECK_MESSAGE(weights.status == 0, weights.text);
        }
        for (const std::string& file : files) {
          CAPTURE(file);
          const bool expected = file == "config.toml" || file == "log.jsonl";
          CHECK(expected);
        }
        CHECK(files.size() == 2);
      }
    }
  }
}

TEST_CASE("offload: a signal ends the run with its weights, and takes the files away") {
  for (const Ranks ranks : kinds()) {
    CAPTURE(static_cast<int>(ranks));
    const TempDirectory scratch;
    Endless endless(ranks, scratch.path(""));
    CHECK(files_in(scratch.path("")).size() > 1);
    kill(ranks == Ranks::processes ? -endless.child().pid() : endless.child().pid(), SIGINT);
    const Output output = endless.child().wait(30);
    CAPTURE(output.text);
    CHECK_FALSE(output.hung);
    CHECK(output.text.find("stopped by a signal") != std::string::npos);
    CHECK(files_in(scratch.path("")).empty());
    CHECK(sherd_run("eval " + endless.path("run")).status == 0);
  }
}

TEST_CASE("offload: files of a killed run go with the next start, those of others stay") {
  const TempDirectory scratch, outs;
  const std::string folder = scratch.path("");
  Endless living(Ranks::threads, folder);
  const Names in_use = files_in(folder);
  Names left;
  {
    Endless killed(Ranks::threads, folder);
    kill(killed.child().pid(), SIGKILL);
    CHECK(killed.child().wait(30).status == 128 + SIGKILL);
    left = files_in(folder);
  }
  CHECK(left.size() == 2 * in_use.size());
  // The kernel may be busy with the killed program's ring for a moment more, and hold its files.
  CHECK(comes_true([&] {
    return std::ranges::all_of(left, [&](const std::string& name) {
      const int file = open((folder + "/" + name).c_str(), O_RDWR | O_CLOEXEC);
      const bool free = flock(file, LOCK_EX | LOCK_NB) == 0;
      close(file);
      return free || in_use.contains(name);
    });
  }));
  // Made by another machine that shares the disk, or by hand.
  const std::string boot = text_of("/proc/sys/kernel/random/boot_id");
  REQUIRE(boot.size() > 36);
  const Names others{"sherd-offload-00000000-0000-0000-0000-000000000000-optimizer-1-rank0-7f",
                     "sherd-offload-mine", "model.safetensors"};
  for (const std::string& name : others) std::ofstream(folder + "/" + name) << "mine";
  fs::create_directory(folder + "/sherd-offload-" + boot.substr(0, 36) + "-folder");
  const Output next = sherd_run(kRun + "--ranks 2 --offload-optimizer nvme:" + folder + " --out " +
                                outs.path("next"));
  CAPTURE(next.text);
  CHECK(next.status == 0);
  Names expected = in_use;
  expected.insert(others.begin(), others.end());
  expected.insert("sherd-offload-" + boot.substr(0, 36) + "-folder");
  CHECK(files_in(folder) == expected);
  CHECK(living.goes_on());
  kill(living.child().pid(), SIGINT);
  CHECK(living.child().wait(30).status == 130);
  for (const std::string& name : in_use) expected.erase(name);
  CHECK(files_in(folder) == expected);
}
