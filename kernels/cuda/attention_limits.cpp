// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cuda/attention_general.h>
#include <sherd/runtime/error.h>

#include <limits>

namespace sherd::cuda::attention {

unsigned grid_blocks(const AttentionShape& shape, std::int64_t blocks) {
  const std::int64_t count = shape.batch * shape.heads * blocks;
  // Kernels count rows, and rows of a tile beyond the last one, as int.
  constexpr std::int64_t kMost = std::numeric_limits<int>::max() - 1024;
  SHERD_CHECK(count <= kMost && shape.queries <= kMost && shape.keys <= kMost,
              "attention on CUDA: {} samples of {} heads with {} queries and {} keys are too many "
              "for one call; split the batch",
              shape.batch, shape.heads, shape.queries, shape.keys);
  return static_cast<unsigned>(count);
}

void fail_head_dim(std::int64_t head_dim) {
  fail("attention on CUDA: head dimensions up to 256 are supported, got {}; use more heads",
       head_dim);
}

}  // namespace sherd::cuda::attention
