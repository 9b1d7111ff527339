// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/io/torch_types.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

namespace sherd {
namespace {

constexpr auto kTypes = std::to_array<TorchType>({
    {"float64", "torch.DoubleStorage", 8, DType::f64},
    {"float32", "torch.FloatStorage", 4, DType::f32},
    {"float16", "torch.HalfStorage", 2, DType::f16},
    {"bfloat16", "torch.BFloat16Storage", 2, DType::bf16},
    {"int64", "torch.LongStorage", 8, DType::i64},
    {"int32", "torch.IntStorage", 4, DType::i32},
    {"int16", "torch.ShortStorage", 2, {}},
    {"int8", "torch.CharStorage", 1, {}},
    {"uint8", "torch.ByteStorage", 1, DType::u8},
    {"bool", "torch.BoolStorage", 1, {}},
    {"complex64", "torch.ComplexFloatStorage", 8, {}},
    {"complex128", "torch.ComplexDoubleStorage", 16, {}},
    {"qint8", "torch.QInt8Storage", 1, {}},
    {"quint8", "torch.QUInt8Storage", 1, {}},
    {"qint32", "torch.QInt32Storage", 4, {}},
    {"complex32", "", 4, {}},
    {"uint16", "", 2, {}},
    {"uint32", "", 4, {}},
    {"uint64", "", 8, {}},
    {"float8_e4m3fn", "", 1, {}},
    {"float8_e5m2", "", 1, {}},
    {"float8_e4m3fnuz", "", 1, {}},
    {"float8_e5m2fnuz", "", 1, {}},
    {"float8_e8m0fnu", "", 1, {}},
});
constexpr std::string_view kModule = "torch.";

constexpr auto kCallables = std::to_array<std::string_view>({
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_qtensor",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._tensor._rebuild_from_type_v2",
    "torch.Size",
    "torch.device",
});

constexpr auto kOtherConstants = std::to_array<std::string_view>({
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.per_tensor_affine",
    "torch.per_channel_affine",
    kUntypedStorage,
});

}  // namespace

const TorchType* torch_type_of_storage(std::string_view global) {
  const auto found = std::ranges::find(kTypes, global, &TorchType::storage);
  return global.empty() || found == kTypes.end() ? nullptr : &*found;
}

const TorchType* torch_type_of_dtype(std::string_view global) {
  if (!global.starts_with(kModule)) return nullptr;
  const auto found = std::ranges::find(kTypes, global.substr(kModule.size()), &TorchType::name);
  return found == kTypes.end() ? nullptr : &*found;
}

std::span<const std::string_view> torch_callables() {
  return kCallables;
}

std::span<const std::string_view> torch_constants() {
  static const auto names = [] {
    std::vector<std::string> all(kOtherConstants.begin(), kOtherConstants.end());
    for (const TorchType& type : kTypes) {
      all.push_back(std::string(kModule) + std::string(type.name));
      if (!type.storage.empty()) all.emplace_back(type.storage);
    }
    return all;
  }();
  static const std::vector<std::string_view> views(names.begin(), names.end());
  return views;
}

}  // namespace sherd
