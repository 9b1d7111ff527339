// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes which reach each other over TCP, without MPI: somebody starts every
// process with its number, all meet at rank 0, and connect with each other.
//
//   make_tcp_communicator({.address = "10.0.0.1:29400", .rank = 3, .size = 8, .token = "s3cret"});
//
// comm/README.md has the details: who listens where, what the token is good for, how a group ends.
#pragma once

#include <sherd/comm/communicator.h>

#include <optional>
#include <string>

namespace sherd {

struct TcpOptions {
  // Where rank 0 listens, "host:port" ("[::1]:29400" for IPv6): at that address only, so 0.0.0.0
  // where it should be all of the machine's.
  std::string address{};
  // Instead: rank 0 takes a free port of 127.0.0.1 and writes it into this file, for ranks of one
  // machine. The file is replaced as a whole, and gone when all ranks are there.
  std::string file{};
  int rank = 0, size = 1;
  // The same for all ranks of a run, at most 127 bytes. Keeps runs apart, and strangers out as far
  // as they cannot read the network: it is sent as it is.
  std::string token{};
  double join_seconds = 120.0;    // how long a rank waits for the others at the start
  double silence_seconds = 30.0;  // a machine that answers nothing for so long is lost
};

// A group of all `size` ranks, each of which calls this once. Throws on all of them, with what is
// wrong, where two have the same number, another size, token or version of Sherd's protocol; where
// one does not come in time, with its number.
SHERD_API std::unique_ptr<Communicator> make_tcp_communicator(const TcpOptions& options);

// The options as the environment has them; none where it does not name a place to meet.
//
//   SHERD_RENDEZVOUS   host:port, or file:PATH
//   SHERD_RANK, SHERD_WORLD_SIZE, SHERD_TOKEN
//   SHERD_JOIN_SECONDS
//
// or as torchrun sets them: MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, all four. Where there are
// both they must agree. With SHERD_RENDEZVOUS alone, rank and size are those of the launcher (srun,
// mpiexec). Throws where something is missing or contradicts something else.
SHERD_API std::optional<TcpOptions> tcp_options_from_environment();

}  // namespace sherd
