// SPDX-License-Identifier: Apache-2.0
// Shared by the dispatch files kernels/*.cpp: from a DType to a template argument, and common
// checks.
#pragma once

#include <sherd/runtime/schedule.h>
#include <sherd/runtime/tensor.h>

#include <type_traits>

// Calls a kernel where tensor `x` lies: cuda::function(stream, ...) or cpu::function(threads, ...).
#define SHERD_RUN_KERNEL(x, function, ...)                                                    \
  ((x).device() == Device::cuda ? cuda::function((x).context().compute_stream(), __VA_ARGS__) \
                                : cpu::function((x).context().threads(), __VA_ARGS__))

namespace sherd {

// Calls body with a value of the element type: dispatch_floating(x.dtype(), [&](auto zero) { ...
// }).
template <typename Body>
void dispatch_floating(DType dtype, const char* operation, const Body& body) {
  switch (dtype) {
    case DType::f64: return body(double{});
    case DType::f32: return body(float{});
    case DType::f16: return body(f16{});
    case DType::bf16: return body(bf16{});
    default: fail("{}: needs a floating type, got {}", operation, name_of(dtype));
  }
}

// Whether cuda's kernels compute on this tensor, or would where meta stands for cuda. On what lies
// in the host's pool the processor does.
inline bool computes_on_cuda(const Tensor& x) {
  return x.context().target() == Device::cuda && x.storage().pool() == MemoryPool::device;
}

// The type a kernel over `dtype` computes in: fp64 for fp64, else fp32.
inline DType compute_dtype(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}

// Whether x lies in the host's memory beside a GPU (on meta: would).
inline bool is_beside_gpu(const Tensor& x) {
  return x.context().target() == Device::cuda && x.storage().pool() == MemoryPool::host;
}

inline std::int64_t bytes_of(const Tensor& x) {
  return x.defined() ? x.numel() * static_cast<std::int64_t>(size_of(x.dtype())) : 0;
}

// Tells a schedule that is being recorded of a kernel that reads or writes each of these once,
// where `x` lies.
template <typename... Tensors>
void record_kernel(std::string_view name, const Tensor& x, const Tensors&... others) {
  Schedule* const schedule = x.context().schedule();
  if (schedule == nullptr) return;
  schedule->add({.kind = is_beside_gpu(x) ? Work::Kind::host : Work::Kind::kernel,
                 .name = name,
                 .dtype = x.dtype(),
                 .bytes = (bytes_of(x) + ... + bytes_of(others))});
}

// A scratch tensor of this many bytes, counted as workspace; undefined for 0 bytes.
inline Tensor workspace(Context& context, std::size_t bytes) {
  if (bytes == 0) return {};
  return Tensor::empty(context, {static_cast<std::int64_t>(bytes)}, DType::u8,
                       MemoryCategory::workspace);
}
inline void* workspace_data(const Tensor& scratch) {
  return scratch.defined() ? scratch.raw_data() : nullptr;
}

// Per-row statistics that forward kept for backward, in the compute type of `dtype`.
inline void check_statistic(const char* operation, const Tensor& statistic, const Shape& shape,
                            DType dtype) {
  SHERD_CHECK(statistic.shape() == shape && statistic.dtype() == compute_dtype(dtype) &&
                  statistic.is_contiguous(),
              "{}: expected statistics {} {}, got {}", operation, name_of(compute_dtype(dtype)),
              shape.to_string(), statistic.describe());
}

inline void check_same(const char* operation, const Tensor& a, const Tensor& b) {
  SHERD_CHECK(a.shape() == b.shape() && a.dtype() == b.dtype(),
              "{}: both must have the same shape and type, got {} and {}", operation, a.describe(),
              b.describe());
}

}  // namespace sherd
