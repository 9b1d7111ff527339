// SPDX-License-Identifier: Apache-2.0
#include "stop_signal.h"

#include <sherd/runtime/error.h>

#include <csignal>
#include <initializer_list>

namespace sherd::cli {
namespace {

volatile std::sig_atomic_t requested = 0;

void request(int signal) {
  requested = 1;
  std::signal(signal, SIG_DFL);
}

}  // namespace

void watch_stop_signals() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, request);
}

bool stop_requested() {
  return requested != 0;
}

void check_not_stopped(const char* what_is_left) {
  SHERD_CHECK(!stop_requested(), "stopped by a signal; {}", what_is_left);
}

}  // namespace sherd::cli
