// SPDX-License-Identifier: Apache-2.0
// Variable: a tensor together with its place on a tape. Kernels see tensors; differentiable
// operations take and return variables. A variable without a place is a constant: nothing flows
// back to it.
#pragma once

#include <sherd/runtime/tensor.h>

namespace sherd {

class SHERD_API Variable {
 public:
  Variable() = default;
  Variable(Tensor tensor) : tensor_(std::move(tensor)) {}  // a constant; implicit on purpose

  const Tensor& tensor() const { return tensor_; }
  const Shape& shape() const { return tensor_.shape(); }
  std::int64_t dim(int index) const { return tensor_.dim(index); }
  Context& context() const { return tensor_.context(); }
  bool requires_grad() const { return slot_ >= 0; }
  Variable detach() const { return {tensor_}; }

 private:
  friend class Tape;
  Variable(Tensor tensor, std::uint64_t tape_id, int slot)
      : tensor_(std::move(tensor)), tape_id_(tape_id), slot_(slot) {}

  Tensor tensor_;
  std::uint64_t tape_id_ = 0;
  int slot_ = -1;
};

}  // namespace sherd
