// SPDX-License-Identifier: Apache-2.0
// What a conversion of weights writes: tensors by their new names, each made of runs of elements of
// the source's.
#pragma once

#include <sherd/runtime/dtype.h>
#include <sherd/runtime/io/tensor_file.h>
#include <sherd/runtime/shape.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace sherd {

struct ConvertedTensor {
  struct Part {
    const TensorEntry* entry = nullptr;  // of the source
    std::int64_t first = 0, numel = 0;
  };
  std::string parameter;
  std::string state;  // of the optimizer: "exp_avg"; empty: the parameter itself
  DType dtype = DType::f32;
  Shape shape;
  std::vector<Part> parts;

  std::string key() const;  // its name in a file, see kOptimizerPrefix
  std::uint64_t bytes() const;
};

enum class WeightNaming { as_is, timm, transformers };

struct ConvertedWeights {
  std::vector<ConvertedTensor> tensors;  // weights in the source's order, each before its states
  std::vector<std::string> notes;        // what was renamed, joined, cut or left out
  bool renamed = false;
};

// `dtype`: what floating weights become; none: what they are. States keep their types. Throws where
// a tensor has a type that cannot be written or names do not go together.
SHERD_API ConvertedWeights plan_conversion(const TensorFile& source, WeightNaming naming,
                                           std::optional<DType> dtype, bool with_states);

// The names of the optimizer's states that a source has; empty where it has none.
SHERD_API std::vector<std::string> state_names(const TensorFile& source);

// Elements of a tensor from `first` on, in its new type, in order and in blocks of a few MiB.
SHERD_API void read_converted(const TensorFile& source, const ConvertedTensor& tensor,
                              std::int64_t first, std::int64_t numel,
                              const std::function<void(std::span<const std::uint8_t>)>& use);

}  // namespace sherd
