// SPDX-License-Identifier: Apache-2.0
// SavedTensor: a tensor kept for backward. Inside a recomputed module (recompute.h) it is not kept
// but made again when backward asks for it.
#pragma once

#include <sherd/runtime/tensor.h>

#include <memory>

namespace sherd {

class Recomputation;

class SHERD_API SavedTensor {
 public:
  SavedTensor() = default;
  SavedTensor(const Tensor& tensor);
  // Throws if the tensor was written in place in between.
  const Tensor& get() const;
  bool defined() const { return value_ != nullptr; }

 private:
  friend class Recomputation;
  struct Value {
    Tensor tensor;  // undefined while `source` has to make it again
    std::uint64_t version = 0;
    std::shared_ptr<Recomputation> source;
  };
  std::shared_ptr<Value> value_;  // shared by copies, and weakly by the recomputation that fills it
};

}  // namespace sherd
