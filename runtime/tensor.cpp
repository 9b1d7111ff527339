// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/cuda/device.h>
#include <sherd/runtime/tensor.h>

#include <algorithm>
#include <cstring>

namespace sherd {
namespace {

std::size_t byte_count(const Shape& shape, DType dtype) {
  std::size_t bytes = 0;
  const bool overflows =
      __builtin_mul_overflow(static_cast<std::size_t>(shape.numel()), size_of(dtype), &bytes);
  SHERD_CHECK(!overflows, "a tensor of {} {} has more bytes than 64 bits can count", name_of(dtype),
              shape.to_string());
  return bytes;
}

}  // namespace

Tensor::Tensor(std::shared_ptr<Storage> storage, const Shape& shape, const Strides& strides,
               std::int64_t offset, DType dtype)
    : storage_(std::move(storage)),
      shape_(shape),
      strides_(strides),
      offset_(offset),
      dtype_(dtype) {}

Tensor Tensor::empty(Context& context, const Shape& shape, DType dtype, MemoryCategory category,
                     MemoryPool pool) {
  return {Storage::allocate(context, byte_count(shape, dtype), category, pool), shape,
          contiguous_strides(shape), 0, dtype};
}

Tensor Tensor::released(Context& context, const Shape& shape, DType dtype, MemoryCategory category,
                        MemoryPool pool) {
  return {Storage::make_released(context, byte_count(shape, dtype), category, pool), shape,
          contiguous_strides(shape), 0, dtype};
}

Tensor Tensor::zeros(Context& context, const Shape& shape, DType dtype, MemoryCategory category,
                     MemoryPool pool) {
  Tensor tensor = empty(context, shape, dtype, category, pool);
  const std::size_t bytes = tensor.storage_->bytes();
  if (tensor.device() == Device::cuda) {
    cuda::fill_zero(context.compute_stream(), tensor.raw_data(), bytes);
  } else if (!context.is_meta() && bytes > 0) {
    std::memset(tensor.raw_data(), 0, bytes);
  }
  return tensor;
}

Tensor Tensor::from_blob(Context& context, void* data, const Shape& shape, DType dtype,
                         std::function<void()> deleter) {
  return {Storage::from_blob(context, data, byte_count(shape, dtype), std::move(deleter)), shape,
          contiguous_strides(shape), 0, dtype};
}

Storage& Tensor::storage() const {
  SHERD_CHECK(storage_ != nullptr, "use of an undefined tensor");
  return *storage_;
}

std::int64_t Tensor::stride(int index) const {
  return strides_[static_cast<std::size_t>(shape_.normalized(index))];
}

bool Tensor::is_contiguous() const {
  if (numel() == 0) return true;
  std::int64_t expected = 1;
  for (int i = rank() - 1; i >= 0; --i) {
    if (dim(i) == 1) continue;
    if (stride(i) != expected) return false;
    expected *= dim(i);
  }
  return true;
}

bool Tensor::is_sole_owner() const {
  return defined() && storage_.use_count() == 1 && !storage_->is_external() && is_contiguous();
}

void* Tensor::raw_data() const {
  auto* bytes = static_cast<std::byte*>(storage().data());
  return bytes + static_cast<std::size_t>(offset_) * size_of(dtype_);
}

void* Tensor::raw_address() const {
  auto* bytes = static_cast<std::byte*>(storage().address());
  return bytes + static_cast<std::size_t>(offset_) * size_of(dtype_);
}

Tensor Tensor::over(std::shared_ptr<Storage> other) const {
  SHERD_CHECK(other->bytes() == storage().bytes(), "over: expected {} bytes, got {}",
              storage().bytes(), other->bytes());
  return {std::move(other), shape_, strides_, offset_, dtype_};
}

Tensor Tensor::reshape(const Shape& shape) const {
  SHERD_CHECK(is_contiguous(), "reshape: {} is not contiguous", describe());
  SHERD_CHECK(shape.numel() == numel(), "reshape: {} to {} changes the number of elements",
              describe(), shape.to_string());
  return {storage_, shape, contiguous_strides(shape), offset_, dtype_};
}

Tensor Tensor::permute(std::span<const int> order) const {
  SHERD_CHECK(static_cast<int>(order.size()) == rank(), "permute: {} dimensions given for {}",
              order.size(), describe());
  std::array<std::int64_t, Shape::kMaxRank> dims{};
  Strides strides{};
  unsigned seen = 0;
  std::size_t to = 0;
  for (const int from : order) {
    SHERD_CHECK(from >= 0 && from < rank() && !(seen & (1u << from)),
                "permute: the order is not a permutation of {} dimensions", rank());
    seen |= 1u << from;
    dims[to] = dim(from);
    strides[to++] = stride(from);
  }
  return {storage_, Shape(std::span<const std::int64_t>(dims.data(), to)), strides, offset_,
          dtype_};
}

Tensor Tensor::slice(int dim, std::int64_t begin, std::int64_t end) const {
  const int at = shape_.normalized(dim);
  SHERD_CHECK(begin >= 0 && begin <= end && end <= this->dim(at),
              "slice: [{}, {}) of dimension {} of {}", begin, end, dim, describe());
  std::array<std::int64_t, Shape::kMaxRank> dims{};
  std::ranges::copy(shape_.dims(), dims.begin());
  dims[static_cast<std::size_t>(at)] = end - begin;
  const Shape shape(std::span<const std::int64_t>(dims.data(), static_cast<std::size_t>(rank())));
  return {storage_, shape, strides_, offset_ + begin * stride(at), dtype_};
}

Tensor Tensor::select(int dim, std::int64_t index) const {
  const int at = shape_.normalized(dim);
  SHERD_CHECK(index >= 0 && index < this->dim(at), "select: index {} of dimension {} of {}", index,
              dim, describe());
  std::array<std::int64_t, Shape::kMaxRank> dims{};
  Strides strides{};
  std::size_t to = 0;
  for (int i = 0; i < rank(); ++i) {
    if (i == at) continue;
    dims[to] = this->dim(i);
    strides[to++] = stride(i);
  }
  return {storage_, Shape(std::span<const std::int64_t>(dims.data(), to)), strides,
          offset_ + index * stride(at), dtype_};
}

Tensor Tensor::expand(const Shape& shape) const {
  SHERD_CHECK(shape.rank() == rank(), "expand: {} to {} changes the rank", describe(),
              shape.to_string());
  Strides strides = strides_;
  for (int i = 0; i < rank(); ++i) {
    SHERD_CHECK(dim(i) == shape.dim(i) || dim(i) == 1, "expand: dimension {} of {} to {}", i,
                describe(), shape.to_string());
    if (dim(i) != shape.dim(i)) strides[static_cast<std::size_t>(i)] = 0;
  }
  return {storage_, shape, strides, offset_, dtype_};
}

void Tensor::copy_from_host(const void* values, std::size_t bytes) const {
  SHERD_CHECK(is_contiguous(), "copy_from_host: {} is not contiguous", describe());
  const std::size_t expected = static_cast<std::size_t>(numel()) * size_of(dtype_);
  SHERD_CHECK(bytes == expected, "copy_from_host: {} needs {} bytes, got {}", describe(), expected,
              bytes);
  storage().mark_modified();
  if (context().is_meta() || bytes == 0) return;
  if (device() == Device::cuda) {
    cuda::copy(context().compute_stream(), raw_data(), values, bytes);
    // Some memory is read later, when the caller may have other values there.
    if (cuda::reads_later(context().device_index(), values)) {
      context().compute_stream().synchronize();
    }
  } else {
    std::memcpy(raw_data(), values, bytes);
  }
}

void Tensor::copy_to_host(void* values, std::size_t bytes) const {
  SHERD_CHECK(is_contiguous(), "copy_to_host: {} is not contiguous", describe());
  const std::size_t expected = static_cast<std::size_t>(numel()) * size_of(dtype_);
  SHERD_CHECK(bytes == expected, "copy_to_host: {} holds {} bytes, got room for {}", describe(),
              expected, bytes);
  if (bytes == 0) return;
  if (device() == Device::cuda) {
    // The copy itself would wait in the driver, where nobody sees that other ranks have failed.
    context().compute_stream().synchronize();
    cuda::copy(context().compute_stream(), values, raw_data(), bytes);
    context().compute_stream().synchronize();
  } else {
    std::memcpy(values, raw_data(), bytes);
  }
}

double Tensor::item() const {
  SHERD_CHECK(numel() == 1, "item: {} does not hold exactly one element", describe());
  std::array<std::byte, sizeof(double)> bytes{};
  copy_to_host(bytes.data(), size_of(dtype_));
  const auto as = [&]<typename T>(T value) {
    std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  };
  switch (dtype_) {
    case DType::f64: return as(double{});
    case DType::f32: return as(float{});
    case DType::f16: return static_cast<float>(as(f16{}));
    case DType::bf16: return static_cast<float>(as(bf16{}));
    default: fail("item: {} is not floating", describe());
  }
}

std::string Tensor::describe() const {
  if (!defined()) return "undefined tensor";
  return fmt::format("{} {}", name_of(dtype_), shape_.to_string());
}

}  // namespace sherd
