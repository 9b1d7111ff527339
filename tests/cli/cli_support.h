// SPDX-License-Identifier: Apache-2.0
// Helpers of the tests that start programs: what they print, how they end, what they refuse.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "../unit/io_support.h"

namespace sherd::test {

inline std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Output {
  int status = -1;        // 128 + the signal's number where one ended it
  std::string out, text;  // stdout; stdout and then stderr
  std::string err;
  double seconds = 0.0;
  bool hung = false;  // it was still running at its limit, and was killed
};

// A command of the shell that runs beside the test, in a process group of its own.
class Child {
 public:
  explicit Child(const std::string& command) {
    pid_ = fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      setpgid(0, 0);
      const int out = open(files_.path("out").c_str(), O_WRONLY | O_CREAT, 0666);
      const int err = open(files_.path("err").c_str(), O_WRONLY | O_CREAT, 0666);
      dup2(open("/dev/null", O_RDONLY), 0);
      dup2(out, 1);
      dup2(err, 2);
      execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
      _exit(127);
    }
    setpgid(pid_, pid_);
  }
  ~Child() {
    if (pid_ > 0) wait(0.0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  // It can still be waited for.
  bool ends_within(double limit_seconds) const {
    const auto start = Clock::now();
    siginfo_t info{};
    do {
      if (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0) break;
      if (info.si_pid != 0) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    } while (std::chrono::duration<double>(Clock::now() - start).count() < limit_seconds);
    return info.si_pid != 0;
  }

  // Of the program itself where the command begins with "exec".
  pid_t pid() const { return pid_; }

  Output wait(double limit_seconds) {
    Output output;
    int status = 0;
    while (waitpid(pid_, &status, WNOHANG) == 0) {
      output.seconds = std::chrono::duration<double>(Clock::now() - start_).count();
      if (output.seconds > limit_seconds && !output.hung) {
        output.hung = true;
        kill(-pid_, SIGKILL);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    pid_ = -1;
    output.seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    output.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    output.out = text_of(files_.path("out"));
    output.err = text_of(files_.path("err"));
    output.text = output.out + output.err;
    return output;
  }

 private:
  using Clock = std::chrono::steady_clock;
  TempDirectory files_;
  Clock::time_point start_ = Clock::now();
  pid_t pid_ = -1;
};

// What hangs fails the test, which goes on.
inline Output run(const std::string& command, double limit_seconds = 120.0) {
  Output output = Child(command).wait(limit_seconds);
  CHECK_MESSAGE(!output.hung, "still running after ", limit_seconds, " s: ", command);
  return output;
}

inline Output sherd_run(const std::string& arguments) {
  return run("exec " SHERD_PROGRAM " " + arguments);
}

inline bool contains(const Output& output, const std::string& piece) {
  return output.text.find(piece) != std::string::npos;
}

// One clear error: one line of stderr, "sherd: ", every piece in it, status 1.
inline void check_refusal(const Output& output, const std::vector<std::string>& pieces) {
  CAPTURE(output.text);
  CHECK(output.status == 1);
  CHECK(output.err.starts_with("sherd: "));
  CHECK(std::ranges::count(output.err, '\n') == 1);
  CHECK(output.err.ends_with('\n'));
  for (const std::string& piece : pieces) {
    CAPTURE(piece);
    CHECK(output.err.find(piece) != std::string::npos);
  }
}

inline void refuses(const std::string& arguments, const std::vector<std::string>& pieces) {
  CAPTURE(arguments);
  check_refusal(sherd_run(arguments), pieces);
}

// Whether it came true within the limit.
inline bool comes_true(const std::function<bool()>& condition, double limit_seconds = 60.0) {
  const auto start = std::chrono::steady_clock::now();
  while (!condition()) {
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    if (waited.count() > limit_seconds) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

// In a mount namespace of its own, with a file system in memory at `at`: what begins a command of
// the shell that a ' ends. Empty where that may not be made here.
inline std::string with_disk(const std::string& at, const std::string& options) {
  const std::string start =
      "unshare -rm sh -c 'mount -t tmpfs -o " + options + " tmpfs " + at + " && ";
  if (std::system((start + "true' >/dev/null 2>&1").c_str()) == 0) return "exec " + start;
  MESSAGE("no file system can be mounted here: tests of a full one are skipped");
  return {};
}

inline const std::string kTinyModel =
    "--dataset synthetic --image-size 1x8x8 --classes 3 --patch 4 --dim 16 --depth 1 --heads 2 "
    "--batch-size 16 --threads 1 ";
inline const std::string kTiny = kTinyModel + "--images 64 ";

}  // namespace sherd::test
