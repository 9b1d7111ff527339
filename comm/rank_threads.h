// SPDX-License-Identifier: Apache-2.0
// A program of several ranks in one process.
#pragma once

#include <sherd/comm/communicator.h>

#include <functional>

namespace sherd {

// Runs body on every rank of a new group: rank 0 on the calling thread, the others on threads of
// their own. A rank whose body throws ends the group with "rank R: message". When all have ended
// this throws what ended it: the message of the first rank that failed of its own accord, or where
// all only met the same reason (ranks that disagree), that reason.
//
// The group ends when the exception has left the body. What the body destroys on the way and has
// threads of its own in collectives must end the group itself (Communicator::abort).
SHERD_API void run_rank_threads(int ranks, const std::function<void(Communicator&)>& body);

}  // namespace sherd
