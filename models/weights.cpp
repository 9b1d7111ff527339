// SPDX-License-Identifier: Apache-2.0
#include <sherd/models/weights.h>

#include <sherd/kernels/elementwise.h>
#include <sherd/models/weights_names.h>
#include <sherd/runtime/host_bytes.h>
#include <sherd/runtime/suggest.h>

#include <algorithm>
#include <deque>
#include <set>

namespace sherd {
namespace {

bool is_known_leftover(const std::string& name) {
  return name.starts_with("pre_logits.") || name.starts_with("pooler.");
}

}  // namespace

void save_weights(const Module& model, const std::string& path,
                  const std::map<std::string, std::string>& metadata) {
  std::deque<HostBytes> bytes;
  std::vector<SafetensorsItem> items;
  for (const Parameter* parameter : model.parameters()) {
    const Tensor data = contiguous(parameter->data());
    items.push_back(
        {parameter->name(), data.dtype(), data.shape(), bytes.emplace_back(data).get()});
  }
  write_safetensors(path, items, metadata);
}

std::vector<std::string> weight_names(const TensorFile& file) {
  const std::string& prefix = file.prefix();
  std::vector<std::string> names;
  for (const TensorEntry& entry : file.entries()) {
    if (!entry.name.starts_with(prefix)) continue;
    if (prefix.empty() && entry.name.starts_with(kOptimizerPrefix)) continue;
    names.push_back(entry.name.substr(prefix.size()));
  }
  return names;
}

WeightsFile::WeightsFile(const std::string& path, const Module& model)
    : WeightsFile(open_tensor_file(path), model) {}

WeightsFile::WeightsFile(std::unique_ptr<TensorFile> file, const Module& model)
    : file_(std::move(file)) {
  const std::string& path = file_->path();
  const std::string& prefix = file_->prefix();
  const std::vector<std::string> names = weight_names(*file_);
  if (!prefix.empty()) {
    notes_.push_back(fmt::format("weights under '{}'", prefix.substr(0, prefix.size() - 1)));
  }
  const WeightNames mapped = map_weight_names(names);
  notes_.insert(notes_.end(), mapped.notes.begin(), mapped.notes.end());
  std::vector<std::string> in_file;
  for (const WeightSource& weight : mapped.weights) {
    in_file.push_back(weight.name);
    Sources sources;
    for (const std::string& from : weight.from) sources.push_back(file_->find(prefix + from));
    SHERD_CHECK(weights_.emplace(weight.name, std::move(sources)).second,
                "{}: two of its tensors stand for '{}', one of them '{}'", path, weight.name,
                prefix + weight.from[0]);
  }

  std::set<std::string> known;
  for (const Parameter* parameter : model.parameters()) {
    known.insert(parameter->name());
    const auto found = weights_.find(parameter->name());
    SHERD_CHECK(found != weights_.end(), "{}: has no tensor '{}' {} that the model needs{}", path,
                parameter->name(), parameter->shape().to_string(),
                did_you_mean(parameter->name(), in_file));
    check(*parameter, found->second);
  }
  for (const std::string& name : in_file) {
    if (known.contains(name)) continue;
    SHERD_CHECK(
        is_known_leftover(name),
        "{}: has a tensor '{}' that the model lacks; are the model's settings (depth, bias, "
        "pooling) those of the file?",
        path, name);
    leftover_.push_back(name);
  }
  if (!leftover_.empty()) {
    notes_.push_back(fmt::format("not used: {}", fmt::join(leftover_, ", ")));
  }
}

void WeightsFile::check(const Parameter& parameter, const Sources& sources) const {
  const TensorEntry& first = *sources[0];
  std::vector<std::int64_t> dims = first.dims;
  bool alike = true;
  for (const TensorEntry* source : sources) {
    SHERD_CHECK(source->dtype && is_floating(*source->dtype),
                "{}: '{}' is {}, a weight must be floating (f64, f32, f16 or bf16)", file_->path(),
                source->name, source->type);
    if (source == &first) continue;
    alike = alike && source->dtype == first.dtype && !dims.empty() &&
            source->dims.size() == dims.size() &&
            std::equal(dims.begin() + 1, dims.end(), source->dims.begin() + 1);
    if (alike) dims[0] += source->dims[0];
  }
  SHERD_CHECK(alike, "{}: '{}' and the tensors joined with it differ in type or shape",
              file_->path(), first.name);
  SHERD_CHECK(std::ranges::equal(dims, parameter.shape().dims()),
              "{}: '{}' has shape [{}]{}, the model needs {}", file_->path(), first.name,
              fmt::join(dims, ", "), sources.size() > 1 ? " with those joined to it" : "",
              parameter.shape().to_string());
}

void WeightsFile::read(const Parameter& parameter, std::int64_t first,
                       const Tensor& elements) const {
  if (elements.context().is_meta() || elements.numel() == 0) return;
  const Sources& sources = weights_.at(parameter.name());
  const DType dtype = *sources[0]->dtype;
  const std::int64_t end = first + elements.numel();
  std::vector<std::uint8_t> room, joined;
  std::span<const std::uint8_t> bytes;
  std::int64_t start = 0;  // of a source, among the parameter's elements
  for (const TensorEntry* source : sources) {
    const std::int64_t from = std::max(first, start), to = std::min(end, start + source->numel);
    if (from < to) {
      bytes = file_->read(*source, from - start, to - from, room);
      if (sources.size() > 1) joined.insert(joined.end(), bytes.begin(), bytes.end());
    }
    start += source->numel;
  }
  if (sources.size() > 1) bytes = joined;
  if (dtype == elements.dtype()) {
    elements.copy_from_host(bytes.data(), bytes.size());
    return;
  }
  const Tensor narrow =
      Tensor::empty(elements.context(), elements.shape(), dtype, MemoryCategory::workspace);
  narrow.copy_from_host(bytes.data(), bytes.size());
  copy(elements, cast(narrow, elements.dtype(), MemoryCategory::workspace));
}

std::vector<std::string> load_weights(Module& model, Context& context, DType dtype,
                                      const std::string& path) {
  if (model.name().empty()) model.assign_names();
  const WeightsFile file(path, model);
  for (Parameter* parameter : model.parameters()) {
    parameter->set_data(
        Tensor::empty(context, parameter->shape(), dtype, MemoryCategory::parameters));
    file.read(*parameter, 0, parameter->data());
  }
  return file.leftover();
}

}  // namespace sherd
