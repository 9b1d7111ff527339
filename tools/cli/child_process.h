// SPDX-License-Identifier: Apache-2.0
// A program that runs beside this one and is waited for.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace sherd::cli {

struct ProcessEnd {
  int status = -1;           // of exit; -1 where a signal ended it
  int signal = 0;            // that ended it
  bool timed_out = false;    // it was ended because its time was over
  bool interrupted = false;  // it was ended because this program is to end
  double seconds = 0.0;
};

// Runs a command, found by PATH where it has no slash, in a process group of its own, with nothing
// to read, its output in two files that are made anew. What it started and left is ended with it.
// `waiting` is called some times a second; where it returns true the command is ended.
// limit_seconds 0: none. Throws where the command cannot be started.
ProcessEnd run_process(const std::vector<std::string>& command, const std::string& out_path,
                       const std::string& err_path, double limit_seconds,
                       const std::function<bool()>& waiting);

// For sh: with quotes where a word needs them.
std::string shell_line(const std::vector<std::string>& command);

// While one lives, SIGINT and SIGTERM only set a mark.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  static bool interrupted();
};

}  // namespace sherd::cli
