// SPDX-License-Identifier: Apache-2.0
// The time of a collective, by the model with which NCCL chooses its own algorithm and protocol.
//
// Note [The time of a collective]
// On device cuda it is that of NCCL's tuning source (NVIDIA/nccl, src/graph/tuning.cc: the formulas
// of version 2.19, the newer constants of 2.27; link rates in src/graph/topo.h):
//
//   seconds = latency + bytes / bandwidth,   bytes: what all-gather makes, reduce-scatter takes
//
// for the ring, and for all-reduce the tree, with each protocol (LL, LL128, Simple); the fastest
// counts. With n ranks on N nodes and B, the bus bandwidth (what one place of the ring sends):
//
//   ring:  bandwidth = B n / steps; steps = 2 (n-1) for all-reduce, n-1 for all-gather and
//          reduce-scatter, n for broadcast. With LL B is a quarter (a third in one node, but for
//          all-reduce), and at most what the processor passes on; with LL128 0.92 of it (0.7 with
//          one rank a node)
//          latency = base + (steps - inter) max(near, overhead) + inter far;
//          inter = 2N (at most all) for all-reduce, else N-1. Of Simple with 64 bytes a rank and
//          channel or more, times 1.4 (1.9 before sm80) for all-reduce over several nodes
//   tree:  bandwidth = 0.92 0.85 B / 2, with LL at 1/3.8, with LL128 at 7/9 in one node and 0.9375
//          else, and less for middle sizes (kTreeFactor)
//          latency = base + 2 ((n/N - 1) near + floor(log2 N) far)
//
// B is the least of the links that the ring takes. A rank has its fair share of a link that several
// use, because all ranks of a step communicate at once: r ranks of a group in a node send r/R of
// what leaves the node, where R ranks are in it. So a group with one rank in each node has one
// share of the adapters, whatever its sibling groups do. One rank sends by one adapter at most.
//
// An all-to-all, which NCCL makes of messages, sends to the ranks of the domain, the rest of the
// node and the rest of the world by a rank's own share of each link, at the same time. On device
// cpu there is one protocol, and the file has the latency of a step. Left out: NVLink SHARP,
// collectives in switches, PAT, channel limits.
#pragma once

#include <sherd/comm/communicator.h>
#include <sherd/runtime/schedule.h>
#include <sherd/tools/planner/system.h>

#include <string_view>

namespace sherd {

// Where the ranks of a group are: rank r of the world is device r of the row of all nodes.
struct GroupPlace {
  int ranks = 1;
  int nodes = 1;    // that the network joins: nodes, or NVLink domains that are larger
  int domains = 1;  // NVLink domains, or devices where there is none
  int most_in_domain = 1;
  // What the group has of the node's adapters, and of the link that leaves a domain, where it has
  // least of them.
  double adapters = 0;  // 0: there is no network
  double link_share = 1;
};
// world: the ranks that share the links, from rank 0 on; 0: so many that all devices have one.
SHERD_API GroupPlace place_of(const RankGroup& group, const System& system, int world = 0);

// How a collective is done, for reports and tests.
struct CollectiveCost {
  double seconds = 0;
  double latency = 0;          // the part that does not depend on the size
  std::string_view algorithm;  // "ring", "tree", "messages"; empty for one rank
  std::string_view protocol;   // "LL", "LL128", "Simple"; empty on device cpu
};

// `bytes` is the whole buffer, as in Work; world as above. Throws where the group needs a link that
// the system does not have.
SHERD_API CollectiveCost collective_cost(Collective collective, std::int64_t bytes,
                                         const RankGroup& group, const System& system,
                                         int world = 0);

// Bytes per second that one place of the group's ring sends. 2 ranks or more.
SHERD_API double bus_bandwidth(const GroupPlace& place, const System& system);

}  // namespace sherd
