// SPDX-License-Identifier: Apache-2.0
// System: the machine that a plan is for, as a JSON file of the folder tools/systems describes it.
//
//   const System system = read_system("dgx-a100");     // or a path: "./mine.json"
//
// Files hold one number once, in the unit that its key names (TFLOP_per_s, GB_per_s, MiB, us); here
// all is in bytes, seconds and FLOP per second. A file with an unknown, missing or impossible value
// is an Error that names the file, the key and what is expected.
#pragma once

#include <sherd/runtime/api.h>
#include <sherd/runtime/dtype.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace sherd {

// Matrix products of one type; see Note [The time of a product] in kernel_cost.h.
struct ProductTile {
  std::int64_t rows = 0, columns = 0;
  double fraction = 1.0;  // of the best tile's rate, when every multiprocessor has work
};
struct ProductRates {
  double peak = 0.0;      // FLOP/s on the data sheet; of device cpu of a node
  double measured = 0.0;  // FLOP/s of a product [m, k] x [k, n] of this shape:
  std::int64_t measured_m = 0, measured_n = 0, measured_k = 0;
  std::vector<ProductTile> tiles;  // of the result, one a multiprocessor at a time
  double prologue_k = 0.0;         // what starting and ending a tile costs, as elements of k
  double tile_rate =
      0.0;  // FLOP/s of one multiprocessor in a tile; 0: as the measured product says
};
// Devices with a fast link of their own, in one node or across nodes: an NVLink domain.
struct FastLink {
  int devices = 1;              // in the domain
  double bytes_per_second = 0;  // that one device sends when it sends to all others
  bool switched = true;         // so it sends to fewer as well; else by links between pairs
};
// Between the domains of a node, and between the devices where there is no fast link.
struct NodeLink {
  std::string kind;             // "x-bus", "pcie" or "memory"
  double bytes_per_second = 0;  // that one domain sends
  double latency = 0;           // of a step, on device cpu; cuda has NCCL's
};
struct NetworkLink {
  double bytes_per_second = 0;  // that one adapter sends
  int adapters = 1;             // of a node
  double latency = 0;           // of a message; on cuda beside NCCL's own
  bool pcie_switch = false;     // between the adapter and its device: traffic passes no processor
};
struct HostParts {
  std::string processor;               // "intel", "amd", "power" or "arm"
  double memory_bytes_per_second = 0;  // of a node
  double link_bytes_per_second = 0;    // of one device, in one direction
  double disk_bytes_per_second = 0;    // of a node
};

struct System {
  std::string name, path;
  std::vector<std::string> about;      // where each number comes from
  bool cuda = true;                    // else device cpu
  int compute_capability = 0;          // 80; of device cuda
  int multiprocessors = 1;             // of one device; cores of device cpu are one
  int collective_multiprocessors = 0;  // of them busy while a collective runs; of device cuda
  std::int64_t memory_bytes = 0;       // of one device; of device cpu of a node
  int devices_per_node = 1;
  std::map<DType, ProductRates> products;
  double memory_bytes_per_second = 0;  // of one device, on the data sheet
  double memory_reached = 1;           // the fraction of it that a kernel gets
  double launch_seconds = 0;           // of the host, for each kernel
  double smallest_kernel_seconds = 0;  // on the device
  // Attention: the fraction of its type's measured product rate.
  double attention_forward = 1, attention_backward = 1;
  std::optional<FastLink> fast_link;
  std::optional<NodeLink> node_link;
  std::optional<NetworkLink> network;
  HostParts host;
  // Tables of a calibrated machine, as they stand in the file; not null.
  std::shared_ptr<const nlohmann::ordered_json> measured;

  // Throws, naming the types this system has, where it has no products of this one.
  SHERD_API const ProductRates& products_of(DType dtype) const;
  // Devices of one domain; 1 where there is no fast link.
  int domain_devices() const { return fast_link ? fast_link->devices : 1; }
  // Ranks that share the memory and the rates of one device: cores of device cpu do.
  int ranks_of_device(int ranks) const { return cuda ? 1 : std::clamp(ranks, 1, devices_per_node); }
  // Devices that reach each other without the network.
  int near_devices() const { return std::max(devices_per_node, domain_devices()); }
};

// A name is that of a file NAME.json in the folder that SHERD_SYSTEMS names, else in tools/systems
// of the source tree, else where the program is installed. What has a '/' or ends with ".json" is a
// path.
SHERD_API System read_system(const std::string& name_or_path);
// `text` as if it were the file `path`.
SHERD_API System parse_system(const std::string& text, const std::string& path);
// In alphabetical order.
SHERD_API std::vector<std::string> known_systems();

namespace detail {
extern const char* const kSystemsInSource;
extern const char* const kSystemsInstalled;
}  // namespace detail

}  // namespace sherd
