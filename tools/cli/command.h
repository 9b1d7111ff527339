// SPDX-License-Identifier: Apache-2.0
// The commands of the `sherd` program. Each adds itself to the parser; its callback runs after
// parsing and returns the exit status.
#pragma once

#include <sherd/runtime/group_digits.h>
#include <sherd/tools/trainer/settings.h>
#include <CLI/CLI.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace sherd::cli {

struct Command {
  CLI::App* app = nullptr;
  std::function<int()> run;
};

Command add_train(CLI::App& parent);
Command add_eval(CLI::App& parent);
Command add_inspect(CLI::App& parent);
Command add_inspect_checkpoint(CLI::App& inspect);  // below add_inspect
Command add_convert(CLI::App& parent);
Command add_plan(CLI::App& parent);
Command add_bench(CLI::App& parent);
Command add_bench_calibrate(CLI::App& bench);   // below add_bench
Command add_bench_checkpoint(CLI::App& bench);  // below add_bench
Command add_bench_comm(CLI::App& bench);
Command add_bench_disk(CLI::App& bench);
Command add_bench_kernels(CLI::App& bench);
Command add_bench_plan(CLI::App& bench);
Command add_bench_matrix(CLI::App& bench);

// Flags for settings of the given sections, collected as they were typed; resolve() applies them
// over the TOML file.
class SettingFlags {
 public:
  // `what`: sections ("model") and single keys ("run.seed").
  SettingFlags(CLI::App* app, const std::vector<std::string>& what);
  // The file, where one is given, then the flags.
  TrainSettings resolve(const std::optional<std::string>& toml_path) const;
  TrainSettings resolve_over(const Assignments& file) const;
  bool gives(const std::string& key) const;
  std::vector<std::string> given() const;           // the keys
  std::string value(const std::string& key) const;  // empty where it was not given
  // Throws where the flag was given, which would do nothing: "plan reads no weights".
  void refuse(const std::string& key, const char* why) const;
  // The first flag that was given and is not for one of these keys; empty if there is none.
  std::string other_than(const std::vector<std::string>& keys) const;

 private:
  std::shared_ptr<Assignments> flags_ = std::make_shared<Assignments>();
};

// Throws where the flag was given with what is no number above 0, or from 0 on.
void check_tolerance(const char* flag, const CLI::App& app, double value, bool may_be_zero = false);
// Throws where a launcher started several processes: each would do the same.
void check_one_process(const char* command);

// A name for a file that is written at the end of long work: refused at once where it is taken or
// cannot be made. What is still empty then is removed.
class ClaimedFile {
 public:
  explicit ClaimedFile(std::string path);
  ~ClaimedFile();
  ClaimedFile(const ClaimedFile&) = delete;
  ClaimedFile& operator=(const ClaimedFile&) = delete;

 private:
  std::string path_;
};

std::int64_t peak_resident_bytes();  // of this process

// A line that is redrawn while work goes on, only on a terminal; elsewhere nothing is shown.
class ProgressLine {
 public:
  ProgressLine();
  void show(const std::string& text);  // at most ten times a second
  void clear();

 private:
  bool terminal_;
  bool shown_ = false;
  double last_ = 0.0;
};

// "[######----]" of `width` characters inside the brackets.
std::string bar(double fraction, int width);

}  // namespace sherd::cli
