// SPDX-License-Identifier: Apache-2.0
#include "child_process.h"

#include <fcntl.h>
#include <sherd/runtime/error.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>

extern char** environ;

namespace sherd::cli {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr double kGrace = 5.0;  // seconds between asking a command to end and ending it

volatile sig_atomic_t interrupt_mark = 0;
struct sigaction old_interrupt, old_terminate;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

pid_t spawn(const std::vector<std::string>& command, const std::string& out_path,
            const std::string& err_path) {
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, 1, out_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
  posix_spawn_file_actions_addopen(&files, 2, err_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  posix_spawnattr_setpgroup(&attributes, 0);
  std::vector<char*> words;
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  pid_t child = 0;
  const int error = posix_spawnp(&child, words[0], &files, &attributes, words.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  SHERD_CHECK(error == 0, "{}: cannot be started: {}", command[0], std::strerror(error));
  // Where memory runs out the system ends this first, and what it starts, not who waits for it.
  std::ofstream(fmt::format("/proc/{}/oom_score_adj", child)) << 1000;
  return child;
}

}  // namespace

ProcessEnd run_process(const std::vector<std::string>& command, const std::string& out_path,
                       const std::string& err_path, double limit_seconds,
                       const std::function<bool()>& waiting) {
  const pid_t child = spawn(command, out_path, err_path);
  const auto start = Clock::now();
  ProcessEnd end;
  Clock::time_point asked;
  bool ending = false;
  int status = 0;
  // Seldom enough to leave the cores to the command.
  for (;; std::this_thread::sleep_for(20ms)) {
    const pid_t found = waitpid(child, &status, WNOHANG);
    SHERD_CHECK(found >= 0 || errno == EINTR, "{}: cannot be waited for: {}", command[0],
                std::strerror(errno));
    if (found == child) break;
    if (ending) {
      if (seconds_since(asked) > kGrace) kill(-child, SIGKILL);
      continue;
    }
    end.interrupted = waiting();
    end.timed_out = !end.interrupted && limit_seconds > 0.0 && seconds_since(start) > limit_seconds;
    if (!end.interrupted && !end.timed_out) continue;
    ending = true;
    asked = Clock::now();
    kill(-child, SIGTERM);
  }
  kill(-child, SIGKILL);  // ranks that outlived what started them
  end.seconds = seconds_since(start);
  if (WIFEXITED(status)) end.status = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
  return end;
}

std::string shell_line(const std::vector<std::string>& command) {
  std::string line;
  for (const std::string& word : command) {
    const bool plain = !word.empty() && std::ranges::all_of(word, [](unsigned char c) {
      return std::isalnum(c) != 0 || std::strchr("-_./=,:+@%", c) != nullptr;
    });
    std::string quoted = word;
    if (!plain) {
      quoted = "'";
      for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
      quoted += "'";
    }
    line += (line.empty() ? "" : " ") + quoted;
  }
  return line;
}

InterruptGuard::InterruptGuard() {
  interrupt_mark = 0;
  struct sigaction action {};
  action.sa_handler = [](int) { interrupt_mark = 1; };
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, &old_interrupt);
  sigaction(SIGTERM, &action, &old_terminate);
}

InterruptGuard::~InterruptGuard() {
  sigaction(SIGINT, &old_interrupt, nullptr);
  sigaction(SIGTERM, &old_terminate, nullptr);
}

bool InterruptGuard::interrupted() {
  return interrupt_mark != 0;
}

}  // namespace sherd::cli
