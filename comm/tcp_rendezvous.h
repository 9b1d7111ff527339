// SPDX-License-Identifier: Apache-2.0
// How processes find each other over TCP.
//
// Note [Rendezvous]
// Rank 0 listens; every other rank connects to it and says hello: who it is, and the port at which
// it listens itself, on the address by which it reaches rank 0. When all are there rank 0 tells
// everybody all places. Then each pair connects, the higher rank to the lower, so that nobody waits
// in a circle; every rank reports to rank 0, which lets all go or tells all what went wrong.
//
// A connection that does not begin with Sherd's magic is not ours and is dropped. One that does,
// but with another token, version, size, or a rank that is there already, is a mistake of whoever
// started the run: it ends the rendezvous for all, with the same message on both sides.
#pragma once

#include <sherd/comm/tcp_communicator.h>
#include <sherd/comm/tcp_socket.h>

#include <functional>
#include <string>
#include <vector>

namespace sherd {

inline constexpr int kTcpToken = 128;  // bytes of a token in a hello, with a zero at its end

// Connections with every member but oneself, by rank; in several layers where a pair has several.
using TcpLinks = std::vector<TcpSocket>;

struct TcpMesh {
  int rank = 0;                    // of this process in the mesh
  std::vector<TcpAddress> places;  // where each rank listens for this mesh
  std::uint64_t group = 0;         // a number that no other mesh of these processes has
  std::string token;
  double silence_seconds = 30.0;
};
// All ranks of the mesh together. `check` is called while waiting and may throw. Throws after the
// deadline, with the ranks that are missing.
std::vector<TcpLinks> connect_mesh(const TcpMesh& mesh, const TcpSocket& listener, int layers,
                                   TcpDeadline deadline, const std::function<void()>& check);

struct TcpMeeting {
  TcpAddress listen_at;            // where this process listens for further connections, port 0
  std::vector<std::string> hosts;  // of every rank, as this process reaches it
  std::vector<TcpLinks> layers;
};
// Of all ranks of the options, two connections for each pair.
TcpMeeting meet(const TcpOptions& options);

}  // namespace sherd
