// SPDX-License-Identifier: Apache-2.0
// Shape: up to six dimensions, held in place. Row-major everywhere: the last one varies fastest.
#pragma once

#include <sherd/runtime/api.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

namespace sherd {

class SHERD_API Shape {
 public:
  static constexpr int kMaxRank = 6;

  Shape() = default;  // a scalar: rank 0, one element
  Shape(std::initializer_list<std::int64_t> dims);
  explicit Shape(std::span<const std::int64_t> dims);

  int rank() const { return rank_; }
  // Negative indices count from the end: dim(-1) is the last one.
  std::int64_t dim(int index) const;
  int normalized(int index) const;  // from 0 on; throws if there is no such dimension
  std::int64_t operator[](int index) const { return dim(index); }
  std::int64_t numel() const;  // throws if the product overflows
  std::span<const std::int64_t> dims() const { return {dims_.data(), static_cast<size_t>(rank_)}; }

  std::string to_string() const;  // "[2, 197, 768]"

  bool operator==(const Shape& other) const;

 private:
  std::array<std::int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

// Strides in elements of a row-major, gapless tensor of this shape.
SHERD_API std::array<std::int64_t, Shape::kMaxRank> contiguous_strides(const Shape& shape);

}  // namespace sherd
