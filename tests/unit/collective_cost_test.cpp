// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/runtime/error.h>
#include <sherd/tools/planner/collective_cost.h>
#include <sherd/tools/planner/cost_model.h>

#include <cmath>

using namespace sherd;

namespace {

// Relative alone: doctest's own tolerance is 12 microseconds.
doctest::Approx near(double value) {
  return doctest::Approx(value).scale(0);
}

constexpr double kMicro = 1e-6, kGiga = 1e9;
constexpr std::int64_t kHuge = std::int64_t{1} << 50;

// Eight GPUs a node behind a switch, each with an adapter of its own.
System switched() {
  System s;
  s.name = "switched";
  s.compute_capability = 80;
  s.devices_per_node = 8;
  s.fast_link = {.devices = 8, .bytes_per_second = 240 * kGiga, .switched = true};
  s.network = {.bytes_per_second = 24 * kGiga, .adapters = 8, .latency = 0, .pcie_switch = true};
  s.host.processor = "intel";
  return s;
}

// Six GPUs a node: two sockets of three that are joined in pairs; one adapter for all.
System sockets() {
  System s;
  s.name = "sockets";
  s.compute_capability = 70;
  s.devices_per_node = 6;
  s.fast_link = {.devices = 3, .bytes_per_second = 80 * kGiga, .switched = false};
  s.node_link = {.kind = "x-bus", .bytes_per_second = 32 * kGiga, .latency = 0};
  s.network = {.bytes_per_second = 12 * kGiga, .adapters = 1, .latency = 0, .pcie_switch = false};
  s.host.processor = "power";
  return s;
}

double bus(const System& system, const RankGroup& group, int world = 0) {
  return bus_bandwidth(place_of(group, system, world), system) / kGiga;
}

}  // namespace

TEST_CASE("collective cost: where the ranks of a group are") {
  const System s = sockets();
  const auto place = [&](const RankGroup& group) {
    const GroupPlace p = place_of(group, s);
    return std::vector<int>{p.nodes, p.domains, p.most_in_domain};
  };
  CHECK(place({0, 3, 1}) == std::vector<int>{1, 1, 3});
  CHECK(place({0, 6, 1}) == std::vector<int>{1, 2, 3});
  CHECK(place({2, 2, 1}) == std::vector<int>{1, 2, 1});
  CHECK(place({0, 8, 1}) == std::vector<int>{2, 3, 3});
  CHECK(place({1, 4, 6}) == std::vector<int>{4, 4, 1});
  CHECK(place({0, 4, 3}) == std::vector<int>{2, 4, 1});
  CHECK(place({5, 1, 1}) == std::vector<int>{1, 1, 1});
  CHECK_THROWS_WITH_AS(place_of({0, 0, 1}, s), doctest::Contains("size 0"), Error);
}

TEST_CASE("collective cost: the bandwidth of a group's ring is that of its narrowest link") {
  const System s = switched();
  CHECK(bus(s, {0, 2, 1}) == near(240));
  CHECK(bus(s, {0, 8, 1}) == near(240));
  CHECK(bus(s, {0, 16, 1}) == near(8 * 24));
  CHECK(bus(s, {0, 2, 8}) == near(24));  // one in each node: an adapter each
  CHECK(bus(s, {0, 8, 2}) == near(4 * 24));

  const System p = sockets();
  CHECK(bus(p, {0, 2, 1}) == near(40));  // one peer of two
  CHECK(bus(p, {0, 3, 1}) == near(80));
  CHECK(bus(p, {0, 6, 1}) == near(32));
  CHECK(bus(p, {0, 2, 3}) == near(32.0 / 3));  // three such pairs share the bus
  CHECK(bus(p, {0, 12, 1}) == near(12));
  CHECK(bus(p, {0, 2, 6}) == near(12.0 / 6));  // six such pairs share the adapter
  CHECK(bus(p, {0, 4, 3}) == near(12.0 / 3));

  System domain = switched();  // a domain of 16 that spans four nodes of four
  domain.devices_per_node = 4;
  domain.fast_link->devices = 16;
  domain.network->adapters = 4;
  CHECK(place_of({0, 16, 1}, domain).nodes == 1);
  CHECK(bus(domain, {0, 16, 1}) == near(240));
  CHECK(bus(domain, {0, 32, 1}) == near(240));  // 16 adapters are more
  CHECK(bus(domain, {0, 2, 16}) == near(24));

  // A world that leaves devices idle shares less: one of two ranks in each of two nodes of six.
  System few = sockets();
  few.devices_per_node = 2;
  few.fast_link.reset();
  CHECK(bus(few, {0, 2, 2}) == near(6));
  CHECK(bus(sockets(), {0, 2, 3}, 4) == near(32.0 / 3));
  CHECK(bus(sockets(), {0, 6, 1}, 6) == near(32));
  // A rank that is alone in the last node or on the last socket has its link for itself.
  CHECK(bus(sockets(), {0, 7, 1}, 7) == near(12));
  CHECK(bus(sockets(), {0, 4, 1}, 4) == near(32));
  CHECK(bus(sockets(), {0, 2, 6}, 8) == near(12.0 / 6));  // of six in the first node
  CHECK(bus(sockets(), {1, 2, 6}, 8) == near(12.0 / 6));
}

TEST_CASE("collective cost: one rank waits for nobody") {
  for (std::size_t i = 0; i < kCollectives; ++i) {
    CHECK(collective_cost(static_cast<Collective>(i), 1 << 20, {3, 1, 1}, switched()).seconds == 0);
  }
}

TEST_CASE("collective cost: all-gather and reduce-scatter by the formulas") {
  const System s = switched();
  for (const Collective collective : {Collective::all_gather, Collective::reduce_scatter}) {
    // One node, 7 steps. Simple: 8.4 + 7 x 3.4 us, 240 x 8 / 7 GB/s.
    CollectiveCost cost = collective_cost(collective, 1 << 30, {0, 8, 1}, s);
    CHECK(cost.protocol == "Simple");
    CHECK(cost.seconds == near(32.2 * kMicro + (1 << 30) / (240 * kGiga * 8 / 7)));
    // LL: 6.6 + 7 x 0.6 us, 80 x 8 / 7 GB/s (a third).
    cost = collective_cost(collective, 1024, {0, 8, 1}, s);
    CHECK(cost.protocol == "LL");
    CHECK(cost.seconds == near(10.8 * kMicro + 1024 / (80 * kGiga * 8 / 7)));
    // LL128: 14 + 7 x 1.9 us, 0.92 x 240 x 8 / 7 GB/s.
    cost = collective_cost(collective, 8 << 20, {0, 8, 1}, s);
    CHECK(cost.protocol == "LL128");
    CHECK(cost.seconds == near(27.3 * kMicro + (8 << 20) / (0.92 * 240 * kGiga * 8 / 7)));
    // Two nodes: 14 steps near, one far. Simple: 8.4 + 14 x 3.4 + 14 us, 192 x 16 / 15 GB/s.
    cost = collective_cost(collective, 1 << 30, {0, 16, 1}, s);
    CHECK(cost.seconds == near(70.0 * kMicro + (1 << 30) / (192 * kGiga * 16 / 15)));
  }
  // Small, between 8 nodes: LL, whose bandwidth is at most what the processor passes on.
  CHECK(collective_cost(Collective::all_gather, 4096, {0, 64, 1}, s).seconds ==
        near((6.6 + 56 * 1.0 + 7 * 2.7) * kMicro + 4096 / (20.4 * kGiga * 64 / 63)));
  // 127 nodes apart with one rank in each: 127 far steps. 8.4 + 127 x 14 us, 24 x 128 / 127 GB/s.
  const CollectiveCost cost = collective_cost(Collective::all_gather, 1 << 30, {0, 128, 8}, s);
  CHECK(cost.seconds == near((8.4 + 127 * 14) * kMicro + (1 << 30) / (24 * kGiga * 128 / 127)));
  // AMD's overhead of posting, 3 x 2 us, is more than a step of NVLink.
  System amd = s;
  amd.host.processor = "amd";
  CHECK(collective_cost(Collective::all_gather, 1 << 30, {0, 16, 1}, amd).latency ==
        near((8.4 + 14 * 6 + 14) * kMicro));
  // The latency of a slower network comes to each far step, and Simple flushes.
  System slow = s;
  slow.network->latency = 5 * kMicro;
  CHECK(collective_cost(Collective::all_gather, 1 << 30, {0, 16, 1}, slow).latency ==
        near((70.0 + 2 * 5) * kMicro));
}

TEST_CASE("collective cost: all-reduce by ring and tree") {
  const System s = switched();
  // One node: 8.4 + 14 x 3.4 us, 240 x 8 / 14 GB/s.
  CollectiveCost cost = collective_cost(Collective::all_reduce, 1 << 30, {0, 8, 1}, s);
  CHECK(cost.algorithm == "ring");
  CHECK(cost.seconds == near(56 * kMicro + (1 << 30) / (240 * kGiga * 8 / 14)));
  // 64 nodes, 64 KiB: tree LL: 6.8 + 2 (7 x 0.6 + 6 x 5.0) us; 20.4 x 0.85 / 2 x 0.6 GB/s.
  cost = collective_cost(Collective::all_reduce, 1 << 16, {0, 512, 1}, s);
  CHECK(cost.algorithm == "tree");
  CHECK(cost.protocol == "LL");
  CHECK(cost.seconds == near(75.2 * kMicro + (1 << 16) / (20.4 * kGiga * 0.85 / 2 * 0.6)));
  // Two nodes, large: ring Simple: (8.4 + 26 x 3.4 + 4 x 14) x 1.4 us, 192 x 16 / 30 GB/s.
  cost = collective_cost(Collective::all_reduce, 1 << 30, {0, 16, 1}, s);
  CHECK(cost.algorithm == "ring");
  CHECK(cost.seconds == near(1.4 * 152.8 * kMicro + (1 << 30) / (192 * kGiga * 16 / 30)));
  // Huge: what is left is the bandwidth of the ring, not the 0.46 of a tree.
  cost = collective_cost(Collective::all_reduce, kHuge, {0, 512, 1}, s);
  CHECK(static_cast<double>(kHuge) / cost.seconds == near(192 * kGiga * 512 / 1022).epsilon(1e-3));
  // A barrier is an all-reduce of one word, whatever its bytes.
  CHECK(collective_cost(Collective::barrier, 0, {0, 8, 1}, s).seconds ==
        collective_cost(Collective::all_reduce, 4, {0, 8, 1}, s).seconds);
}

TEST_CASE("collective cost: LL128 only where the way passes no processor") {
  const System p = sockets();
  for (std::int64_t bytes = 64; bytes < std::int64_t{1} << 32; bytes *= 2) {
    for (const RankGroup group : {RankGroup{0, 6, 1}, RankGroup{0, 12, 1}, RankGroup{0, 4, 6}}) {
      CHECK(collective_cost(Collective::all_gather, bytes, group, p).protocol != "LL128");
      CHECK(collective_cost(Collective::all_reduce, bytes, group, p).protocol != "LL128");
    }
  }
  System s = switched();
  CHECK(collective_cost(Collective::all_gather, 64 << 20, {0, 64, 1}, s).protocol == "LL128");
  s.network->pcie_switch = false;
  CHECK(collective_cost(Collective::all_gather, 64 << 20, {0, 64, 1}, s).protocol == "Simple");
  // Between sockets a step takes PCI's time: 8.4 + 5 x 5.7 us, 32 x 6 / 5 GB/s.
  CHECK(collective_cost(Collective::all_gather, 1 << 28, {0, 6, 1}, p).seconds ==
        near((8.4 + 5 * 5.7) * kMicro + (1 << 28) / (32 * kGiga * 6 / 5)));
}

TEST_CASE("collective cost: broadcast, all-to-all and messages") {
  const System s = switched();
  // 8.4 + 3.4 us, then 240 GB/s.
  CHECK(collective_cost(Collective::broadcast, 1 << 30, {0, 8, 1}, s).seconds ==
        near(11.8 * kMicro + (1 << 30) / (240 * kGiga)));
  // Seven of eight pieces leave.
  CHECK(collective_cost(Collective::all_to_all, 1 << 30, {0, 8, 1}, s).seconds ==
        near(11.8 * kMicro + 0.875 * (1 << 30) / (240 * kGiga)));
  // Two nodes: 8 of 16 pieces by one adapter, 24 GB/s, beside 7 by NVLink.
  CHECK(collective_cost(Collective::all_to_all, 1 << 30, {0, 16, 1}, s).seconds ==
        near(22.4 * kMicro + 0.5 * (1 << 30) / (24 * kGiga)));
  // Between sockets: 3 of 6 pieces, by a third of the bus, and PCI's 5.7 us.
  CHECK(collective_cost(Collective::all_to_all, 1 << 30, {0, 6, 1}, sockets()).seconds ==
        near(14.1 * kMicro + 0.5 * (1 << 30) / (32 * kGiga / 3)));
  // In a socket: one piece to each of two, at the same time by links of their own.
  CHECK(collective_cost(Collective::all_to_all, 1 << 30, {0, 3, 1}, sockets()).seconds ==
        near(11.8 * kMicro + (1 << 30) / (3 * 40 * kGiga)));
  CHECK(collective_cost(Collective::all_to_all, 1 << 30, {0, 2, 1}, sockets()).seconds ==
        near(11.8 * kMicro + (1 << 30) / (2 * 40 * kGiga)));
  CHECK(collective_cost(Collective::send, 1 << 30, {0, 2, 8}, s).seconds ==
        near(22.4 * kMicro + (1 << 30) / (24 * kGiga)));
}

TEST_CASE("collective cost: more bytes, more ranks and slower links never take less time") {
  for (const System& system : {switched(), sockets()}) {
    for (std::size_t i = 0; i < kCollectives; ++i) {
      const auto collective = static_cast<Collective>(i);
      CAPTURE(std::string(name_of(collective)));
      for (const int size : {2, 3, 6, 8, 16, 48, 96, 384}) {
        double before = 0;
        for (double bytes = 1; bytes < 1e11; bytes *= 1.3) {
          const double seconds =
              collective_cost(collective, static_cast<std::int64_t>(bytes), {0, size, 1}, system)
                  .seconds;
          CHECK(std::isfinite(seconds));
          CHECK(seconds > 0);
          CHECK(seconds >= before);
          before = seconds;
        }
        System slower = system;
        slower.network->bytes_per_second /= 2;
        slower.fast_link->bytes_per_second /= 2;
        CHECK(collective_cost(collective, 1 << 28, {0, size, 1}, slower).seconds >=
              collective_cost(collective, 1 << 28, {0, size, 1}, system).seconds);
      }
    }
    double before = 0;
    for (int nodes = 1; nodes <= 64; ++nodes) {
      const RankGroup group{0, nodes * system.devices_per_node, 1};
      const double seconds =
          collective_cost(Collective::all_gather, 1 << 28, group, system).seconds;
      CHECK(seconds > before);
      before = seconds;
    }
  }
}

TEST_CASE("collective cost: device cpu has one protocol with the latencies of the file") {
  System s;
  s.name = "host";
  s.cuda = false;
  s.devices_per_node = 4;
  s.node_link = {.kind = "memory", .bytes_per_second = 10 * kGiga, .latency = 3 * kMicro};
  CollectiveCost cost = collective_cost(Collective::all_gather, 1 << 20, {0, 4, 1}, s);
  CHECK(cost.seconds == near(9 * kMicro + (1 << 20) * 0.75 / (10 * kGiga)));
  CHECK(cost.protocol.empty());
  cost = collective_cost(Collective::all_reduce, 1 << 20, {0, 4, 1}, s);
  CHECK(cost.seconds == near(18 * kMicro + (1 << 20) * 1.5 / (10 * kGiga)));
  CHECK(collective_cost(Collective::all_to_all, 1 << 20, {0, 4, 1}, s).seconds ==
        near(9 * kMicro + (1 << 20) * 0.75 / (10 * kGiga)));
  CHECK_THROWS_WITH_AS(collective_cost(Collective::all_gather, 1, {0, 8, 1}, s),
                       doctest::Contains("a group of 8 ranks needs a network"), Error);
  s.network = {.bytes_per_second = kGiga, .adapters = 1, .latency = 20 * kMicro};
  cost = collective_cost(Collective::all_gather, 1 << 20, {0, 8, 1}, s);
  CHECK(cost.seconds == near((6 * 3 + 20) * kMicro + (1 << 20) * 0.875 / kGiga));
}

TEST_CASE("collective cost: the cost model calls it by the name of the work") {
  const CostModel cost(switched());
  Work work;
  work.kind = Work::Kind::collective;
  work.name = "all_gather";
  work.bytes = 1 << 24;
  work.group = {0, 16, 1};
  CHECK(cost.seconds(work) ==
        collective_cost(Collective::all_gather, 1 << 24, {0, 16, 1}, switched()).seconds);
  work.name = "gather";
  CHECK_THROWS_WITH_AS(cost.seconds(work), doctest::Contains("'gather'"), Error);
}
