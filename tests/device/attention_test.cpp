// SPDX-License-Identifier: Apache-2.0
#include "attention_support.h"

using namespace sherd;
using test::AttentionProblem;
using test::AttentionShape;
using test::check_attention;

namespace {

AttentionShape shape_of(std::int64_t batch, std::int64_t heads, std::int64_t queries,
                        std::int64_t keys, std::int64_t head_dim) {
  return {batch, heads, queries, keys, head_dim, 1.0 / std::sqrt(static_cast<double>(head_dim))};
}

}  // namespace

TEST_CASE_TEMPLATE("device attention: every head dimension of the tensor-core kernels", T, bf16,
                   f16) {
  for (const std::int64_t head_dim : {32, 64, 80, 96, 128})
    check_attention<T>(AttentionProblem<T>(shape_of(2, 2, 65, 65, head_dim), 8, 16));
}

TEST_CASE("device attention: every length, and the rest of a tile") {
  for (const std::int64_t tokens : {1, 15, 16, 17, 63, 64, 129, 197})
    check_attention<bf16>(AttentionProblem<bf16>(shape_of(1, 1, tokens, tokens, 64)));
  check_attention<f16>(AttentionProblem<f16>(shape_of(1, 1, 257, 257, 32)));
}

TEST_CASE("device attention: queries and keys differ in number") {
  check_attention<bf16>(AttentionProblem<bf16>(shape_of(2, 3, 1, 197, 32)));
  check_attention<bf16>(AttentionProblem<bf16>(shape_of(1, 1, 150, 5, 64)));
  check_attention<f16>(AttentionProblem<f16>(shape_of(1, 2, 33, 70, 96)));
  check_attention<float>(AttentionProblem<float>(shape_of(2, 2, 3, 41, 24)));
}
