// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/shape.h>

#include <algorithm>

namespace sherd {

Shape::Shape(std::initializer_list<std::int64_t> dims)
    : Shape(std::span<const std::int64_t>(dims.begin(), dims.size())) {}

Shape::Shape(std::span<const std::int64_t> dims) {
  SHERD_CHECK(dims.size() <= kMaxRank, "a shape has at most {} dimensions, got {}", kMaxRank,
              dims.size());
  for (const std::int64_t dim : dims) {
    SHERD_CHECK(dim >= 0, "a dimension is never negative, got {}", dim);
    dims_[static_cast<size_t>(rank_++)] = dim;
  }
}

int Shape::normalized(int index) const {
  const int at = index < 0 ? index + rank_ : index;
  SHERD_CHECK(at >= 0 && at < rank_, "dimension {} of a shape of rank {}", index, rank_);
  return at;
}

std::int64_t Shape::dim(int index) const {
  return dims_[static_cast<size_t>(normalized(index))];
}

std::int64_t Shape::numel() const {
  if (std::ranges::find(dims(), 0) != dims().end()) return 0;
  std::int64_t product = 1;
  for (const std::int64_t dim : dims()) {
    SHERD_CHECK(!__builtin_mul_overflow(product, dim, &product),
                "the number of elements of shape {} overflows 64 bits", to_string());
  }
  return product;
}

std::string Shape::to_string() const {
  std::string text = "[";
  for (const std::int64_t dim : dims()) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(dim);
  }
  return text + "]";
}

bool Shape::operator==(const Shape& other) const {
  return std::ranges::equal(dims(), other.dims());
}

std::array<std::int64_t, Shape::kMaxRank> contiguous_strides(const Shape& shape) {
  std::array<std::int64_t, Shape::kMaxRank> strides{};
  std::int64_t step = 1;
  if (shape.numel() == 0) return strides;  // nothing is ever addressed, and products might overflow
  for (int i = shape.rank() - 1; i >= 0; --i) {
    strides[static_cast<size_t>(i)] = step;
    step *= shape.dim(i);
  }
  return strides;
}

}  // namespace sherd
