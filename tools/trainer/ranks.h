// SPDX-License-Identifier: Apache-2.0
// The ranks of a run: threads of this process (--ranks), or processes, of a launcher (mpiexec) or
// started one by one, which meet over TCP.
#pragma once

#include <sherd/comm/agreement.h>
#include <sherd/comm/sharding/engine.h>
#include <sherd/comm/tcp_communicator.h>
#include <sherd/tools/trainer/settings.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace sherd {

// How many ranks the settings and the launcher make. Throws where they contradict each other, or a
// launcher started several processes and this build has no MPI.
SHERD_API int planned_ranks(const TrainSettings& settings);

// How this process is one of several.
struct Processes {
  std::string by;  // the launcher, or the variable of the environment that says where they meet
  int rank = 0, size = 1;
  std::optional<TcpOptions> tcp;  // else MPI
};
// By SHERD_RENDEZVOUS over TCP; else by a launcher that MPI knows; else, by torchrun's variables,
// over TCP. None where this process is the only one. Throws where the environment contradicts
// itself.
SHERD_API std::optional<Processes> processes();

// Whether there are several, and then whether this is the first. What is wrong with the environment
// is for those who ask for the ranks.
SHERD_API bool under_launcher();
SHERD_API bool is_first_process();

// Calls body on every rank of this process. A rank that throws ends all; this throws what the first
// one said.
SHERD_API void run_on_ranks(const TrainSettings& settings,
                            const std::function<void(Communicator&)>& body);

// For what goes wrong in a launched process before it is a rank: tells the others, so that none
// waits in vain, and throws what the first process should print. Returns where there is nobody to
// tell.
SHERD_API void report_to_launched(const std::string& message);

// Of the settings, checked against the number of ranks. --shard auto: none on one rank, else zero3.
SHERD_API ShardingOptions sharding_options(const TrainSettings& settings, int ranks);

// Throws, naming two ranks and the first difference, unless all were started with the same: `lines`
// (data, and what is no setting) and the settings. To be called before anything else: ranks that
// differ could wait for each other in different groups.
SHERD_API void check_same_start(Communicator& world, std::vector<std::string> lines,
                                const TrainSettings& settings);

// The threads of the settings, or this rank's part of those of the machine; on cuda, a GPU of its
// own. All ranks together.
SHERD_API ContextOptions rank_context_options(const TrainSettings& settings, Communicator& world);

// "4 ranks as threads, zero3", for people.
SHERD_API std::string describe_ranks(const TrainSettings& settings, const Communicator& world);

// A launched rank's group has ended; the first process prints why.
class SHERD_API GroupEnded : public Error {
 public:
  using Error::Error;
};

}  // namespace sherd
