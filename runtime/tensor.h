// SPDX-License-Identifier: Apache-2.0
// Tensor: a shape, strides and an element type over a piece of a Storage. Copying a Tensor copies
// the handle, not the elements. Views share the storage and its version. It knows nothing of
// gradients; those are in autograd/ (Variable).
#pragma once

#include <sherd/runtime/context.h>
#include <sherd/runtime/dtype.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/shape.h>
#include <sherd/runtime/storage.h>

#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace sherd {

class SHERD_API Tensor {
 public:
  using Strides = std::array<std::int64_t, Shape::kMaxRank>;

  Tensor() = default;  // undefined: holds nothing; defined() is false

  static Tensor empty(Context& context, const Shape& shape, DType dtype,
                      MemoryCategory category = MemoryCategory::activations,
                      MemoryPool pool = MemoryPool::device);
  static Tensor zeros(Context& context, const Shape& shape, DType dtype,
                      MemoryCategory category = MemoryCategory::activations,
                      MemoryPool pool = MemoryPool::device);
  // Without bytes until storage().restore().
  static Tensor released(Context& context, const Shape& shape, DType dtype, MemoryCategory category,
                         MemoryPool pool = MemoryPool::device);
  // Copies host values (fp64/fp32/integers of the same C++ type as dtype).
  template <typename T>
  static Tensor from_host(Context& context, const Shape& shape, std::span<const T> values,
                          MemoryCategory category = MemoryCategory::inputs) {
    Tensor tensor = empty(context, shape, dtype_of<T>::value, category);
    tensor.copy_from_host(values.data(), values.size_bytes());
    return tensor;
  }
  // Over memory owned by the caller; `deleter` runs when the last tensor over it dies.
  static Tensor from_blob(Context& context, void* data, const Shape& shape, DType dtype,
                          std::function<void()> deleter = {});

  bool defined() const { return storage_ != nullptr; }
  const Shape& shape() const { return shape_; }
  int rank() const { return shape_.rank(); }
  std::int64_t dim(int index) const { return shape_.dim(index); }
  std::int64_t numel() const { return shape_.numel(); }
  std::int64_t stride(int index) const;
  const Strides& strides() const { return strides_; }
  DType dtype() const { return dtype_; }
  Context& context() const { return storage().context(); }
  Storage& storage() const;
  Device device() const { return storage().device(); }
  const std::shared_ptr<Storage>& shared_storage() const { return storage_; }
  bool is_contiguous() const;
  // Whether writing in place can be seen by nobody else: contiguous, and the only handle of bytes
  // that Sherd allocated.
  bool is_sole_owner() const;

  // Address of the first element; throws on meta, when released, and when T is not the dtype.
  template <typename T>
  T* data() const {
    SHERD_CHECK(dtype_of<T>::value == dtype_, "tensor of {} read as {}", name_of(dtype_),
                name_of(dtype_of<T>::value));
    return static_cast<T*>(raw_data());
  }
  void* raw_data() const;
  void* raw_address() const;  // see Storage::address()

  // Views. reshape needs a contiguous tensor.
  Tensor reshape(const Shape& shape) const;
  Tensor permute(std::span<const int> order) const;
  Tensor permute(std::initializer_list<int> order) const {
    return permute(std::span<const int>(order.begin(), order.size()));
  }
  Tensor slice(int dim, std::int64_t begin, std::int64_t end) const;
  Tensor select(int dim, std::int64_t index) const;  // slice of one, dimension removed
  Tensor expand(const Shape& shape) const;           // repeats dimensions of size 1; same rank
  // The same view of other bytes, as many.
  Tensor over(std::shared_ptr<Storage> storage) const;

  // Host access, contiguous tensors only; it waits for the device.
  void copy_from_host(const void* values, std::size_t bytes) const;
  void copy_to_host(void* values, std::size_t bytes) const;
  template <typename T>
  std::vector<T> to_vector() const {
    SHERD_CHECK(dtype_of<T>::value == dtype_, "tensor of {} read as {}", name_of(dtype_),
                name_of(dtype_of<T>::value));
    std::vector<T> values(static_cast<std::size_t>(numel()));
    copy_to_host(values.data(), values.size() * sizeof(T));
    return values;
  }
  double item() const;  // the value of a one-element floating tensor

  std::string describe() const;  // "f32 [2, 197, 768]", for messages

 private:
  Tensor(std::shared_ptr<Storage> storage, const Shape& shape, const Strides& strides,
         std::int64_t offset, DType dtype);

  std::shared_ptr<Storage> storage_;
  Shape shape_;
  Strides strides_{};
  std::int64_t offset_ = 0;  // elements
  DType dtype_ = DType::f32;
};

}  // namespace sherd
