// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/runtime/error.h>
#include <sherd/tools/planner/cost_model.h>
#include <sherd/tools/planner/kernel_cost.h>

#include <cmath>

using namespace sherd;

namespace {

// Relative alone: doctest's own tolerance is 12 microseconds.
doctest::Approx near(double value) {
  return doctest::Approx(value).scale(0);
}

// Ten multiprocessors of 1 TFLOP/s inside a tile of 16 x 16, memory of 100 GB/s of which half is
// reached, kernels of at least 2 us. The product that was measured is 160 x 160 x 96: 100 tiles in
// 10 waves of 2 x 16 x 16 x (96 + 4) FLOPs each, so it reaches 96 % of 10 TFLOP/s.
System small() {
  System s;
  s.name = "small";
  s.multiprocessors = 10;
  s.devices_per_node = 4;
  ProductRates& products = s.products[DType::f32];
  products.peak = 10e12;
  products.measured = 9.6e12;
  products.measured_m = products.measured_n = 160;
  products.measured_k = 96;
  products.tiles = {{16, 16, 1.0}};
  products.prologue_k = 4;
  s.memory_bytes_per_second = 100e9;
  s.memory_reached = 0.5;
  s.launch_seconds = 5e-6;
  s.smallest_kernel_seconds = 2e-6;
  s.attention_forward = 0.5;
  s.attention_backward = 0.25;
  s.host.memory_bytes_per_second = 40e9;
  s.host.link_bytes_per_second = 20e9;
  s.host.disk_bytes_per_second = 2e9;
  return s;
}

double product(const System& s, std::int64_t m, std::int64_t n, std::int64_t k,
               std::int64_t bytes = 0) {
  return product_seconds(s, DType::f32, m, n, k, bytes) - s.smallest_kernel_seconds;
}

Work work_of(Work::Kind kind, std::int64_t bytes, std::int64_t flops = 0,
             std::string_view name = "anything") {
  Work work;
  work.kind = kind;
  work.name = name;
  work.bytes = bytes;
  work.flops = flops;
  return work;
}

}  // namespace

TEST_CASE("kernel cost: the product that was measured takes the time that was measured") {
  const System s = small();
  CHECK(product(s, 160, 160, 96) == near(2.0 * 160 * 160 * 96 / 9.6e12));
}

TEST_CASE("kernel cost: products come in waves of tiles") {
  const System s = small();
  const double tile = 2.0 * 16 * 16 / 1e12;  // seconds for each element of k
  CHECK(product(s, 16, 160, 96) == near(tile * 100));
  CHECK(product(s, 32, 160, 96) == near(tile * 200));
  CHECK(product(s, 17, 160, 96) == near(tile * 200));  // a row more, a wave more
  CHECK(product(s, 15, 151, 96) == near(tile * 100));  // tiles that are not full
  CHECK(product(s, 160, 160, 996) == near(10 * tile * 1000));
}

TEST_CASE("kernel cost: few tiles with a long k are split, which costs the sums") {
  System s = small();
  s.memory_bytes_per_second = 1e15;
  const double tile = 2.0 * 16 * 16 / 1e12;
  // One tile, ten multiprocessors: 64 parts of 128 in 7 waves are less than 8 of 1024 in one.
  CHECK(product(s, 16, 16, 8192) == near(tile * 7 * (128 + 4)));
  CHECK(product(s, 16, 16, 16) == near(tile * (2 + 4)));  // 8 parts of 2 in one wave
  // Sums of 8 parts, 2 x 4 bytes x 256 elements each, are what takes longest.
  s.memory_bytes_per_second = 40e9;
  CHECK(product(s, 16, 16, 8192) == near(8 * 8 * 256 / 20e9));
  // With the memory so slow that parts cost more than they gain: no parts.
  s.memory_bytes_per_second = 2e6;
  CHECK(product(s, 16, 16, 8192) == near(tile * (8192 + 4)));
}

TEST_CASE("kernel cost: the fastest tile counts, and the peak is a bound") {
  System s = small();
  s.products[DType::f32].tiles = {{16, 16, 1.0}, {8, 8, 0.5}};
  const double tile = 2.0 * 8 * 8 / 0.5e12;
  CHECK(product(s, 8, 80, 96) == near(tile * 100));  // less than a tile of 16 x 16
  CHECK(product(s, 160, 160, 96) == near(2.0 * 160 * 160 * 96 / 9.6e12));
  // Waves that are not full cannot make the rate more than the peak.
  s = small();
  s.products[DType::f32].measured_m = 17;
  CHECK(product(s, 160, 160, 96) == near(2.0 * 160 * 160 * 100 / 10e12));
}

TEST_CASE("kernel cost: a product of much data and few FLOPs takes the time of the data") {
  const System s = small();
  CHECK(product(s, 16, 160, 1, 1 << 20) == near((1 << 20) / 50e9));
  CHECK(product_seconds(s, DType::f32, 0, 10, 10, 0) == 0);
  // k = 0 only writes zeros.
  CHECK(product_seconds(s, DType::f32, 16, 16, 0, 1024) > 2e-6);
}

TEST_CASE("kernel cost: kernels, attention, copies, files and the processor") {
  const System s = small();
  CHECK(kernel_seconds(s, work_of(Work::Kind::kernel, 0)) == near(2e-6));
  CHECK(kernel_seconds(s, work_of(Work::Kind::kernel, 50'000'000)) == near(1.002e-3));
  Work attention = work_of(Work::Kind::kernel, 50'000, 4'800'000'000, "attention_forward");
  CHECK(kernel_seconds(s, attention) == near(2e-6 + 4.8e9 / (0.5 * 9.6e12)));
  attention.name = "attention_backward";
  CHECK(kernel_seconds(s, attention) == near(2e-6 + 4.8e9 / (0.25 * 9.6e12)));
  attention.bytes = 500'000'000;
  CHECK(kernel_seconds(s, attention) == near(2e-6 + 1e-2));
  CHECK(kernel_seconds(s, work_of(Work::Kind::copy, 20'000'000)) == near(1.002e-3));
  // Four devices of a node share its memory and its disk; a world of two shares them by two.
  CHECK(kernel_seconds(s, work_of(Work::Kind::host, 10'000'000)) == near(1e-3));
  CHECK(kernel_seconds(s, work_of(Work::Kind::host, 10'000'000), 2) == near(0.5e-3));
  CHECK(kernel_seconds(s, work_of(Work::Kind::file, 1'000'000)) == near(2e-3));
  CHECK(kernel_seconds(s, work_of(Work::Kind::file, 1'000'000), 1) == near(0.5e-3));
  CHECK(kernel_seconds(s, work_of(Work::Kind::file, 1'000'000), 99) == near(2e-3));
  CHECK_THROWS_WITH_AS(kernel_seconds(s, work_of(Work::Kind::collective, 1)),
                       doctest::Contains("anything"), Error);
  CHECK_THROWS_WITH_AS(kernel_seconds(s, work_of(Work::Kind::kernel, -1)),
                       doctest::Contains("-1 bytes"), Error);
  CHECK_THROWS_WITH_AS(product_seconds(s, DType::bf16, 1, 1, 1, 1),
                       doctest::Contains("system small has no products of bf16"), Error);
}

TEST_CASE("kernel cost: larger products never take less time, on all systems") {
  for (const std::string& name : known_systems()) {
    const System s = read_system(name);
    for (const auto& [dtype, products] : s.products) {
      const std::int64_t m = products.measured_m, n = products.measured_n, k = products.measured_k;
      const double flops = 2.0 * static_cast<double>(m * n) * static_cast<double>(k);
      CHECK(product_seconds(s, dtype, m, n, k, 2 * (m * k + k * n + m * n)) ==
            near(flops / products.measured).epsilon(0.01));
      double before = 0;
      for (std::int64_t side = 1; side < 40000; side += side / 3 + 1) {
        const double seconds = product_seconds(s, dtype, side, 4096, 1024, side * 4096 * 2);
        CHECK(seconds >= before);
        CHECK(seconds * products.peak >= 2.0 * 4096 * 1024 * static_cast<double>(side));
        before = seconds;
      }
    }
  }
}

TEST_CASE("kernel cost: the cost model dispatches and shares what a node has once") {
  const System s = small();
  const CostModel one(s, 1), all(s);
  const Work file = work_of(Work::Kind::file, 1'000'000);
  CHECK(one.seconds(file) == kernel_seconds(s, file, 1));
  CHECK(all.seconds(file) == kernel_seconds(s, file, 0));
  CHECK(all.launch_seconds() == 5e-6);
  Work product_work = work_of(Work::Kind::product, 0);
  product_work.m = product_work.n = 160;
  product_work.k = 96;
  CHECK(all.seconds(product_work) == product_seconds(s, DType::f32, 160, 160, 96, 0));
}

TEST_CASE("kernel cost: a collective beside takes multiprocessors, not memory") {
  System s = small();
  s.collective_multiprocessors = 5;
  const CostModel cost(s);
  Work work = work_of(Work::Kind::product, 0);
  work.m = work.n = 160;
  work.k = 96;  // 100 tiles: 10 waves, then 20
  CHECK(cost.seconds_beside_collective(work) - 2e-6 == near(2 * (cost.seconds(work) - 2e-6)));
  work.bytes = 100'000'000;  // takes longer than either
  CHECK(cost.seconds_beside_collective(work) == cost.seconds(work));
  const Work attention = work_of(Work::Kind::kernel, 0, 4'800'000'000, "attention_forward");
  CHECK(cost.seconds_beside_collective(attention) == near(2e-6 + 2e-3));
  for (const auto kind : {Work::Kind::kernel, Work::Kind::copy, Work::Kind::host}) {
    CHECK(cost.seconds_beside_collective(work_of(kind, 1 << 20)) ==
          cost.seconds(work_of(kind, 1 << 20)));
  }
}
