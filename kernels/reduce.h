// SPDX-License-Identifier: Apache-2.0
// Reductions. Order is fixed by the sizes alone, never by the thread count.
#pragma once

#include <sherd/runtime/exact_sum.h>
#include <sherd/runtime/tensor.h>

namespace sherd {

// One-element tensor of fp32 (fp64 for fp64): factor * sum of all elements.
SHERD_API Tensor sum(const Tensor& x, double factor = 1.0);

// Adds the squares of all elements to `total` exactly, so that a norm does not depend on how its
// elements are split over tensors, shards or ranks. On meta nothing is added.
SHERD_API void add_sum_of_squares(const Tensor& x, ExactSum& total);

// The same of many tensors of a context: on a GPU their squares add up there, and are read once.
class SHERD_API SquareSum {
 public:
  explicit SquareSum(Context& context);
  void add(const Tensor& x);
  ExactSum read() const;  // waits for the device

 private:
  ExactSum total_;
  Tensor words_;  // of what is added on a GPU
};

// Index of the first element that is not finite, or -1. On meta -1.
SHERD_API std::int64_t first_non_finite(const Tensor& x);

}  // namespace sherd
