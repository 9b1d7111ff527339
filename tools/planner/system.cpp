// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/planner/system.h>

#include <sherd/runtime/error.h>
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/suggest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace sherd {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;

// What a number in a file may be: its unit, that unit in basic ones, and the range in which a
// machine lies, wide enough for any and narrow enough to see a number in another unit.
struct Unit {
  const char* name;
  double scale;
  double low, high;
  const char* basic;
};
constexpr Unit kTflops{"TFLOP/s", 1e12, 1e-4, 1e5, "FLOP/s"};
constexpr Unit kRate{"GB/s", 1e9, 1e-3, 1e5, "bytes/s"};
constexpr Unit kMemory{"MiB", 1024.0 * 1024.0, 1, 1 << 24, "bytes"};
constexpr Unit kMicroseconds{"microseconds", 1e-6, 0, 1e5, "seconds"};
constexpr Unit kFraction{"as a fraction", 1, 0.01, 1, nullptr};

// An object of a system file. Every key must be asked for: done() names one that was not.
class Fields {
 public:
  Fields(const json& object, std::string path, std::string within)
      : object_(object), path_(std::move(path)), within_(std::move(within)) {
    SHERD_CHECK(object.is_object(), "{}: expected an object{}, got {}", path_,
                within_.empty() ? "" : " as " + within_, object.dump());
  }

  bool has(const char* key) {
    known_.emplace_back(key);
    return object_.contains(key);
  }
  const json& at(const char* key, const char* expected) {
    SHERD_CHECK(has(key), "{}: the key '{}' is missing: expected {}", path_, name(key), expected);
    return object_.at(key);
  }
  Fields object(const char* key, const char* expected) {
    return {at(key, expected), path_, name(key)};
  }
  double number(const char* key, const Unit& unit) {
    const std::string expected =
        fmt::format("a number of {} from {} to {}", unit.name, unit.low, unit.high);
    const json& value = at(key, expected.c_str());
    const double number = value.is_number() ? value.get<double>() : std::nan("");
    if (number >= unit.low && number <= unit.high) return number * unit.scale;
    const double other = number / unit.scale;
    const bool hint = unit.basic != nullptr && other >= unit.low && other <= unit.high && other > 0;
    reject(key, value, expected,
           hint ? fmt::format("; {} {} are {} {}", number, unit.basic, other, unit.name) : "");
  }
  std::int64_t whole(const char* key, std::int64_t low, std::int64_t high) {
    const std::string expected = fmt::format("a whole number from {} to {}", low, high);
    const json& value = at(key, expected.c_str());
    const double number = value.is_number_integer() ? value.get<double>() : std::nan("");
    if (number >= static_cast<double>(low) && number <= static_cast<double>(high)) {
      return value.get<std::int64_t>();
    }
    reject(key, value, expected);
  }
  bool flag(const char* key) {
    const json& value = at(key, "true or false");
    if (!value.is_boolean()) reject(key, value, "true or false");
    return value.get<bool>();
  }
  std::string text(const char* key) {
    const json& value = at(key, "a text");
    if (!value.is_string() || value.get<std::string>().empty()) reject(key, value, "a text");
    return value.get<std::string>();
  }
  std::string one_of(const char* key, const std::vector<std::string>& known) {
    const std::string value = text(key);
    SHERD_CHECK(std::ranges::find(known, value) != known.end(), "{}: {} is '{}': expected {}",
                path_, name(key), value, fmt::join(known, ", "));
    return value;
  }
  // A list of numbers, of this length.
  std::vector<double> numbers(const char* key, std::size_t length, const char* expected) {
    const json& value = at(key, expected);
    if (!value.is_array() || value.size() != length) reject(key, value, expected);
    std::vector<double> result;
    for (const json& item : value) {
      if (!item.is_number()) reject(key, value, expected);
      result.push_back(item.get<double>());
    }
    return result;
  }
  void done() const {
    for (const auto& [key, value] : object_.items()) {
      SHERD_CHECK(std::ranges::find(known_, key) != known_.end(), "{}: the key '{}' is not known{}",
                  path_, name(key), did_you_mean(key, known_));
    }
  }
  const json& value() const { return object_; }
  std::string name(const std::string& key) const {
    return within_.empty() ? key : within_ + "." + key;
  }
  [[noreturn]] void reject(const std::string& key, const json& value, const std::string& expected,
                           const std::string& hint = "") const {
    fail("{}: {} is {}: expected {}{}", path_, name(key), value.dump(), expected, hint);
  }

 private:
  const json& object_;
  std::string path_, within_;
  std::vector<std::string> known_;
};

ProductTile read_tile(const Fields& fields, const json& item) {
  const auto good = [](const json& value, double low, double high) {
    return value.is_number() && value.get<double>() >= low && value.get<double>() <= high;
  };
  if (!item.is_array() || item.size() != 3 || !good(item[0], 1, 4096) || !good(item[1], 1, 4096) ||
      !good(item[2], 0.01, 1)) {
    fields.reject("tiles", item, "[rows, columns, fraction of the best rate] for each");
  }
  return {item[0].get<std::int64_t>(), item[1].get<std::int64_t>(), item[2].get<double>()};
}

ProductRates read_products(Fields fields) {
  ProductRates products;
  products.peak = fields.number("peak_TFLOP_per_s", kTflops);
  products.measured = fields.number("measured_TFLOP_per_s", kTflops);
  if (products.measured > products.peak) {
    fields.reject("measured_TFLOP_per_s", products.measured / kTflops.scale,
                  fmt::format("at most the peak, {}", products.peak / kTflops.scale));
  }
  constexpr const char* kShape = "[m, n, k] of the product that was measured";
  const std::vector<double> shape = fields.numbers("measured_at", 3, kShape);
  if (std::ranges::any_of(shape, [](double side) { return side < 1 || side > 1 << 24; })) {
    fields.reject("measured_at", shape, kShape);
  }
  products.measured_m = static_cast<std::int64_t>(shape[0]);
  products.measured_n = static_cast<std::int64_t>(shape[1]);
  products.measured_k = static_cast<std::int64_t>(shape[2]);
  constexpr const char* kTiles = "a list of [rows, columns, fraction of the best rate]";
  const json& tiles = fields.at("tiles", kTiles);
  if (!tiles.is_array() || tiles.empty()) fields.reject("tiles", tiles, kTiles);
  for (const json& item : tiles) products.tiles.push_back(read_tile(fields, item));
  products.prologue_k = fields.number("prologue_k", {"elements of k", 1, 0, 4096, nullptr});
  fields.done();
  return products;
}

void read_device(System& system, Fields& fields) {
  system.memory_bytes = static_cast<std::int64_t>(fields.number("memory_MiB", kMemory));
  system.devices_per_node = static_cast<int>(fields.whole("devices_per_node", 1, 1024));
  if (system.cuda) {
    system.compute_capability = static_cast<int>(fields.whole("compute_capability", 70, 199));
    system.multiprocessors = static_cast<int>(fields.whole("multiprocessors", 1, 1024));
    system.collective_multiprocessors =
        static_cast<int>(fields.whole("collective_multiprocessors", 0, system.multiprocessors - 1));
  }
  Fields products = fields.object("products", "an object with a type, such as \"bf16\", as key");
  if (products.value().empty()) {
    fields.reject("products", products.value(), "at least one type, such as \"bf16\"");
  }
  for (const auto& [key, value] : products.value().items()) {
    const std::vector<std::string> known{"bf16", "f16", "f32", "f64"};
    SHERD_CHECK(std::ranges::find(known, key) != known.end(), "{}: the key '{}' is not a type{}",
                system.path, products.name(key), did_you_mean(key, known));
    system.products[dtype_from_name(key)] = read_products({value, system.path, products.name(key)});
  }
  Fields memory = fields.object("memory", "an object");
  system.memory_bytes_per_second = memory.number("GB_per_s", kRate);
  system.memory_reached = memory.number("reached", kFraction);
  memory.done();
  Fields launch = fields.object("launch", "an object");
  system.launch_seconds = launch.number("host_us", kMicroseconds);
  system.smallest_kernel_seconds = launch.number("smallest_kernel_us", kMicroseconds);
  launch.done();
  Fields attention = fields.object("attention", "an object");
  system.attention_forward = attention.number("forward", kFraction);
  system.attention_backward = attention.number("backward", kFraction);
  attention.done();
}

void read_links(System& system, Fields& fields) {
  const bool cuda = system.cuda;
  if (fields.has("nvlink")) {
    SHERD_CHECK(cuda, "{}: nvlink: device cpu has none; give node_link", system.path);
    Fields link = fields.object("nvlink", "an object");
    system.fast_link.emplace();
    system.fast_link->devices = static_cast<int>(link.whole("devices", 2, 4096));
    system.fast_link->bytes_per_second = link.number("GB_per_s", kRate);
    system.fast_link->switched = link.flag("switched");
    const int domain = system.fast_link->devices, node = system.devices_per_node;
    if (domain % node != 0 && node % domain != 0) {
      link.reject("devices", domain,
                  fmt::format("a divisor or a multiple of devices_per_node, {}", node));
    }
    link.done();
  }
  if (system.domain_devices() < system.devices_per_node) {
    Fields link = fields.object("node_link",
                                "the link between the devices of a node, or between "
                                "the domains of nvlink, which are smaller");
    system.node_link.emplace();
    system.node_link->kind = link.one_of("kind", {"x-bus", "pcie", "memory"});
    system.node_link->bytes_per_second = link.number("GB_per_s", kRate);
    if (!cuda) system.node_link->latency = link.number("latency_us", kMicroseconds);
    link.done();
  } else {
    SHERD_CHECK(!fields.has("node_link"),
                "{}: node_link: no device of a node uses it, as nvlink reaches all; remove it",
                system.path);
  }
  if (fields.has("network")) {
    Fields link = fields.object("network", "an object");
    system.network.emplace();
    system.network->bytes_per_second = link.number("GB_per_s", kRate);
    system.network->adapters = static_cast<int>(link.whole("adapters", 1, 1024));
    system.network->latency = link.number("latency_us", kMicroseconds);
    if (cuda) system.network->pcie_switch = link.flag("pcie_switch");
    link.done();
  }
  Fields host = fields.object("host", "an object");
  system.host.processor = host.one_of("processor", {"intel", "amd", "power", "arm"});
  system.host.memory_bytes_per_second = host.number("memory_GB_per_s", kRate);
  if (cuda) system.host.link_bytes_per_second = host.number("link_GB_per_s", kRate);
  system.host.disk_bytes_per_second = host.number("disk_GB_per_s", kRate);
  host.done();
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator i(folder, error), end; !error && i != end; i.increment(error)) {
    if (i->path().extension() == ".json") names.push_back(i->path().stem().string());
  }
  std::ranges::sort(names);
  return names;
}

fs::path systems_folder() {
  if (const char* chosen = std::getenv("SHERD_SYSTEMS"); chosen != nullptr && *chosen != '\0') {
    SHERD_CHECK(fs::is_directory(chosen), "SHERD_SYSTEMS is {}, which is not a folder", chosen);
    return chosen;
  }
  return fs::is_directory(detail::kSystemsInSource) ? detail::kSystemsInSource
                                                    : detail::kSystemsInstalled;
}

}  // namespace

const ProductRates& System::products_of(DType dtype) const {
  const auto found = products.find(dtype);
  if (found == products.end()) {
    std::vector<std::string_view> known;
    for (const auto& [type, rates] : products) known.push_back(name_of(type));
    fail(
        "system {} has no products of {}, only of {}; choose another --precision, or add "
        "products.{} to {}",
        name, name_of(dtype), fmt::join(known, ", "), name_of(dtype), path);
  }
  return found->second;
}

std::vector<std::string> known_systems() {
  return names_in(systems_folder());
}

System read_system(const std::string& name_or_path) {
  std::string path = name_or_path;
  if (!path.ends_with(".json") && path.find('/') == std::string::npos) {
    const fs::path folder = systems_folder();
    path = (folder / (name_or_path + ".json")).string();
    SHERD_CHECK(fs::exists(path), "system '{}' is not in {}{}", name_or_path, folder.string(),
                did_you_mean(name_or_path, names_in(folder)));
  }
  const std::vector<std::uint8_t> text = read_file(path);
  return parse_system({text.begin(), text.end()}, path);
}

System parse_system(const std::string& text, const std::string& path) {
  json document;
  try {
    document = json::parse(text);
  } catch (const json::exception& error) {
    fail("{}: not JSON: {}", path, error.what());
  }
  System system;
  system.path = path;
  Fields fields(document, path, "");
  system.name = fields.text("name");
  constexpr const char* kAbout = "a list of texts that say where the numbers come from";
  const json& about = fields.at("about", kAbout);
  if (!about.is_array() || about.empty()) fields.reject("about", about, kAbout);
  for (const json& line : about) {
    if (!line.is_string()) fields.reject("about", about, kAbout);
    system.about.push_back(line.get<std::string>());
  }
  system.cuda = fields.one_of("device", {"cuda", "cpu"}) == "cuda";
  read_device(system, fields);
  read_links(system, fields);
  system.measured = std::make_shared<const json>(fields.has("measured") ? document.at("measured")
                                                                        : json::object());
  fields.done();
  return system;
}

}  // namespace sherd
