// SPDX-License-Identifier: Apache-2.0
// Elementwise operations on tensors of any floating type. Inputs may be strided views (they are
// then copied first); outputs are new contiguous tensors unless a function says otherwise.
//
// On a GPU new tensors lie in its memory and are computed there; inputs in the host's memory
// (MemoryPool::host) are brought there first. What works in place computes where its tensor lies.
// The host waits for neither (see Storage::data).
#pragma once

#include <sherd/runtime/tensor.h>

namespace sherd {

SHERD_API Tensor full(Context& context, const Shape& shape, DType dtype, double value,
                      MemoryCategory category = MemoryCategory::activations);
SHERD_API void fill(const Tensor& out, double value);            // in place
SHERD_API Tensor add(const Tensor& a, const Tensor& b);          // same shape and type
SHERD_API void add_inplace(const Tensor& sum, const Tensor& x);  // sum += x; contiguous, same type
SHERD_API Tensor scale(const Tensor& x, double factor);
SHERD_API Tensor cast(const Tensor& x, DType dtype,
                      MemoryCategory category = MemoryCategory::activations);
// The tensor itself if it is contiguous and lies where its context computes, else a copy of which
// both are true.
SHERD_API Tensor contiguous(const Tensor& x);
// out := x, in place; out is contiguous, x may be strided. Floating types may differ: each element
// is then rounded once. Either may lie on a GPU and the other in the host's memory beside it.
SHERD_API void copy(const Tensor& out, const Tensor& x);
// A contiguous copy with bytes of its own.
SHERD_API Tensor clone(const Tensor& x, MemoryCategory category = MemoryCategory::activations);

// out[r, ...] = x[r, ...] * row_scale[r] over the first dimension. row_scale: fp64 for fp64, else
// fp32.
SHERD_API Tensor scale_rows(const Tensor& x, const Tensor& row_scale);
// out[r, ...] = a[r, ...] + row_scale[r] * b[r, ...]
SHERD_API Tensor add_scaled_rows(const Tensor& a, const Tensor& b, const Tensor& row_scale);

}  // namespace sherd
