// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/planner/measured_cost.h>

#include <sherd/runtime/error.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace sherd {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::pair<Work::Kind, std::string_view> kKinds[] = {
    {Work::Kind::kernel, "kernel"},
    {Work::Kind::product, "product"},
    {Work::Kind::collective, "collective"},
    {Work::Kind::copy, "copy"},
    {Work::Kind::host, "host"},
    {Work::Kind::file, "file"}};

std::string_view name_of(Work::Kind kind) {
  return std::ranges::find(kKinds, kind, &std::pair<Work::Kind, std::string_view>::first)->second;
}

double log2_of(std::int64_t value) {
  return std::log2(static_cast<double>(std::max<std::int64_t>(1, value)));
}

template <typename T>
T field(const Json& object, const char* name, const std::string& file) {
  try {
    return object.at(name).get<T>();
  } catch (const Json::exception&) {
    fail(
        "{}: \"measured\": \"{}\" is missing, or of another type than sherd writes; make the file "
        "again: sherd bench calibrate",
        file, name);
  }
}

// What is left out where it is nothing.
template <typename T>
T optional_field(const Json& object, const char* name, const std::string& file) {
  return object.contains(name) ? field<T>(object, name, file) : T{};
}

void check_keys(const Json& object, std::initializer_list<std::string_view> known,
                const std::string& file) {
  for (const auto& [key, value] : object.items()) {
    SHERD_CHECK(std::ranges::find(known, key) != known.end(),
                "{}: \"measured\": the key '{}' is not known, expected {}", file, key,
                fmt::join(known, ", "));
  }
}

MeasuredCosts::Point read_point(const Json& object, const std::string& file) {
  check_keys(object,
             {"kind", "name", "dtype", "bytes", "flops", "m", "n", "k", "transposed_a",
              "transposed_b", "seconds"},
             file);
  MeasuredCosts::Point point;
  const auto kind = field<std::string>(object, "kind", file);
  const auto found =
      std::ranges::find(kKinds, kind, &std::pair<Work::Kind, std::string_view>::second);
  SHERD_CHECK(found != std::end(kKinds), "{}: \"measured\": no kind of work is '{}'", file, kind);
  point.work.kind = found->first;
  point.name = field<std::string>(object, "name", file);
  const auto dtype = field<std::string>(object, "dtype", file);
  try {
    point.work.dtype = dtype_from_name(dtype);
  } catch (const Error& error) {
    fail("{}: \"measured\": \"dtype\": {}", file, error.what());
  }
  point.work.bytes = field<std::int64_t>(object, "bytes", file);
  point.work.flops = optional_field<std::int64_t>(object, "flops", file);
  point.work.m = optional_field<std::int64_t>(object, "m", file);
  point.work.n = optional_field<std::int64_t>(object, "n", file);
  point.work.k = optional_field<std::int64_t>(object, "k", file);
  point.work.transposed_a = optional_field<bool>(object, "transposed_a", file);
  point.work.transposed_b = optional_field<bool>(object, "transposed_b", file);
  point.seconds = field<double>(object, "seconds", file);
  SHERD_CHECK(point.work.bytes >= 0 && point.work.flops >= 0 && point.seconds > 0.0 &&
                  std::isfinite(point.seconds),
              "{}: \"measured\": {} of {} bytes takes {} s; expected positive numbers", file,
              point.name, point.work.bytes, point.seconds);
  return point;
}

}  // namespace

std::string MeasuredCosts::key(const Work& work, std::string_view name) {
  if (work.kind == Work::Kind::product) {
    return fmt::format("product {} {}{}", sherd::name_of(work.dtype), work.transposed_a ? 't' : 'n',
                       work.transposed_b ? 't' : 'n');
  }
  return fmt::format("{} {}", name, sherd::name_of(work.dtype));
}

double MeasuredCosts::amount(const Work& work) {
  return static_cast<double>(std::max<std::int64_t>(1, work.flops > 0 ? work.flops : work.bytes));
}

MeasuredCosts::Sample MeasuredCosts::sample_of(const Work& work) {
  Sample sample;
  if (work.kind == Work::Kind::product) {
    sample.m = log2_of(work.m);
    sample.n = log2_of(work.n);
    sample.k = log2_of(work.k);
    return sample;
  }
  sample.bytes = log2_of(work.bytes);
  if (work.flops > 0) sample.flops = log2_of(work.flops);
  return sample;
}

MeasuredCosts::MeasuredCosts(const Json& measured, int threads, int ranks, const std::string& file)
    : file_(file) {
  check_keys(measured, {"cores", "tables"}, file);
  cores_ = field<int>(measured, "cores", file);
  SHERD_CHECK(cores_ > 0, "{}: \"measured\": {} cores", file, cores_);
  const Json* best = nullptr;
  double nearest = std::numeric_limits<double>::infinity();
  const auto all = field<Json>(measured, "tables", file);
  for (const Json& table : all) {
    check_keys(table, {"threads", "ranks", "points"}, file);
    const int t = field<int>(table, "threads", file), r = field<int>(table, "ranks", file);
    SHERD_CHECK(t > 0 && r > 0, "{}: \"measured\": a table of {} threads and {} ranks", file, t, r);
    // Threads change kernels more than neighbours do.
    const double distance = 4.0 * std::abs(std::log2(static_cast<double>(t) / threads)) +
                            std::abs(std::log2(static_cast<double>(r) / ranks));
    if (distance >= nearest) continue;
    nearest = distance;
    best = &table;
    ranks_ = r;
  }
  SHERD_CHECK(best != nullptr,
              "{}: \"measured\" has no table; make the file again: sherd bench "
              "calibrate",
              file);
  for (const Json& object : field<Json>(*best, "points", file)) {
    const Point point = read_point(object, file);
    Sample sample = sample_of(point.work);
    sample.rate = std::log(amount(point.work) / point.seconds);
    tables_[key(point.work, point.name)].push_back(sample);
  }
}

// Note [Interpolated rates]
// The logarithm of a rate is averaged over the points, each weighted by the inverse fourth power of
// its distance, a distance being that of the logarithms of the sizes (Shepard, "A two-dimensional
// interpolation function for irregularly-spaced data", 1968). So a point that was measured gets its
// own rate, a size between two of them something between, and a size beyond all no more than what
// was seen.
double MeasuredCosts::seconds(const Work& work) const {
  const auto found = tables_.find(key(work, work.name));
  SHERD_CHECK(found != tables_.end(),
              "{}: nothing like '{}' in {} was measured; make the file again with that type: sherd "
              "bench calibrate --precisions {}",
              file_, work.name, sherd::name_of(work.dtype), sherd::name_of(work.dtype));
  const Sample here = sample_of(work);
  double weights = 0.0, sum = 0.0;
  for (const Sample& sample : found->second) {
    const double d[] = {here.bytes - sample.bytes, here.flops - sample.flops, here.m - sample.m,
                        here.n - sample.n, here.k - sample.k};
    double square = 1e-6;
    for (const double x : d) square += x * x;
    const double weight = 1.0 / (square * square);
    weights += weight;
    sum += weight * sample.rate;
  }
  return amount(work) / std::exp(sum / weights);
}

Json measured_table(int threads, int ranks, const std::vector<MeasuredCosts::Point>& points) {
  Json all = Json::array();
  for (const MeasuredCosts::Point& point : points) {
    const Work& work = point.work;
    Json json{{"kind", name_of(work.kind)},
              {"name", point.name},
              {"dtype", sherd::name_of(work.dtype)},
              {"bytes", work.bytes}};
    if (work.flops > 0) json["flops"] = work.flops;
    if (work.kind == Work::Kind::product) {
      json["m"] = work.m;
      json["n"] = work.n;
      json["k"] = work.k;
      if (work.transposed_a) json["transposed_a"] = true;
      if (work.transposed_b) json["transposed_b"] = true;
    }
    json["seconds"] = point.seconds;
    all.push_back(std::move(json));
  }
  return {{"threads", threads}, {"ranks", ranks}, {"points", std::move(all)}};
}

}  // namespace sherd
