// SPDX-License-Identifier: Apache-2.0
#include <sherd/models/weights.h>

#include <sherd/kernels/elementwise.h>
#include <sherd/runtime/host_bytes.h>
#include <sherd/runtime/suggest.h>

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

WeightsFile::WeightsFile(const std::string& path, const Module& model)
    : file_(SafetensorsFile::open(path)) {
  std::vector<std::string> in_file;
  for (const SafetensorsEntry& entry : file_.entries()) in_file.push_back(entry.name);
  std::set<std::string> known;
  for (const Parameter* parameter : model.parameters()) {
    known.insert(parameter->name());
    const SafetensorsEntry* entry = file_.find(parameter->name());
    SHERD_CHECK(entry != nullptr, "{}: has no tensor '{}' {} that the model needs{}", path,
                parameter->name(), parameter->shape().to_string(),
                did_you_mean(parameter->name(), in_file));
    SHERD_CHECK(entry->shape == parameter->shape(), "{}: '{}' has shape {}, the model needs {}",
                path, entry->name, entry->shape.to_string(), parameter->shape().to_string());
    SHERD_CHECK(is_floating(entry->dtype), "{}: '{}' is {}, a weight must be floating", path,
                entry->name, name_of(entry->dtype));
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
}

void WeightsFile::read(const Parameter& parameter, std::int64_t first,
                       const Tensor& elements) const {
  if (elements.context().is_meta() || elements.numel() == 0) return;
  const SafetensorsEntry& entry = *file_.find(parameter.name());
  const std::size_t width = size_of(entry.dtype);
  const auto bytes = file_.bytes(entry).subspan(static_cast<std::size_t>(first) * width,
                                                static_cast<std::size_t>(elements.numel()) * width);
  if (entry.dtype == elements.dtype()) {
    elements.copy_from_host(bytes.data(), bytes.size());
    return;
  }
  const Tensor narrow =
      Tensor::empty(elements.context(), elements.shape(), entry.dtype, MemoryCategory::workspace);
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
