// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/attention.h>

#include <limits>

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

TEST_CASE_TEMPLATE("device attention: the plain kernel, every type and range of head dimensions", T,
                   double, float, bf16, f16) {
  for (const std::int64_t head_dim : {1, 20, 64, 65, 100, 200, 256}) {
    // One element between the rows: no address is a multiple of 16 bytes.
    check_attention<T>(AttentionProblem<T>(shape_of(1, 2, 35, 35, head_dim), 1, 1));
  }
  check_attention<T>(AttentionProblem<T>(shape_of(2, 1, 7, 66, 48)));
}

TEST_CASE_TEMPLATE(
    "device attention: one address or stride that is not whole takes the plain kernel", T, bf16,
    f16) {
  check_attention<T>(AttentionProblem<T>(shape_of(1, 2, 20, 20, 64), 0, 1));
  check_attention<T>(AttentionProblem<T>(shape_of(1, 2, 20, 20, 64), 4, 0));
}

TEST_CASE_TEMPLATE("device attention: scores of any size and sign", T, float, bf16, f16) {
  AttentionShape shape = shape_of(1, 2, 70, 150, 64);
  // Scores up to some hundreds: the largest of a row moves from tile to tile.
  check_attention<T>(AttentionProblem<T>(shape, 0, 0, 6.0));
  for (const double scale : {-0.125, 0.0, -1.0}) {
    shape.scale = scale;
    check_attention<T>(AttentionProblem<T>(shape));
  }
  // All scores near -300: keys that do not exist, of score 0, would have an infinite weight.
  shape.scale = -0.5;
  check_attention<T>(AttentionProblem<T>(shape, 0, 0, 0.25, 3.0));
}

TEST_CASE("device attention: every wave of samples and heads has its own place") {
  check_attention<bf16>(AttentionProblem<bf16>(shape_of(3, 5, 17, 17, 32), 8));
  check_attention<float>(AttentionProblem<float>(shape_of(3, 5, 9, 9, 8)));
}

TEST_CASE("device attention: infinite and missing numbers stay what they are") {
  AttentionProblem<bf16> problem(shape_of(1, 1, 20, 20, 32));
  problem.inputs[0] = bf16(std::numeric_limits<float>::quiet_NaN());  // of the first query
  const test::Results results = problem.on_device();
  const std::vector<double>& output = results.at("output");
  for (std::size_t d = 0; d < 32; ++d) {
    CHECK(std::isnan(output[d]));
    CHECK(std::isfinite(output[32 + d]));
  }
}

TEST_CASE("device attention: workspace and limits") {
  const AttentionShape shape = shape_of(2, 3, 50, 70, 64);
  CHECK(cuda::attention_workspace_bytes<bf16>(shape, false) == 0);
  CHECK(cuda::attention_workspace_bytes<bf16>(shape, true) == 2 * 3 * 50 * sizeof(float));
  CHECK(cuda::attention_workspace_bytes<double>(shape, true) == 2 * 3 * 50 * sizeof(double));
  const AttentionProblem<float> wide(shape_of(1, 1, 2, 2, 257));
  CHECK_THROWS_WITH_AS(wide.on_device(), doctest::Contains("up to 256 are supported, got 257"),
                       Error);
  AttentionShape large = shape_of(std::int64_t{1} << 20, 1 << 12, 1, 1, 64);
  CHECK_THROWS_WITH_AS(cuda::attention_forward<bf16>(test::device_context().compute_stream(), large,
                                                     {}, {}, {}, {}, nullptr, nullptr),
                       doctest::Contains("are too many for one call"), Error);
}

namespace {

// Forward and backward on views of one packed tensor: output, lse and the packed gradient.
std::vector<Tensor> packed_attention(const Tensor& qkv, const Tensor& grad_output) {
  const Tensor grad = Tensor::empty(qkv.context(), qkv.shape(), qkv.dtype());
  const AttentionOutput out =
      attention_forward(qkv.select(2, 0), qkv.select(2, 1), qkv.select(2, 2), 0.2);
  attention_backward(grad_output, qkv.select(2, 0), qkv.select(2, 1), qkv.select(2, 2), out, 0.2,
                     grad.select(2, 0), grad.select(2, 1), grad.select(2, 2));
  return {out.output, out.lse, grad};
}

}  // namespace

TEST_CASE("device attention: tensors of the device reach its kernels, and are planned as such") {
  const Shape shape{2, 37, 3, 2, 32}, output_shape{2, 37, 2, 32};
  const auto on = [&](Context& context) {
    const auto make = [&](const Shape& s, const char* name) {
      return Tensor::from_host<float>(
          context, s, test::random_values<float>(static_cast<std::size_t>(s.numel()), name));
    };
    return packed_attention(make(shape, "qkv"), make(output_shape, "grad"));
  };
  Context cpu, cuda({.device = Device::cuda});
  Context meta({.device = Device::meta, .meta_of = Device::cuda});
  const std::vector<Tensor> expected = on(cpu), got = on(cuda);
  for (std::size_t i = 0; i < got.size(); ++i) {
    CHECK(test::error_of(test::as_doubles(got[i].to_vector<float>()),
                         test::as_doubles(expected[i].to_vector<float>())) < 1e-6);
  }
  packed_attention(Tensor::empty(meta, shape, DType::f32),
                   Tensor::empty(meta, output_shape, DType::f32));
  const auto workspace_peak = [](Context& context) {
    return context.ledger().peaks()[static_cast<std::size_t>(MemoryCategory::workspace)];
  };
  CHECK(workspace_peak(cuda) > 0);
  CHECK(workspace_peak(meta) == workspace_peak(cuda));
}

TEST_CASE("device attention: a gradient in the memory of an input is refused") {
  Context& context = test::device_context();
  const Tensor q = Tensor::zeros(context, {1, 4, 1, 32}, DType::f32);
  const Tensor grad = Tensor::zeros(context, {1, 4, 1, 32}, DType::f32);
  const AttentionOutput out = attention_forward(q, q, q, 1.0);
  CHECK_THROWS_WITH_AS(attention_backward(grad, q, q, q, out, 1.0, q, grad, grad),
                       doctest::Contains("lies in the memory of an input"), Error);
}
