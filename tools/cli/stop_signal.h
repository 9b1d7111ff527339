// SPDX-License-Identifier: Apache-2.0
// Ctrl-C and its like, for commands that end in order.
#pragma once

namespace sherd::cli {

// From now on the first SIGINT, SIGTERM or SIGHUP sets a flag, which is all that a handler can
// reach. The second one of a kind ends the process at once.
void watch_stop_signals();
bool stop_requested();
// Throws where it is: "stopped by a signal; the file is removed".
void check_not_stopped(const char* what_is_left);

}  // namespace sherd::cli
