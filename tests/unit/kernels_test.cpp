// SPDX-License-Identifier: Apache-2.0
// The dispatch layer: products against a plain reference in every type and orientation, shapes that
// do not fit, empty tensors, and the bound of the product cache.
#include <doctest/doctest.h>
#include <sherd/kernels/attention.h>
#include <sherd/kernels/cpu/layer_norm.h>
#include <sherd/kernels/cpu/product.h>
#include <sherd/kernels/cross_entropy.h>
#include <sherd/kernels/cuda/column_sum.h>
#include <sherd/kernels/cuda/layer_norm.h>
#include <sherd/kernels/cuda/reduce.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/layer_norm.h>
#include <sherd/kernels/matmul.h>
#include <sherd/kernels/optimizer.h>
#include <sherd/kernels/patch_embed.h>
#include <sherd/kernels/random.h>
#include <sherd/kernels/reduce.h>
#include <sherd/kernels/tokens.h>

#include <cmath>

using namespace sherd;

namespace {

Tensor random_matrix(Context& context, std::int64_t rows, std::int64_t cols,
                     const std::string& name) {
  const Tensor x = Tensor::empty(context, {rows, cols}, DType::f64);
  fill_normal(x, 0.0, 1.0, RandomStream(11, "test", name));
  return x;
}

// op(a) op(b) with plain loops in fp64.
std::vector<double> reference(const Tensor& a, const Tensor& b, bool ta, bool tb) {
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  const std::int64_t m = a.dim(ta ? 1 : 0), k = a.dim(ta ? 0 : 1), n = b.dim(tb ? 0 : 1);
  std::vector<double> out(static_cast<std::size_t>(m * n));
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = 0.0;
      for (std::int64_t p = 0; p < k; ++p) {
        sum += x[static_cast<std::size_t>(ta ? p * m + i : i * k + p)] *
               y[static_cast<std::size_t>(tb ? j * k + p : p * n + j)];
      }
      out[static_cast<std::size_t>(i * n + j)] = sum;
    }
  }
  return out;
}

double worst(const Tensor& result, const std::vector<double>& expected) {
  const auto values = cast(result, DType::f64).to_vector<double>();
  REQUIRE(values.size() == expected.size());
  double error = 0.0;
  for (std::size_t i = 0; i < values.size(); ++i)
    error = std::max(error, std::abs(values[i] - expected[i]));
  return error;
}

}  // namespace

TEST_CASE("matmul: every type and orientation against plain loops") {
  Context context({.threads = 2});
  const std::pair<DType, double> types[] = {
      {DType::f64, 1e-12}, {DType::f32, 1e-4}, {DType::bf16, 0.05}, {DType::f16, 0.01}};
  for (const auto& type : types) {
    const DType dtype = type.first;
    const double tolerance = type.second;
    for (const auto& [m, n, k] :
         {std::array<std::int64_t, 3>{1, 1, 1}, {5, 7, 3}, {33, 65, 17}, {128, 10, 64}}) {
      for (const bool ta : {false, true}) {
        for (const bool tb : {false, true}) {
          CAPTURE(name_of(dtype));
          // Inputs that the type holds exactly, so that only the product rounds.
          const Tensor a = cast(random_matrix(context, ta ? k : m, ta ? m : k, "a"), dtype);
          const Tensor b = cast(random_matrix(context, tb ? n : k, tb ? k : n, "b"), dtype);
          const Tensor out = matmul(a, b, ta, tb);
          CHECK(out.dtype() == dtype);
          CHECK(worst(out, reference(cast(a, DType::f64), cast(b, DType::f64), ta, tb)) <
                tolerance * std::sqrt(static_cast<double>(k)));
        }
      }
    }
  }
}

TEST_CASE("matmul: long sums are shared out by rows, with the same bits on every run") {
  for (const int threads : {1, 2, 3, 7}) {
    Context context({.threads = threads});
    for (const std::int64_t k : {1000, 2176, 4099}) {
      const Tensor a = cast(random_matrix(context, k, 33, "a"), DType::f32);
      const Tensor b = cast(random_matrix(context, k, 17, "b"), DType::f32);
      const Tensor out = matmul(a, b, true, false);
      CHECK(worst(out, reference(cast(a, DType::f64), cast(b, DType::f64), true, false)) < 2e-3);
      const auto first = out.to_vector<float>();
      for (int i = 0; i < 10; ++i) CHECK(matmul(a, b, true, false).to_vector<float>() == first);
    }
  }
}

TEST_CASE("linear: bias and activation inside the product equal those after it") {
  Context context({.threads = 2});
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    const Tensor x = cast(random_matrix(context, 19, 24, "x"), dtype);
    const Tensor w = cast(random_matrix(context, 13, 24, "w"), dtype);
    const Tensor bias = cast(random_matrix(context, 1, 13, "bias"), dtype).reshape({13});
    const Tensor plain = linear_forward(x, w, bias);
    const double tolerance = dtype == DType::f64 ? 1e-12 : dtype == DType::f32 ? 1e-5 : 0.13;
    for (const Activation f : {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh}) {
      const Tensor fused = linear_forward(x, w, bias, f);
      CHECK(worst(fused, cast(activation_forward(plain, f), DType::f64).to_vector<double>()) <
            tolerance);
    }
    const Tensor none = linear_forward(x, w, {});
    CHECK(worst(add(none, contiguous(bias.reshape({1, 13}).expand({19, 13}))),
                cast(plain, DType::f64).to_vector<double>()) < tolerance);
  }
}

TEST_CASE(
    "linear: the bias is read by its strides and must be of the weight's type; sums of nothing") {
  Context context;
  const Tensor x = full(context, {2, 3}, DType::f32, 1.0),
               w = full(context, {2, 3}, DType::f32, 1.0);
  const std::vector<float> values{1, 2, 3, 4};
  const Tensor wide = Tensor::from_host<float>(context, {2, 2}, values);
  CHECK(linear_forward(x, w, wide.select(1, 0)).to_vector<float>() ==
        std::vector<float>{4, 6, 4, 6});
  CHECK_THROWS_WITH_AS(linear_forward(x, w, full(context, {2}, DType::f64, 1.0)),
                       doctest::Contains("bias f64 [2] does not fit"), Error);
  const Tensor empty = Tensor::empty(context, {2, 0}, DType::f32);
  CHECK(linear_forward(empty, empty, wide.select(0, 1)).to_vector<float>() ==
        std::vector<float>{3, 4, 3, 4});
}

TEST_CASE("cross_entropy: strided targets are read by their strides") {
  Context context;
  const std::vector<float> logits{5, 0, 0, 5};
  const std::vector<std::int64_t> labels{0, 1, 1, 0};
  const Tensor x = Tensor::from_host<float>(context, {2, 2}, logits);
  const Tensor column =
      Tensor::from_host<std::int64_t>(context, {2, 2}, labels).select(1, 0);  // 0, 1
  const auto loss = cross_entropy_forward(x, {column, {}, 0.0}).row_loss.to_vector<float>();
  CHECK(loss[0] == loss[1]);
  CHECK(count_correct(x, column) == 2);
}

// A machine without a GPU, and a build without CUDA, plan for one.
TEST_CASE("meta in cuda's place counts the scratch memory of cuda's kernels") {
  Context context({.device = Device::meta, .meta_of = Device::cuda});
  const auto scratch = [&](const auto& run) {
    context.ledger().reset_peak();
    run();
    return static_cast<std::size_t>(
        context.ledger().peaks()[static_cast<std::size_t>(MemoryCategory::workspace)]);
  };
  const Tensor x = Tensor::empty(context, {10000, 384}, DType::bf16);
  const Tensor w = Tensor::empty(context, {384}, DType::bf16);
  const Tensor row = Tensor::empty(context, {10000}, DType::f32);
  const std::size_t norm = cuda::layer_norm_backward_workspace_bytes<bf16>(10000, 384);
  CHECK(scratch([&] { layer_norm_backward(x, x, row, row, w, true, true); }) ==
        Allocator::rounded(norm));
  CHECK(norm != cpu::layer_norm_backward_workspace_bytes<bf16>(10000, 384));
  CHECK(scratch([&] { linear_backward_bias(x); }) ==
        Allocator::rounded(cuda::column_sum_workspace_bytes<bf16>(10000, 384)));
  CHECK(scratch([&] { sum(x); }) ==
        Allocator::rounded(cuda::reduce_workspace_bytes<bf16>(x.numel())));
  CHECK(scratch([&] {
          ExactSum squares;
          add_sum_of_squares(x, squares);
        }) == Allocator::rounded(sizeof(ExactSum::Words)));
}

TEST_CASE("meta refuses what the CPU refuses") {
  for (const Device device : {Device::cpu, Device::meta}) {
    Context context({.device = device});
    const auto make = [&](const Shape& shape, DType dtype) {
      return Tensor::empty(context, shape, dtype);
    };
    const Tensor x = make({4, 6}, DType::f32), row = make({4}, DType::f32),
                 wrong = make({4}, DType::f64);
    const Tensor w = make({6}, DType::f32);
    CHECK_THROWS_AS(layer_norm_backward(x, x, wrong, row, w, true, true), Error);
    CHECK_THROWS_AS(layer_norm_backward(x, x, row, row, make({6}, DType::f64), true, true), Error);
    CHECK_THROWS_AS(assemble_tokens(make({1, 2, 3}, DType::f32), {}, make({1, 2, 3}, DType::f64)),
                    Error);
    CHECK_THROWS_AS(assemble_tokens(make({1, 2, 3}, DType::f32), {}, make({2, 3}, DType::f32)),
                    Error);
    const Tensor labels = Tensor::zeros(context, {4}, DType::i64);
    CHECK_THROWS_AS(cross_entropy_backward(make({1}, DType::f32), x, {labels, {}, 0.0}, wrong, 1.0),
                    Error);
    CHECK_THROWS_AS(add_scaled_rows(x, x, wrong), Error);
    const Tensor half = make({4}, DType::bf16);
    CHECK_THROWS_WITH_AS(adamw_update(half, half, half, half, {1e-3, 0.9, 0.99, 1e-8, 0.0, 1, 1.0}),
                         doctest::Contains("fp32 or fp64"), Error);
  }
}

TEST_CASE("in-place updates count as modifications") {
  Context context;
  const auto make = [&] { return full(context, {4}, DType::f32, 1.0); };
  const Tensor p = make(), g = make(), m = make(), v = make();
  const auto versions = [&] {
    return std::array{p.storage().version(), g.storage().version(), m.storage().version(),
                      v.storage().version()};
  };
  const auto before = versions();
  adamw_update(p, g, m, v, {1e-3, 0.9, 0.99, 1e-8, 0.0, 1, 1.0});
  auto after = versions();
  CHECK((after[0] > before[0] && after[1] == before[1] && after[2] > before[2] &&
         after[3] > before[3]));
  sgd_update(p, g, m, {1e-3, 0.9, 0.0, false, 1.0});
  CHECK((versions()[0] > after[0] && versions()[2] > after[2]));
}

TEST_CASE("norm: reading released bytes is an error on any thread count") {
  Context context({.threads = 2});
  const Tensor x = full(context, {1 << 18}, DType::f32, 1.0);
  x.storage().release();
  ExactSum total;
  CHECK_THROWS_AS(add_sum_of_squares(x, total), Error);
}

TEST_CASE("products: the same bits on every run; empty ones") {
  Context context({.threads = 2});
  const Tensor a = cast(random_matrix(context, 300, 200, "a"), DType::f32);
  const Tensor b = cast(random_matrix(context, 200, 100, "b"), DType::f32);
  const auto first = matmul(a, b).to_vector<float>();
  for (int i = 0; i < 20; ++i) CHECK(matmul(a, b).to_vector<float>() == first);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const Tensor x = cast(a, dtype), y = cast(b, dtype);
    const auto small = cast(matmul(x, y), DType::f32).to_vector<float>();
    const auto weight = linear_backward_weight(x, x).to_vector<float>();
    for (int i = 0; i < 10; ++i) {
      CHECK(cast(matmul(x, y), DType::f32).to_vector<float>() == small);
      CHECK(linear_backward_weight(x, x).to_vector<float>() == weight);
    }
  }
  CHECK(matmul(a.slice(0, 0, 0), b).shape() == Shape{0, 100});
  const Tensor zero = matmul(contiguous(a.slice(1, 0, 0)), b.slice(0, 0, 0));
  CHECK(zero.to_vector<float>() == std::vector<float>(300 * 100, 0.0f));
  CHECK(linear_forward(a.slice(0, 0, 0), a, {}).shape() == Shape{0, 300});
}

TEST_CASE("products: what is kept compiled is bounded") {
  Context context({.threads = 1});
  for (std::int64_t n = 1; n <= 300; ++n) {
    matmul(full(context, {1, n}, DType::f32, 1.0), full(context, {n, 1}, DType::f32, 1.0));
  }
  CHECK(cpu::cached_products(context) <= 256);
}

TEST_CASE("dispatch: tensors that do not fit are named") {
  Context context;
  const Tensor x = full(context, {4, 6}, DType::f32, 1.0), w = full(context, {6}, DType::f32, 1.0);
  CHECK_THROWS_WITH_AS(layer_norm_forward(x, full(context, {5}, DType::f32, 1.0), w, 1e-6),
                       doctest::Contains("weight f32 [5]"), Error);
  CHECK_THROWS_WITH_AS(layer_norm_forward(x, cast(w, DType::f64), cast(w, DType::f64), 1e-6),
                       doctest::Contains("must have one type"), Error);
  CHECK_THROWS_WITH_AS(matmul(x, cast(x, DType::f64), false, true),
                       doctest::Contains("different types"), Error);
  CHECK_THROWS_WITH_AS(attention_forward(x, x, x, 1.0), doctest::Contains("[B, N, H, D]"), Error);
  CHECK_THROWS_WITH_AS(patchify(full(context, {1, 1, 6, 6}, DType::f32, 0.0), {1, 4, 3}),
                       doctest::Contains("not divisible into patches of 1 x 4 x 3"), Error);
  const Tensor images = full(context, {2, 1, 4, 6}, DType::f32, 0.0);
  const Tensor kernel = full(context, {5, 1, 2, 3}, DType::f32, 0.0);
  CHECK_THROWS_WITH_AS(patch_embed_forward(images, kernel, {}, {1, 4, 4}),
                       doctest::Contains("patch_embed: images [2, 1, 4, 6] are not divisible"),
                       Error);
  CHECK_THROWS_WITH_AS(patch_embed_forward(images, kernel, {}, {1, 2, 2}),
                       doctest::Contains("does not fit patches of 4 elements"), Error);
  CHECK_THROWS_WITH_AS(patch_embed_forward(images, cast(kernel, DType::f64), {}, {1, 2, 3}),
                       doctest::Contains("weight f64 [5, 1, 2, 3] does not fit"), Error);
  CHECK_THROWS_WITH_AS(patch_embed_forward(images, kernel, w, {1, 2, 3}),
                       doctest::Contains("does not fit weight f32 [5, 1, 2, 3]"), Error);
  CHECK_THROWS_WITH_AS(
      patch_embed_backward_weight(full(context, {2, 3, 5}, DType::f32, 0.0), images, {1, 2, 3}),
      doctest::Contains("expected a gradient f32 [2, 4, D]"), Error);
  CHECK_THROWS_WITH_AS(select_token(full(context, {1, 2, 3}, DType::f32, 0.0), 2),
                       doctest::Contains("token 2"), Error);
  const std::vector<std::int64_t> labels{0, 1, 2, 6};
  const Tensor bad = Tensor::from_host<std::int64_t>(context, {4}, labels);
  CHECK_THROWS_WITH_AS(cross_entropy_forward(x, {bad, {}, 0.0}),
                       doctest::Contains("label 6 of row 3 is outside [0, 6)"), Error);
  CHECK_THROWS_WITH_AS(check_labels(bad, 5), doctest::Contains("label 6 of row 3"), Error);
  CHECK_THROWS_WITH_AS(check_labels(x, 5), doctest::Contains("expected labels i64 [rows]"), Error);
  CHECK_THROWS_WITH_AS(cross_entropy_forward(x, {{}, {}, 0.0}),
                       doctest::Contains("either labels or probabilities"), Error);
  CHECK_THROWS_WITH_AS(cross_entropy_forward(x, {bad, {}, 1.5}),
                       doctest::Contains("label smoothing"), Error);
  CHECK_THROWS_WITH_AS(add(bad, bad), doctest::Contains("floating type, got i64"), Error);
}

TEST_CASE("count_correct: ties take the lowest index, NaN is never right") {
  Context context;
  const std::vector<float> logits{1, 1, 0, NAN, 5, 0, 0, 2, 3};
  const std::vector<std::int64_t> labels{0, 1, 2};
  CHECK(count_correct(Tensor::from_host<float>(context, {3, 3}, logits),
                      Tensor::from_host<std::int64_t>(context, {3}, labels)) == 2);
}

TEST_CASE("sum: fixed order, whatever the thread count") {
  std::vector<float> results;
  for (const int threads : {1, 2, 3}) {
    Context context({.threads = threads});
    const Tensor x = Tensor::empty(context, {100'003}, DType::f32);
    fill_normal(x, 0.0, 1.0, RandomStream(1, "test", "sum"));
    results.push_back(sum(x, 0.5).to_vector<float>()[0]);
  }
  CHECK(results[0] == results[1]);
  CHECK(results[0] == results[2]);
}
