// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes of one machine and meet in memory they share.
#pragma once

#include <sherd/comm/communicator.h>

#include <functional>

namespace sherd {

// The ranks of `others`, which is used only here; all of them call this together. Throws the same
// on every rank where the memory cannot be shared. on_end runs, perhaps more than once, when this
// rank ends the group or finds it ended.
std::unique_ptr<Communicator> make_shared_communicator(Communicator& others,
                                                       std::function<void()> on_end = {});

}  // namespace sherd
