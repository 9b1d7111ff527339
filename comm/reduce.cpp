// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/reduce.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

namespace sherd {
namespace {

// What the values of a type are combined in.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, f16> || std::is_same_v<T, bf16>, float, T>;

constexpr std::int64_t kBlock = 1024;  // elements reduced at once: they stay in the first cache

template <typename T>
struct Reduction {
  std::span<const void* const> sources;
  ReduceOp op;
  std::int64_t begin, count;  // of the block

  // The combined values of ranks [first, last) into out.
  void combine(std::size_t first, std::size_t last, Wide<T>* out) const {
    if (last - first == 1) {
      const T* from = static_cast<const T*>(sources[first]) + begin;
      for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<Wide<T>>(from[i]);
      return;
    }
    const std::size_t left = std::bit_floor(last - first - 1);
    Wide<T> right[kBlock];
    combine(first, first + left, out);
    combine(first + left, last, right);
    if (op == ReduceOp::max) {
      for (std::int64_t i = 0; i < count; ++i) {
        const bool take = right[i] > out[i] || right[i] != right[i];  // a NaN stays
        out[i] = take ? right[i] : out[i];
      }
    } else {
      for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<Wide<T>>(out[i] + right[i]);
    }
  }
};

template <typename T, typename Result>
void reduce_to(std::span<const void* const> sources, Result* output, std::int64_t total,
               ReduceOp op) {
  Wide<T> block[kBlock];
  for (std::int64_t begin = 0; begin < total; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, total - begin);
    Reduction<T>{sources, op, begin, count}.combine(0, sources.size(), block);
    if constexpr (std::is_floating_point_v<Wide<T>>) {
      if (op == ReduceOp::average) {
        const auto factor = Wide<T>(1) / static_cast<Wide<T>>(sources.size());
        for (std::int64_t i = 0; i < count; ++i) block[i] *= factor;
      }
    }
    for (std::int64_t i = 0; i < count; ++i) output[begin + i] = static_cast<Result>(block[i]);
  }
}

template <typename T>
void reduce(std::span<const void* const> sources, void* output, std::int64_t total, DType result,
            ReduceOp op) {
  if (result == dtype_of<T>::value)
    return reduce_to<T>(sources, static_cast<T*>(output), total, op);
  reduce_to<T>(sources, static_cast<Wide<T>*>(output), total, op);
}

}  // namespace

void reduce_in_tree(std::span<const void* const> sources, void* output, std::int64_t count,
                    DType dtype, DType result, ReduceOp op) {
  SHERD_CHECK(op != ReduceOp::average || is_floating(dtype), "an average of {} is not defined",
              name_of(dtype));
  SHERD_CHECK(result == dtype || (result == DType::f32 && size_of(dtype) == 2),
              "a reduction of {} to {} is not defined", name_of(dtype), name_of(result));
  switch (dtype) {
    case DType::f64: return reduce<double>(sources, output, count, result, op);
    case DType::f32: return reduce<float>(sources, output, count, result, op);
    case DType::f16: return reduce<f16>(sources, output, count, result, op);
    case DType::bf16: return reduce<bf16>(sources, output, count, result, op);
    case DType::i64: return reduce<std::int64_t>(sources, output, count, result, op);
    case DType::i32: return reduce<std::int32_t>(sources, output, count, result, op);
    case DType::u8: return reduce<std::uint8_t>(sources, output, count, result, op);
  }
}

}  // namespace sherd
