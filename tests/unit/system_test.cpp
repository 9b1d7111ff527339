// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/runtime/error.h>
#include <sherd/tools/planner/system.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "io_support.h"

using namespace sherd;
using json = nlohmann::ordered_json;

namespace {

// Relative alone: doctest's own tolerance is 12 microseconds.
doctest::Approx near(double value) {
  return doctest::Approx(value).scale(0);
}

constexpr const char* kText = R"({
  "name": "small", "about": ["made up"], "device": "cuda",
  "compute_capability": 80, "multiprocessors": 4, "collective_multiprocessors": 1, "memory_MiB": 1024, "devices_per_node": 4,
  "products": {"f32": {"peak_TFLOP_per_s": 2, "measured_TFLOP_per_s": 1.5,
                       "measured_at": [64, 64, 64], "tiles": [[16, 8, 1.0]], "prologue_k": 4}},
  "memory": {"GB_per_s": 100, "reached": 0.8},
  "launch": {"host_us": 5, "smallest_kernel_us": 2},
  "attention": {"forward": 0.5, "backward": 0.25},
  "nvlink": {"devices": 2, "GB_per_s": 50, "switched": true},
  "node_link": {"kind": "x-bus", "GB_per_s": 32},
  "network": {"GB_per_s": 12, "adapters": 2, "latency_us": 1, "pcie_switch": false},
  "host": {"processor": "power", "memory_GB_per_s": 200, "link_GB_per_s": 40, "disk_GB_per_s": 2},
  "measured": {"anything": [1, 2]}
})";

// The file with one value replaced ("/memory/reached"), or removed where the value is null.
std::string with(const std::string& pointer, const json& value) {
  json document = json::parse(kText);
  const json::json_pointer at(pointer);
  if (value.is_null()) {
    document.at(at.parent_pointer()).erase(at.back());
  } else {
    document[at] = value;
  }
  return document.dump();
}

struct Environment {
  explicit Environment(const std::string& folder) { setenv("SHERD_SYSTEMS", folder.c_str(), 1); }
  ~Environment() { unsetenv("SHERD_SYSTEMS"); }
};

}  // namespace

TEST_CASE("system: numbers come in bytes, seconds and FLOP per second") {
  const System s = parse_system(kText, "small.json");
  CHECK(s.name == "small");
  CHECK(s.about == std::vector<std::string>{"made up"});
  CHECK(s.cuda);
  CHECK(s.compute_capability == 80);
  CHECK(s.multiprocessors == 4);
  CHECK(s.collective_multiprocessors == 1);
  CHECK(s.memory_bytes == std::int64_t{1} << 30);
  CHECK(s.devices_per_node == 4);
  const ProductRates& products = s.products_of(DType::f32);
  CHECK(products.peak == 2e12);
  CHECK(products.measured == 1.5e12);
  CHECK(products.measured_k == 64);
  REQUIRE(products.tiles.size() == 1);
  CHECK(products.tiles[0].rows == 16);
  CHECK(products.tiles[0].columns == 8);
  CHECK(products.prologue_k == 4);
  CHECK(s.memory_bytes_per_second == 100e9);
  CHECK(s.memory_reached == 0.8);
  CHECK(s.launch_seconds == near(5e-6));
  CHECK(s.smallest_kernel_seconds == near(2e-6));
  CHECK(s.attention_backward == 0.25);
  CHECK(s.fast_link->bytes_per_second == 50e9);
  CHECK(s.node_link->kind == "x-bus");
  CHECK(s.network->adapters == 2);
  CHECK(s.network->latency == near(1e-6));
  CHECK(s.host.disk_bytes_per_second == 2e9);
  CHECK(s.measured->at("anything").size() == 2);
  CHECK(s.domain_devices() == 2);
  CHECK(s.near_devices() == 4);
}

TEST_CASE("system: device cpu has links with latencies, and no NVLink") {
  constexpr const char* kCpu = R"({
    "name": "host", "about": ["made up"], "device": "cpu", "memory_MiB": 1024,
    "devices_per_node": 4,
    "products": {"f32": {"peak_TFLOP_per_s": 2, "measured_TFLOP_per_s": 1.5,
                         "measured_at": [64, 64, 64], "tiles": [[1, 1, 1]], "prologue_k": 0}},
    "memory": {"GB_per_s": 100, "reached": 0.8},
    "launch": {"host_us": 0, "smallest_kernel_us": 1},
    "attention": {"forward": 0.5, "backward": 0.25},
    "node_link": {"kind": "memory", "GB_per_s": 10, "latency_us": 3},
    "network": {"GB_per_s": 1, "adapters": 1, "latency_us": 20},
    "host": {"processor": "amd", "memory_GB_per_s": 100, "disk_GB_per_s": 2}
  })";
  const System s = parse_system(kCpu, "host.json");
  CHECK_FALSE(s.cuda);
  CHECK(s.multiprocessors == 1);
  CHECK(s.domain_devices() == 1);
  CHECK(s.node_link->latency == near(3e-6));
  CHECK(s.network->latency == near(20e-6));
  CHECK(s.measured->empty());
  json document = json::parse(kCpu);
  document["node_link"].erase("latency_us");
  CHECK_THROWS_WITH_AS(parse_system(document.dump(), "host.json"),
                       doctest::Contains("the key 'node_link.latency_us' is missing"), Error);
  document = json::parse(kCpu);
  document["multiprocessors"] = 4;
  CHECK_THROWS_WITH_AS(parse_system(document.dump(), "host.json"),
                       doctest::Contains("'multiprocessors' is not known"), Error);
}

TEST_CASE("system: a bad file is an error that names the file, the key and what is expected") {
  struct Bad {
    const char* key;
    json value;
    std::vector<const char*> said;
  };
  const std::vector<Bad> all{
      {"/memory", 5, {"bad.json: expected an object as memory, got 5"}},
      {"/memory/reached", nullptr, {"the key 'memory.reached' is missing"}},
      {"/memory/reachd", 0.5, {"'memory.reachd' is not known; did you mean 'reached'?"}},
      {"/netwrk", 1, {"'netwrk' is not known; did you mean 'network'?"}},
      {"/memory/reached", 1.5, {"memory.reached is 1.5", "from 0.01 to 1"}},
      {"/memory/GB_per_s", -1, {"memory.GB_per_s is -1", "GB/s from 0.001 to 100000"}},
      {"/memory/GB_per_s", 1e30, {"memory.GB_per_s is 1e+30", "GB/s from 0.001 to 100000"}},
      {"/memory/GB_per_s", 2e12, {"2000000000000 bytes/s are 2000 GB/s"}},
      {"/memory_MiB", 85899345920, {"85899345920 bytes are 81920 MiB"}},
      {"/launch/host_us", "5", {"launch.host_us is \"5\": expected a number of microseconds"}},
      {"/products/f32/peak_TFLOP_per_s", 312e12, {"312000000000000 FLOP/s are 312 TFLOP/s"}},
      {"/products/f32/measured_TFLOP_per_s",
       2.5,
       {"products.f32.measured_TFLOP_per_s is 2.5: expected at most the peak, 2"}},
      {"/products/f32/tiles", json::array(), {"products.f32.tiles is []"}},
      {"/products/f32/tiles", {{16, 0, 1.0}}, {"products.f32.tiles is [16,0,1.0]"}},
      {"/products/f32/measured_at", {64, 64}, {"measured_at is [64,64]: expected [m, n, k]"}},
      {"/products/fp16", json::object(), {"'products.fp16' is not a type; did you mean 'f16'?"}},
      {"/products", json::object(), {"products is {}: expected at least one type"}},
      {"/collective_multiprocessors", 4, {"expected a whole number from 0 to 3"}},
      {"/devices_per_node", 0, {"devices_per_node is 0: expected a whole number from 1 to 1024"}},
      {"/devices_per_node", 2.5, {"devices_per_node is 2.5: expected a whole number"}},
      {"/device", "gpu", {"device is 'gpu': expected cuda, cpu"}},
      {"/device", "cpu", {"nvlink: device cpu has none"}},
      {"/nvlink/devices", 3, {"nvlink.devices is 3: expected a divisor or a multiple"}},
      {"/nvlink/devices", 4, {"node_link: no device of a node uses it"}},
      {"/nvlink/switched", 1, {"nvlink.switched is 1: expected true or false"}},
      {"/node_link", nullptr, {"the key 'node_link' is missing"}},
      {"/node_link/kind", "usb", {"node_link.kind is 'usb': expected x-bus, pcie, memory"}},
      {"/host/processor", "sparc", {"host.processor is 'sparc': expected intel, amd, power, arm"}},
      {"/about", json::array(), {"about is []"}},
      {"/name", "", {"name is \"\": expected a text"}},
  };
  for (const Bad& bad : all) {
    CAPTURE(bad.key);
    CAPTURE(bad.value.dump());
    try {
      parse_system(with(bad.key, bad.value), "bad.json");
      FAIL_CHECK("no error");
    } catch (const Error& error) {
      const std::string message = error.what();
      CHECK(message.starts_with("bad.json: "));
      for (const char* said : bad.said) {
        CHECK_MESSAGE(message.find(said) != std::string::npos, message);
      }
    }
  }
  CHECK_THROWS_WITH_AS(parse_system("{", "bad.json"), doctest::Contains("bad.json: not JSON"),
                       Error);
  CHECK_THROWS_WITH_AS(parse_system(R"({"name": 1e999})", "bad.json"),
                       doctest::Contains("bad.json: not JSON"), Error);
}

TEST_CASE("system: products of a type that it does not have") {
  const System s = parse_system(kText, "small.json");
  CHECK_THROWS_WITH_AS(s.products_of(DType::bf16),
                       "system small has no products of bf16, only of f32; choose another "
                       "--precision, or add products.bf16 to small.json",
                       Error);
}

TEST_CASE("system: names are found beside the sources or where SHERD_SYSTEMS says; all are valid") {
  const std::vector<std::string> names = known_systems();
  CHECK(names == std::vector<std::string>{"ac922-v100", "dgx-a100", "dgx-b200", "dgx-h100",
                                          "dgx-h200", "gb200-nvl72", "grand-teton-h100"});
  for (const std::string& name : names) {
    CAPTURE(name);
    const System s = read_system(name);
    CHECK(s.name == name);
    CHECK(s.measured->is_object());
    CHECK(read_system(s.path).memory_bytes == s.memory_bytes);
  }
  CHECK_THROWS_WITH_AS(read_system("dgx-a10"), doctest::Contains("did you mean 'dgx-a100'?"),
                       Error);
  CHECK_THROWS_WITH_AS(read_system("nothing-near-it"), doctest::Contains("; known: ac922-v100, dg"),
                       Error);
  CHECK_THROWS_WITH_AS(read_system("./none.json"), doctest::Contains("./none.json"), Error);

  const test::TempDirectory folder;
  test::put_file(folder.path("small.json"), test::bytes_of(kText));
  {
    const Environment here(folder.path(""));
    CHECK(known_systems() == std::vector<std::string>{"small"});
    CHECK(read_system("small").name == "small");
    CHECK_THROWS_WITH_AS(read_system("smal"), doctest::Contains("did you mean 'small'?"), Error);
  }
  {
    const Environment nowhere(folder.path("none"));
    CHECK_THROWS_WITH_AS(known_systems(), doctest::Contains("SHERD_SYSTEMS is"), Error);
  }
}
