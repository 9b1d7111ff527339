// SPDX-License-Identifier: Apache-2.0
#include "bench_matrix_options.h"

#include "child_process.h"

#include <sherd/models/vit.h>
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/suggest.h>
#include <sherd/tools/trainer/settings.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <sstream>
#include <thread>

namespace sherd::cli {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

const std::vector<std::string> kPolicies{"none", "zero1", "zero2", "grad_op", "zero3", "hybrid"};
const std::vector<std::string> kPrecisions{"fp32", "bf16", "fp16"};

std::vector<std::string> words_of(const std::string& flag, const std::string& text) {
  std::vector<std::string> words;
  std::stringstream stream(text);
  for (std::string word; std::getline(stream, word, ',');) words.push_back(word);
  const bool whole = !words.empty() && !text.ends_with(',') &&
                     std::ranges::find(words, std::string()) == words.end();
  SHERD_CHECK(whole, "{}: expected words with commas between, got '{}'", flag, text);
  const std::set<std::string> distinct(words.begin(), words.end());
  SHERD_CHECK(distinct.size() == words.size(), "{}: something is named twice in '{}'", flag, text);
  return words;
}

std::vector<std::string> known_words(const std::string& flag, const std::string& text,
                                     const std::vector<std::string>& known) {
  std::vector<std::string> words = words_of(flag, text);
  for (const std::string& word : words) {
    SHERD_CHECK(std::ranges::find(known, word) != known.end(), "{}: unknown '{}'{}", flag, word,
                did_you_mean(word, known));
  }
  return words;
}

std::vector<std::int64_t> numbers_of(const char* flag, const std::string& text, std::int64_t most) {
  std::vector<std::int64_t> values;
  for (const std::string& word : words_of(flag, text)) {
    const bool digits = word.size() < 10 && std::ranges::all_of(word, [](unsigned char c) {
                          return std::isdigit(c) != 0;
                        });
    SHERD_CHECK(digits, "{}: expected whole numbers with commas between, got '{}'", flag, word);
    values.push_back(std::stoll(word));
    check_range(flag, values.back(), 1, most);
  }
  return values;
}

// {"torch": its version or null, "torch_missing": why, ...}
json probe_peers(const MatrixFlags& flags) {
  const std::string base =
      std::filesystem::temp_directory_path() / fmt::format("sherd-matrix-probe-{}", getpid());
  const std::string out = base + ".out", err = base + ".err";
  const std::vector<std::string> command{flags.python, flags.peer_script, "--probe"};
  json answer;
  std::string problem;
  try {
    const ProcessEnd end = run_process(command, out, err, 300.0, [] { return false; });
    const std::vector<std::uint8_t> text = read_file(out), errors = read_file(err);
    const std::string all(text.begin(), text.end());
    const std::size_t at = all.rfind("\n{");  // what is imported may print too
    answer = json::parse(at == std::string::npos ? all : all.substr(at + 1), nullptr, false);
    if (end.status != 0 || answer.is_discarded())
      problem = fmt::format("`{}` failed: {}", shell_line(command),
                            std::string(errors.begin(), errors.end()).substr(0, 300));
  } catch (const Error& error) {
    problem = error.what();
  }
  std::filesystem::remove(out);
  std::filesystem::remove(err);
  std::ranges::replace(problem, '\n', ' ');
  SHERD_CHECK(problem.empty(), "--python {}: {}", flags.python, problem);
  return answer;
}

// Which peers are measured; those that are not here go to left_out, or are an error where they were
// asked for by name.
std::vector<std::string> choose_peers(const MatrixFlags& flags, ordered_json& versions,
                                      std::vector<LeftOut>& left_out) {
  if (flags.peers == "none") {
    SHERD_CHECK(!flags.python_given && !flags.script_given,
                "--python and --peer-script: have no effect with --peers none");
    return {};
  }
  const std::vector<std::string> systems{"torch", "deepspeed"};
  const bool automatic = flags.peers == "auto";
  const std::vector<std::string> wanted =
      automatic ? systems
                : known_words("--peers", flags.peers, {"torch", "deepspeed", "none", "auto"});
  for (const std::string& word : wanted) {
    SHERD_CHECK(word == "torch" || word == "deepspeed", "--peers: {} stands alone, got '{}'", word,
                flags.peers);
  }
  if (automatic && !flags.script_given && !std::filesystem::exists(flags.peer_script)) {
    left_out.push_back({"PyTorch and DeepSpeed",
                        fmt::format("there is no {}; name that of the sources with --peer-script",
                                    flags.peer_script)});
    return {};
  }
  SHERD_CHECK(std::filesystem::exists(flags.peer_script),
              "--peers {}: there is no script at {}; name tools/peers/cell.py of the sources with "
              "--peer-script, or give --peers none",
              flags.peers, flags.peer_script);
  json found;
  try {
    found = probe_peers(flags);
  } catch (const Error& error) {
    if (!automatic || flags.python_given) throw;
    left_out.push_back({"PyTorch and DeepSpeed", error.what()});
    return {};
  }
  std::vector<std::string> peers;
  for (const std::string& word : wanted) {
    if (found.value(word, json()).is_string()) {
      peers.push_back(word);
      versions[word] = found[word];
      continue;
    }
    const std::string reason =
        fmt::format("{} cannot import it ({})", flags.python, found.value(word + "_missing", ""));
    SHERD_CHECK(automatic,
                "--peers {}: {}; install it there, name another Python with --python, "
                "or leave it out",
                word, reason);
    left_out.push_back({word == "torch" ? "PyTorch" : "DeepSpeed", reason});
  }
  return peers;
}

}  // namespace

MatrixOptions matrix_options(const MatrixFlags& flags, ordered_json& versions,
                             std::vector<LeftOut>& left_out) {
  MatrixOptions options;
  options.models = known_words("--models", flags.models, vit_preset_names());
  options.policies = known_words("--shards", flags.policies, kPolicies);
  options.precisions = known_words("--precisions", flags.precisions, kPrecisions);
  options.micro_batches = numbers_of("--micro-batches", flags.micro_batches, 1 << 16);
  options.ranks = numbers_of("--ranks", flags.ranks, 1024);
  check_range("--steps", flags.steps, 1, 1'000'000);
  check_range("--warmup", flags.warmup, 0, 1'000'000);
  check_range("--classes", flags.classes, 2, 1'000'000);
  check_range("--rounds", flags.rounds, 1, 1000);
  check_range("--threads", flags.threads, 0, 4096);
  check_range("--matrix", flags.product, 0, 1 << 16);
  SHERD_CHECK(flags.device == "cpu" || flags.device == "cuda",
              "--device: expected cpu or cuda, got '{}'", flags.device);
  SHERD_CHECK(flags.resume == "yes" || flags.resume == "no",
              "--resume: expected yes or no, got '{}'", flags.resume);
  SHERD_CHECK(flags.timeout >= 0.0, "--timeout: seconds from 0 (no limit) on, got {}",
              flags.timeout);
  SHERD_CHECK(flags.list || !flags.out.empty(),
              "--out: name a folder for the results, or give --list to see the cells");
  SHERD_CHECK(!flags.list || flags.out.empty(),
              "--list: measures nothing, so --out has no effect; leave one of them out");
  options.steps = flags.steps;
  options.warmup = flags.warmup;
  options.classes = flags.classes;
  options.rounds = flags.rounds;
  options.product = flags.product;
  options.image_size = flags.image_size;
  options.device = flags.device;
  options.python = flags.python;
  options.peer_script = flags.peer_script;
  options.out = flags.out;
  // The same for every number of ranks: else one rank would compute with more threads.
  const std::int64_t most = std::ranges::max(options.ranks);
  options.threads = flags.threads > 0
                        ? flags.threads
                        : std::max<std::int64_t>(1, std::thread::hardware_concurrency() / most);
  options.peers = choose_peers(flags, versions, left_out);
  const bool fp16 = std::ranges::find(options.precisions, "fp16") != options.precisions.end();
  SHERD_CHECK(!fp16 || options.peers.empty(),
              "--precisions fp16: the peers' script has fp32 and bf16; give --peers none, or leave "
              "fp16 out");
  return options;
}

}  // namespace sherd::cli
