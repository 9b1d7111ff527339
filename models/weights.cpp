// SPDX-License-Identifier: Apache-2.0
#include <sherd/models/weights.h>

#include <sherd/kernels/elementwise.h>
#include <sherd/runtime/io/safetensors.h>
#include <sherd/runtime/suggest.h>

#include <algorithm>
#include <cstring>
#include <set>

namespace sherd {
namespace {

bool is_known_leftover(const std::string& name) {
  return name.starts_with("pre_logits.") || name.starts_with("pooler.");
}

}  // namespace

void save_weights(const Module& model, const std::string& path,
                  const std::map<std::string, std::string>& metadata) {
  std::vector<Tensor> tensors;
  std::vector<SafetensorsItem> items;
  for (const Parameter* parameter : model.parameters()) {
    const Tensor& data = tensors.emplace_back(contiguous(parameter->data()));
    items.push_back({parameter->name(),
                     data.dtype(),
                     data.shape(),
                     {static_cast<const std::uint8_t*>(data.raw_data()),
                      static_cast<std::size_t>(data.numel()) * size_of(data.dtype())}});
  }
  write_safetensors(path, items, metadata);
}

std::vector<std::string> load_weights(Module& model, Context& context, DType dtype,
                                      const std::string& path) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  std::vector<std::string> in_file, leftover;
  for (const SafetensorsEntry& entry : file.entries()) in_file.push_back(entry.name);
  model.assign_names();
  std::set<std::string> known;
  for (Parameter* parameter : model.parameters()) {
    known.insert(parameter->name());
    const SafetensorsEntry* entry = file.find(parameter->name());
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
    leftover.push_back(name);
  }
  for (Parameter* parameter : model.parameters()) {
    const SafetensorsEntry& entry = *file.find(parameter->name());
    const Tensor data =
        Tensor::empty(context, entry.shape, entry.dtype, MemoryCategory::parameters);
    const auto bytes = file.bytes(entry);
    data.copy_from_host(bytes.data(), bytes.size());
    parameter->set_data(entry.dtype == dtype ? data
                                             : cast(data, dtype, MemoryCategory::parameters));
  }
  return leftover;
}

}  // namespace sherd
