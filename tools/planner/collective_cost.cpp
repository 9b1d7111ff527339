// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/planner/collective_cost.h>

#include <sherd/runtime/error.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

namespace sherd {
namespace {

enum Protocol : std::uint8_t { kLL, kLL128, kSimple };
constexpr std::array<std::string_view, 3> kProtocols{"LL", "LL128", "Simple"};
enum Wire : std::uint8_t { kNvlink, kPci, kNet };

constexpr double kMicro = 1e-6, kGiga = 1e9;
constexpr double kChannels = 16;  // where NCCL asks whether there is work for each

// Of NCCL's tuning source, in microseconds, by protocol (and wire).
using PerProtocol = std::array<double, 3>;
constexpr PerProtocol kRingBase{6.6, 14.0, 8.4}, kTreeBase{6.8, 14.0, 8.4};
constexpr std::array<PerProtocol, 3> kRingLatency{
    {{0.6, 1.9, 3.4}, {1.0, 2.5, 5.7}, {2.7, 4.0, 14.0}}};
constexpr std::array<PerProtocol, 3> kTreeLatency{
    {{0.6, 1.25, 4.0}, {1.0, 1.9, 4.0}, {5.0, 8.5, 14.0}}};

// What a tree reaches of its bandwidth, from 64 bytes on, for each doubling; all of it beyond.
constexpr std::array<std::array<double, 23>, 3> kTreeFactor{{
    {1.0, 1.0, 1.0, 1.0, .9, .8, .7, .7,  .7,  .7,  .6, .5,
     .4,  .4,  .5,  .6,  .7, .8, .9, 1.0, 1.0, 1.0, 1.0},
    {1.0, 1.0, 1.0, 1.0, 1.0, .9, .8, .8, .8, .7,  .6, .6,
     .6,  .6,  .6,  .6,  .8,  .9, .9, .9, .9, 1.0, 1.0},
    {.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9},
}};

struct Job {
  Collective collective;
  double bytes;
  GroupPlace place;
  const System& system;
  double bus;  // bytes per second
  // Within a node by NVLink alone.
  bool near_nvlink() const { return place.domains == place.nodes; }
  bool amd() const { return system.host.processor == "amd"; }
};

// LL keeps a flag beside every word, which the processors must pass on; bytes per second.
double most_with_ll(const Job& job) {
  const int capability = job.system.compute_capability;
  if (job.place.nodes == 1) {
    return (capability >= 100  ? 282.0
            : capability >= 90 ? 141.0
            : capability >= 80 ? 87.7
                               : 39.0) *
           kGiga;
  }
  if (job.place.nodes == 2) return (job.amd() ? 22.5 : 39.0) * kGiga;
  return (job.amd() ? 19.0 : 20.4) * kGiga;
}

// 128 bytes must stay together on the whole way, which a processor does not promise.
bool may_use_ll128(const Job& job) {
  return job.near_nvlink() && (job.place.nodes == 1 || job.system.network->pcie_switch);
}

struct Steps {
  double all, between_nodes;
};
Steps steps_of(const Job& job) {
  const double n = job.place.ranks, nodes = job.place.nodes;
  switch (job.collective) {
    case Collective::all_reduce:
      return {2 * (n - 1), nodes > 1 ? std::min(2 * nodes, 2 * (n - 1)) : 0};
    case Collective::all_gather:
    case Collective::reduce_scatter: return {n - 1, nodes - 1};
    default: return {n, nodes};
  }
}

double far_latency(const Job& job, const std::array<PerProtocol, 3>& table, Protocol protocol) {
  const double network = job.system.network ? job.system.network->latency : 0;
  // Simple also flushes what has arrived.
  return table[kNet][protocol] * kMicro + (protocol == kSimple ? 2 : 1) * network;
}

CollectiveCost ring(const Job& job, Protocol protocol) {
  const auto [steps, inter] = steps_of(job);
  const bool one_node = job.place.nodes == 1;
  double bus = job.bus;
  if (protocol == kLL) {
    const bool quarter = !one_node || job.collective == Collective::all_reduce;
    bus = std::min(most_with_ll(job), bus / (quarter ? 4.0 : 3.0));
  } else if (protocol == kLL128) {
    bus *= job.place.ranks < 2 * job.place.nodes ? 0.7 : 0.92;
  }
  const Wire wire = job.near_nvlink() ? kNvlink : kPci;
  double latency = kRingBase[protocol] * kMicro;
  if (job.collective == Collective::broadcast) {  // a chain, whose steps overlap
    latency +=
        one_node ? kRingLatency[wire][protocol] * kMicro : far_latency(job, kRingLatency, protocol);
  } else {
    const double overhead =
        one_node ? 0 : (job.amd() ? 2.0 : 1.0) * (protocol == kSimple ? 3 : 1) * kMicro;
    const double near = std::max(kRingLatency[wire][protocol] * kMicro, overhead);
    latency += (steps - inter) * near + inter * far_latency(job, kRingLatency, protocol);
  }
  // The plateau of long rings.
  if (job.collective == Collective::all_reduce && protocol == kSimple && !one_node &&
      job.bytes / job.place.ranks >= 64.0 * kChannels) {
    latency *= job.system.compute_capability < 80 ? 1.9 : 1.4;
  }
  const double bandwidth = bus * job.place.ranks / steps;
  return {latency + job.bytes / bandwidth, latency, "ring", kProtocols[protocol]};
}

// Between the doublings NCCL steps; here a line joins them, so that more bytes never take less
// time.
double tree_factor(Protocol protocol, double bytes) {
  const auto& factors = kTreeFactor[protocol];
  const double doublings =
      std::clamp(std::log2(std::max(bytes, 64.0) / 64), 0.0, static_cast<double>(factors.size()));
  const auto below = static_cast<std::size_t>(doublings);
  const auto at = [&](std::size_t i) { return i < factors.size() ? factors[i] : 1.0; };
  const double part = doublings - static_cast<double>(below);
  return at(below) + part * (at(below + 1) - at(below));
}

CollectiveCost tree(const Job& job, Protocol protocol) {
  const bool one_node = job.place.nodes == 1;
  double bus = 0.92 * job.bus;
  if (protocol == kLL) bus = std::min(bus / 3.8, most_with_ll(job));
  if (protocol == kLL128) bus *= one_node ? 7.0 / 9.0 : 120.0 / 128.0;
  bus *= 0.85;
  const Wire wire = job.near_nvlink() ? kNvlink : kPci;
  const double near = kTreeLatency[wire][protocol];
  const double in_node = job.place.ranks / job.place.nodes - 1;
  const double levels = std::bit_width(static_cast<unsigned>(job.place.nodes)) - 1;
  const double latency =
      kTreeBase[protocol] * kMicro +
      2 * (in_node * near * kMicro + levels * far_latency(job, kTreeLatency, protocol));
  const double factor = tree_factor(protocol, job.bytes);
  return {latency + job.bytes / (bus / 2 * factor), latency, "tree", kProtocols[protocol]};
}

// How many ranks, or devices where there are fewer, share what leaves a place of `devices`.
double sharing(int world, int devices) {
  return world > 0 ? std::min(world, devices) : devices;
}

// What one rank has of the adapters of its node, of which `ranks` send.
double share_of_adapters(const System& system, double ranks) {
  const double adapters = static_cast<double>(system.network->adapters) * system.near_devices() /
                          system.devices_per_node;
  return std::min(1.0, adapters / ranks);
}

// Messages from each rank to all others, in its domain, in its node and beyond at the same time.
CollectiveCost messages(const Job& job, int world) {
  const GroupPlace& place = job.place;
  const System& system = job.system;
  const double ranks = place.ranks, in_domain = ranks / place.domains,
               in_node = ranks / place.nodes;
  const double piece = job.bytes / ranks;
  double seconds = 0;
  if (in_domain > 1) {
    const FastLink& link = *system.fast_link;
    const double peers = link.switched ? 1.0 : (in_domain - 1) / (link.devices - 1);
    seconds = (in_domain - 1) * piece / (link.bytes_per_second * peers);
  }
  if (in_node > in_domain) {
    const double share =
        system.node_link->bytes_per_second / sharing(world, system.domain_devices());
    seconds = std::max(seconds, (in_node - in_domain) * piece / share);
  }
  if (ranks > in_node) {
    const double share = system.network->bytes_per_second *
                         share_of_adapters(system, sharing(world, system.near_devices()));
    seconds = std::max(seconds, (ranks - in_node) * piece / share);
  }
  double latency = 0;
  if (system.cuda) {
    const Wire wire = job.near_nvlink() ? kNvlink : kPci;
    latency =
        kRingBase[kSimple] * kMicro + (place.nodes > 1 ? far_latency(job, kRingLatency, kSimple)
                                                       : kRingLatency[wire][kSimple] * kMicro);
  } else {
    latency = (ranks - 1) * (place.nodes > 1 ? system.network->latency : system.node_link->latency);
  }
  return {latency + seconds, latency, "messages", system.cuda ? kProtocols[kSimple] : ""};
}

CollectiveCost processor_ring(const Job& job) {
  const auto [steps, inter] = steps_of(job);
  const double near = job.system.node_link ? job.system.node_link->latency : 0;
  const double far = job.system.network ? job.system.network->latency : 0;
  const double latency = (steps - inter) * near + inter * far;
  return {latency + job.bytes * steps / (job.bus * job.place.ranks), latency, "ring", ""};
}

void check_links(const RankGroup& group, const GroupPlace& place, const System& system) {
  SHERD_CHECK(place.nodes == 1 || system.network,
              "system {}: a group of {} ranks needs a network between its {} nodes of {} devices, "
              "and {} has none; plan for fewer ranks, or add the key 'network'",
              system.name, group.size, place.nodes, system.near_devices(), system.path);
}

}  // namespace

GroupPlace place_of(const RankGroup& group, const System& system, int world) {
  SHERD_CHECK(group.first >= 0 && group.size >= 1 && group.stride >= 1,
              "a group of ranks: first {}, size {}, stride {}: expected at least 0, 1, 1",
              group.first, group.size, group.stride);
  // Ranks come in ascending order, so those of one place follow each other. `take` gets how many
  // of the group are in a place, and how many of the world.
  const auto for_each_place = [&](int devices, const auto& take) {
    for (int i = 0; i < group.size;) {
      const std::int64_t place = (group.first + std::int64_t{i} * group.stride) / devices;
      const std::int64_t beyond = (place + 1) * devices - group.first;
      const auto next = static_cast<int>(
          std::min<std::int64_t>(group.size, (beyond + group.stride - 1) / group.stride));
      const std::int64_t others =
          world > 0 ? std::min<std::int64_t>(devices, world - place * devices) : devices;
      take(next - i, static_cast<double>(std::max<std::int64_t>(next - i, others)));
      i = next;
    }
  };
  GroupPlace place;
  place.ranks = group.size;
  place.nodes = place.domains = 0;
  const int near = system.near_devices();
  double adapters = std::numeric_limits<double>::infinity();
  for_each_place(near, [&](int ranks, double all) {
    ++place.nodes;
    if (system.network) adapters = std::min(adapters, ranks * share_of_adapters(system, all));
  });
  if (system.network) place.adapters = adapters;
  for_each_place(system.domain_devices(), [&](int ranks, double all) {
    ++place.domains;
    place.most_in_domain = std::max(place.most_in_domain, ranks);
    place.link_share = std::min(place.link_share, ranks / all);
  });
  return place;
}

double bus_bandwidth(const GroupPlace& place, const System& system) {
  double bus = std::numeric_limits<double>::infinity();
  if (place.most_in_domain > 1) {
    const FastLink& link = *system.fast_link;
    const double peers = link.switched ? 1.0 : (place.most_in_domain - 1.0) / (link.devices - 1.0);
    bus = std::min(bus, link.bytes_per_second * peers);
  }
  if (place.domains > place.nodes) {
    bus = std::min(bus, system.node_link->bytes_per_second * place.link_share);
  }
  if (place.nodes > 1) bus = std::min(bus, system.network->bytes_per_second * place.adapters);
  return bus;
}

CollectiveCost collective_cost(Collective collective, std::int64_t bytes, const RankGroup& group,
                               const System& system, int world) {
  SHERD_CHECK(bytes >= 0, "{}: {} bytes: expected at least 0", name_of(collective), bytes);
  const GroupPlace place = place_of(group, system, world);
  if (place.ranks == 1) return {};
  check_links(group, place, system);
  Job job{collective, static_cast<double>(bytes), place, system, bus_bandwidth(place, system)};
  if (collective == Collective::barrier) {  // an all-reduce of one word
    job.collective = Collective::all_reduce;
    job.bytes = 4;
  }
  const bool message = collective == Collective::send || collective == Collective::recv;
  if (message) job.bytes *= place.ranks;  // of which one piece goes to the one other rank
  if (message || collective == Collective::all_to_all) return messages(job, world);
  if (!system.cuda) return processor_ring(job);
  CollectiveCost best;
  best.seconds = std::numeric_limits<double>::infinity();
  const auto consider = [&](const CollectiveCost& cost) {
    if (cost.seconds < best.seconds) best = cost;
  };
  for (const Protocol protocol : {kLL, kLL128, kSimple}) {
    if (protocol == kLL128 && !may_use_ll128(job)) continue;
    consider(ring(job, protocol));
    if (job.collective == Collective::all_reduce) consider(tree(job, protocol));
  }
  return best;
}

}  // namespace sherd
