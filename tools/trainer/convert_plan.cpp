// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/convert_plan.h>

#include <sherd/kernels/elementwise.h>
#include <sherd/models/weights.h>
#include <sherd/models/weights_names.h>
#include <sherd/runtime/host_bytes.h>
#include <sherd/runtime/io/quote.h>
#include <sherd/runtime/tensor.h>

#include <algorithm>
#include <map>
#include <set>

namespace sherd {
namespace {

using Part = ConvertedTensor::Part;

// "head.weight" and "exp_avg" of optimizer.head.weight.exp_avg; empty where it is no such name.
std::pair<std::string, std::string> split_state_name(std::string_view name) {
  if (!name.starts_with(kOptimizerPrefix)) return {};
  name.remove_prefix(kOptimizerPrefix.size());
  const std::size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return {};
  return {std::string(name.substr(0, dot)), std::string(name.substr(dot + 1))};
}

class Planner {
 public:
  Planner(const TensorFile& source, std::optional<DType> dtype) : source_(source), dtype_(dtype) {}

  // A tensor out of whole ones of the source, joined along the first dimension.
  ConvertedTensor joined(const WeightSource& weight, const std::string& state) const {
    ConvertedTensor tensor{weight.name, state, DType::f32, {}, {}};
    std::vector<std::int64_t> dims;
    const TensorEntry* before = nullptr;
    for (const std::string& from : weight.from) {
      const TensorEntry& entry = *find(from, state);
      SHERD_CHECK(entry.dtype.has_value(),
                  "'{}': tensor {} has elements of type {}, which Sherd cannot write; leave it out "
                  "of the source, or convert its type there",
                  source_.path(), quote(entry.name), entry.type);
      if (before == nullptr) {
        dims = entry.dims;
      } else {
        const bool alike = entry.dtype == before->dtype && !dims.empty() &&
                           entry.dims.size() == dims.size() &&
                           std::equal(dims.begin() + 1, dims.end(), entry.dims.begin() + 1);
        SHERD_CHECK(alike, "'{}': {} and {}, which are to be joined, differ in type or shape",
                    source_.path(), quote(before->name), quote(entry.name));
        dims[0] += entry.dims[0];
      }
      before = &entry;
      tensor.parts.push_back({&entry, 0, entry.numel});
    }
    SHERD_CHECK(dims.size() <= Shape::kMaxRank,
                "'{}': tensor {} has {} dimensions, at most {} can "
                "be written",
                source_.path(), quote(before->name), dims.size(), Shape::kMaxRank);
    tensor.shape = Shape(std::span<const std::int64_t>(dims));
    tensor.dtype = *before->dtype;
    if (dtype_ && state.empty() && is_floating(tensor.dtype)) tensor.dtype = *dtype_;
    return tensor;
  }

  // One of equal parts along the first dimension.
  ConvertedTensor cut(ConvertedTensor whole, const WeightTarget& target) const {
    whole.parameter = target.name;
    if (target.parts == 1) return whole;
    std::vector<std::int64_t> dims(whole.shape.dims().begin(), whole.shape.dims().end());
    SHERD_CHECK(!dims.empty() && dims[0] % target.parts == 0,
                "'{}': {} {} cannot be cut into q, k and v", source_.path(), quote(target.from),
                whole.shape.to_string());
    dims[0] /= target.parts;
    whole.shape = Shape(std::span<const std::int64_t>(dims));
    const std::int64_t numel = whole.shape.numel();
    const std::int64_t begin = target.part * numel, end = begin + numel;
    std::vector<Part> parts;
    std::int64_t start = 0;
    for (const Part& part : whole.parts) {
      const std::int64_t from = std::max(begin, start), to = std::min(end, start + part.numel);
      if (from < to) parts.push_back({part.entry, part.first + from - start, to - from});
      start += part.numel;
    }
    whole.parts = std::move(parts);
    return whole;
  }

  // A state of a weight: does the source have it?
  bool has(const WeightSource& weight, const std::string& state) const {
    const auto count = std::ranges::count_if(
        weight.from, [&](const std::string& from) { return find(from, state) != nullptr; });
    SHERD_CHECK(count == 0 || count == std::ssize(weight.from),
                "'{}': of the {} tensors that become {}, only {} have a state {}", source_.path(),
                weight.from.size(), quote(weight.name), count, quote(state));
    return count > 0;
  }

 private:
  const TensorEntry* find(const std::string& name, const std::string& state) const {
    return source_.find(state.empty() ? source_.prefix() + name
                                      : fmt::format("{}{}.{}", kOptimizerPrefix, name, state));
  }

  const TensorFile& source_;
  std::optional<DType> dtype_;
};

void check_names(const ConvertedWeights& weights, const std::string& path) {
  std::set<std::string> names;
  for (const ConvertedTensor& tensor : weights.tensors) {
    SHERD_CHECK(names.insert(tensor.key()).second, "'{}': two of its tensors become {}", path,
                quote(tensor.key()));
  }
}

}  // namespace

std::string ConvertedTensor::key() const {
  return state.empty() ? parameter : fmt::format("{}{}.{}", kOptimizerPrefix, parameter, state);
}

std::uint64_t ConvertedTensor::bytes() const {
  return static_cast<std::uint64_t>(shape.numel()) * size_of(dtype);
}

std::vector<std::string> state_names(const TensorFile& source) {
  std::set<std::string> states;
  for (const TensorEntry& entry : source.entries()) {
    const auto [parameter, state] = split_state_name(entry.name);
    if (!state.empty() && source.find(source.prefix() + parameter) != nullptr) states.insert(state);
  }
  return {states.begin(), states.end()};
}

ConvertedWeights plan_conversion(const TensorFile& source, WeightNaming naming,
                                 std::optional<DType> dtype, bool with_states) {
  ConvertedWeights result;
  const std::vector<std::string> names = weight_names(source);
  SHERD_CHECK(!names.empty(), "'{}': it has no tensor", source.path());
  WeightNames mapped;
  if (naming == WeightNaming::as_is) {
    for (const std::string& name : names) mapped.weights.push_back({name, {name}});
  } else {
    mapped = map_weight_names(names);
  }
  result.notes = std::move(mapped.notes);
  if (!source.prefix().empty()) {
    result.notes.push_back(fmt::format("the weights are the {} tensors under '{}'", names.size(),
                                       source.prefix().substr(0, source.prefix().size() - 1)));
  }
  std::vector<WeightTarget> targets;
  std::vector<std::string> timm;
  for (const WeightSource& weight : mapped.weights) timm.push_back(weight.name);
  if (naming == WeightNaming::transformers) {
    std::vector<std::string> left_over;
    targets = transformers_names(timm, &left_over);
    result.notes.emplace_back(
        "names of transformers, q, k and v apart; it wants the model's config.json beside them");
    if (!left_over.empty()) {
      result.notes.push_back(
          fmt::format("transformers have no name for: {}", fmt::join(left_over, ", ")));
    }
  } else {
    for (const std::string& name : timm) targets.push_back({name, name});
  }
  std::map<std::string, const WeightSource*> by_name;
  for (const WeightSource& weight : mapped.weights) {
    SHERD_CHECK(by_name.emplace(weight.name, &weight).second,
                "'{}': two of its tensors stand for {}, one of them {}", source.path(),
                quote(weight.name), quote(weight.from[0]));
  }
  std::vector<std::string> states{""};
  if (with_states) std::ranges::copy(state_names(source), std::back_inserter(states));
  const Planner planner(source, dtype);
  for (const WeightTarget& target : targets) {
    const WeightSource& weight = *by_name.at(target.from);
    result.renamed = result.renamed || target.name != weight.from[0];
    for (const std::string& state : states) {
      if (!planner.has(weight, state)) continue;  // a state: not every weight is trained
      result.tensors.push_back(planner.cut(planner.joined(weight, state), target));
    }
  }
  check_names(result, source.path());
  return result;
}

void read_converted(const TensorFile& source, const ConvertedTensor& tensor, std::int64_t first,
                    std::int64_t numel,
                    const std::function<void(std::span<const std::uint8_t>)>& use) {
  constexpr std::int64_t kBlock = 1 << 20;  // elements
  Context context({.threads = 1});
  std::vector<std::uint8_t> room;
  std::int64_t start = 0;  // of a part, among the tensor's elements
  for (const Part& part : tensor.parts) {
    const std::int64_t from = std::max(first, start);
    const std::int64_t to = std::min(first + numel, start + part.numel);
    for (std::int64_t at = from; at < to; at += kBlock) {
      const std::int64_t count = std::min(kBlock, to - at);
      const auto bytes = source.read(*part.entry, part.first + at - start, count, room);
      if (*part.entry->dtype == tensor.dtype) {
        use(bytes);
        continue;
      }
      const Tensor old =
          Tensor::empty(context, {count}, *part.entry->dtype, MemoryCategory::workspace);
      old.copy_from_host(bytes.data(), bytes.size());
      use(HostBytes(cast(old, tensor.dtype, MemoryCategory::workspace)).get());
    }
    start += part.numel;
  }
}

}  // namespace sherd
