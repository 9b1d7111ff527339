// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/planner/kernel_cost.h>

#include <sherd/runtime/error.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace sherd {
namespace {

constexpr std::int64_t kMostSplits = 64;

double ceil_div(std::int64_t a, std::int64_t b) {
  return static_cast<double>((a + b - 1) / b);
}

double reached_bandwidth(const System& system) {
  return system.memory_bytes_per_second * system.memory_reached;
}

// Seconds of the multiplications alone, with a multiprocessor that does one FLOP a second in the
// best tile.
double tiled_flops(const System& system, const ProductRates& products, const ProductTile& tile,
                   std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t splits) {
  const double tiles = ceil_div(m, tile.rows) * ceil_div(n, tile.columns);
  const double waves = std::ceil(tiles * static_cast<double>(splits) / system.multiprocessors);
  const double depth = ceil_div(k, splits) + products.prologue_k;
  return waves * 2.0 * static_cast<double>(tile.rows * tile.columns) * depth / tile.fraction;
}

// The least that time(tiled FLOPs, bytes of the parts' sums) is over the tiles and splits.
template <typename Time>
double fastest(const System& system, const ProductRates& products, std::int64_t m, std::int64_t n,
               std::int64_t k, const Time& time) {
  double least = std::numeric_limits<double>::infinity();
  for (const ProductTile& tile : products.tiles) {
    for (std::int64_t splits = 1; splits <= kMostSplits && (splits == 1 || splits * 2 <= k);
         splits *= 2) {
      const double flops = tiled_flops(system, products, tile, m, n, k, splits);
      const double sums = splits == 1 ? 0 : 2.0 * 4.0 * static_cast<double>(splits * m * n);
      least = std::min(least, time(flops, sums));
    }
  }
  return least;
}

// How many ranks share what a node has once.
int ranks_in_node(const System& system, int world) {
  return world > 0 ? std::min(world, system.devices_per_node) : system.devices_per_node;
}

}  // namespace

double tile_rate(const System& system, const ProductRates& products) {
  if (products.tile_rate > 0.0) return products.tile_rate;
  const std::int64_t m = products.measured_m, n = products.measured_n, k = products.measured_k;
  const double seconds = 2.0 * static_cast<double>(m) * static_cast<double>(n) *
                         static_cast<double>(k) / products.measured;
  const double rate =
      fastest(system, products, m, n, k, [](double flops, double) { return flops; }) / seconds;
  return std::min(rate, products.peak / system.multiprocessors);
}

double product_seconds(const System& system, DType dtype, std::int64_t m, std::int64_t n,
                       std::int64_t k, std::int64_t bytes) {
  SHERD_CHECK(m >= 0 && n >= 0 && k >= 0 && bytes >= 0,
              "a product [{}, {}] x [{}, {}] of {} bytes: expected no negative number", m, k, k, n,
              bytes);
  if (m == 0 || n == 0) return 0;
  const ProductRates& products = system.products_of(dtype);
  const double rate = tile_rate(system, products), bandwidth = reached_bandwidth(system);
  const double best = fastest(system, products, m, n, k, [&](double flops, double sums) {
    return std::max(flops / rate, (static_cast<double>(bytes) + sums) / bandwidth);
  });
  return system.smallest_kernel_seconds + best;
}

double kernel_seconds(const System& system, const Work& work, int world) {
  const auto bytes = static_cast<double>(work.bytes);
  SHERD_CHECK(work.bytes >= 0 && work.flops >= 0, "{}: {} bytes and {} FLOPs: expected at least 0",
              work.name, work.bytes, work.flops);
  switch (work.kind) {
    case Work::Kind::product:
      return product_seconds(system, work.dtype, work.m, work.n, work.k, work.bytes);
    case Work::Kind::kernel: {
      double seconds = bytes / reached_bandwidth(system);
      if (work.flops > 0) {
        const bool backward = work.name.find("backward") != std::string_view::npos;
        const double rate = system.products_of(work.dtype).measured *
                            (backward ? system.attention_backward : system.attention_forward);
        seconds = std::max(seconds, static_cast<double>(work.flops) / rate);
      }
      return system.smallest_kernel_seconds + seconds;
    }
    case Work::Kind::copy: {
      // Device cpu copies within its memory.
      const double rate =
          system.cuda ? system.host.link_bytes_per_second : reached_bandwidth(system) / 2;
      return system.smallest_kernel_seconds + bytes / rate;
    }
    case Work::Kind::host:
      return bytes * ranks_in_node(system, world) / system.host.memory_bytes_per_second;
    case Work::Kind::file:
      return bytes * ranks_in_node(system, world) / system.host.disk_bytes_per_second;
    case Work::Kind::collective: break;
  }
  fail("{}: kernel_seconds() takes no collectives; collective_cost() does", work.name);
}

}  // namespace sherd
