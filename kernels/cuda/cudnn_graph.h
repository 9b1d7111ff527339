// SPDX-License-Identifier: Apache-2.0
// Graphs of operations for cuDNN's backend API, as far as attention needs them: descriptors that
// free themselves, and plans that run a graph. A call that fails is an Error that names the
// descriptor, the attribute and what cuDNN says of it. For sources built with cuDNN alone.
#pragma once

#include <cudnn.h>
#include <sherd/runtime/dtype.h>
#include <sherd/runtime/error.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace sherd::cuda::cudnn {

std::string version();  // of the library that is loaded, "9.19.0"

[[noreturn]] void fail_call(cudnnStatus_t status, const std::string& call);

// With one Context: its GPU and its compute stream. Made on first use.
class Handle {
 public:
  Handle() = default;
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  // `stream` is CUDA's, whose device is the calling thread's.
  cudnnHandle_t get(void* stream);

 private:
  cudnnHandle_t handle_ = nullptr;
};

struct Attribute {
  cudnnBackendAttributeName_t name;
  const char* text;
};
#define SHERD_CUDNN_ATTRIBUTE(name) \
  ::sherd::cuda::cudnn::Attribute { \
    CUDNN_ATTR_##name, #name        \
  }

class Descriptor {
 public:
  Descriptor(cudnnBackendDescriptorType_t type, std::string text);
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&&) = delete;

  cudnnBackendDescriptor_t get() const { return descriptor_; }
  void set(Attribute attribute, cudnnBackendAttributeType_t type, std::size_t count,
           const void* values);
  template <typename T>
  void set(Attribute attribute, cudnnBackendAttributeType_t type, const T& value) {
    set(attribute, type, 1, &value);
  }
  void set(Attribute attribute, const Descriptor& value) {
    set(attribute, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value.descriptor_);
  }
  void finalize();
  cudnnStatus_t try_finalize() { return cudnnBackendFinalize(descriptor_); }
  std::int64_t integer(Attribute attribute) const;
  // Reads at most `room` values; returns how many there are where room is 0, else how many it read.
  std::size_t read(Attribute attribute, cudnnBackendAttributeType_t type, std::size_t room,
                   void* values) const;

 private:
  cudnnBackendDescriptor_t descriptor_ = nullptr;
  std::string text_;
};

using Extents = std::array<std::int64_t, 4>;

// Where a tensor of the graph lies: its number and, at execution, its address.
struct Binding {
  std::int64_t id;
  const void* address;
};

class Plan {
 public:
  std::size_t workspace_bytes() const { return workspace_bytes_; }
  void execute(cudnnHandle_t handle, std::span<const Binding> bindings, void* workspace) const;

 private:
  friend class Graph;
  explicit Plan(std::vector<Descriptor> kept);

  std::vector<Descriptor> kept_;  // the plan is the last one, after what it was made of
  std::size_t workspace_bytes_ = 0;
};

// Tensors are known by numbers, those with memory by the caller's, from 1 and below kFirstVirtual.
class Graph {
 public:
  static constexpr std::int64_t kFirstVirtual = 1000;

  // Dimensions [batch, heads, rows, columns], strides in elements.
  std::int64_t tensor(std::int64_t id, DType dtype, const Extents& sizes, const Extents& strides);
  std::int64_t scalar(std::int64_t id);  // fp32; its address is the host's
  // What exists between two operations alone.
  std::int64_t between(DType dtype, const Extents& sizes);
  std::int64_t between(DType dtype, const Extents& sizes, const Extents& strides);

  void matmul(std::int64_t a, std::int64_t b, std::int64_t out);
  void pointwise(cudnnPointwiseMode_t mode, std::int64_t x, std::int64_t b, std::int64_t out);
  void pointwise(cudnnPointwiseMode_t mode, std::int64_t x, std::int64_t out);
  void reduce(cudnnReduceTensorOp_t op, std::int64_t x, std::int64_t out);
  void reshape(std::int64_t x, std::int64_t out);
  void attention_forward(std::int64_t q, std::int64_t k, std::int64_t v, std::int64_t scale,
                         std::int64_t out, std::int64_t lse);

  // The first plan that can be made of those that cuDNN proposes; an Error where there is none.
  // Once.
  Plan plan(cudnnHandle_t handle);

 private:
  std::int64_t add_tensor(std::int64_t id, DType dtype, const Extents& sizes,
                          const Extents& strides, bool is_virtual, bool by_value);
  const Descriptor& at(std::int64_t id) const { return descriptors_[tensors_.at(id)]; }
  Descriptor& keep(Descriptor descriptor);
  void add_operation(Descriptor operation);

  std::vector<Descriptor> descriptors_;
  std::map<std::int64_t, std::size_t> tensors_;
  std::vector<cudnnBackendDescriptor_t> operations_;
  std::int64_t next_virtual_ = kFirstVirtual;
};

}  // namespace sherd::cuda::cudnn
