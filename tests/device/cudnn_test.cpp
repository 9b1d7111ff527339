// SPDX-License-Identifier: Apache-2.0
// Attention by cuDNN, where there are cuDNN and a GPU, beside our own on the same device, both
// against fp64.
#include "device_support.h"

#include <sherd/kernels/attention.h>
#include <sherd/kernels/cuda/attention_cudnn.h>

using namespace sherd;

namespace {

struct Sizes {
  std::int64_t batch, tokens, heads, head_dim;
};

// Of packed queries, keys and values [B, N, 3, H, D].
struct Passes {
  std::vector<double> output, lse, grad;
};

std::string why_skipped() {
  if (!cuda::cudnn_attention_built()) return "no cuDNN in this build";
  return cuda::device_count() == 0 ? "no GPU" : "";
}

template <typename T>
Tensor upload(Context& context, const Shape& shape, const std::vector<double>& values) {
  std::vector<T> typed;
  for (const double value : values) typed.push_back(T(static_cast<float>(value)));
  return Tensor::from_host<T>(context, shape, typed);
}

// Tensors of one context as those of another.
template <typename T>
Tensor moved(Context& to, const Tensor& x) {
  return Tensor::from_host<T>(to, x.shape(), x.to_vector<T>());
}

// Forward on one context and backward on the other.
template <typename T>
Passes run(Context& first, Context& second, const Sizes& s, const std::vector<double>& packed,
           const std::vector<double>& grad_output) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(s.head_dim));
  const Shape whole{s.batch, s.tokens, 3, s.heads, s.head_dim};
  const auto part = [](const Tensor& x, std::int64_t which) { return x.select(2, which); };
  using Statistic = std::conditional_t<std::is_same_v<T, double>, double, float>;
  AttentionOutput forward;
  {
    const Tensor x = upload<T>(first, whole, packed);
    const AttentionOutput here = attention_forward(part(x, 0), part(x, 1), part(x, 2), scale);
    forward = {moved<T>(second, here.output), moved<Statistic>(second, here.lse)};
  }
  const Tensor x = upload<T>(second, whole, packed);
  const Tensor g = upload<T>(second, {s.batch, s.tokens, s.heads, s.head_dim}, grad_output);
  const Tensor grad = Tensor::empty(second, whole, x.dtype());
  attention_backward(g, part(x, 0), part(x, 1), part(x, 2), forward, scale, part(grad, 0),
                     part(grad, 1), part(grad, 2));
  return {test::as_doubles(forward.output.to_vector<T>()),
          test::as_doubles(forward.lse.to_vector<Statistic>()),
          test::as_doubles(grad.to_vector<T>())};
}

// What low precision rounds to, so that fp64 sees the same inputs.
template <typename T>
std::vector<double> inputs(std::int64_t count, const char* name) {
  return test::as_doubles(test::random_values<T>(static_cast<std::size_t>(count), name));
}

template <typename T>
void compare(Context& own, Context& cudnn, const Sizes& s) {
  CAPTURE(s.batch);
  CAPTURE(s.tokens);
  CAPTURE(s.heads);
  CAPTURE(s.head_dim);
  const std::int64_t count = s.batch * s.tokens * s.heads * s.head_dim;
  const std::vector<double> packed = inputs<T>(3 * count, "packed");
  const std::vector<double> grad_output = inputs<T>(count, "grad");
  Context cpu;
  const Passes exact = run<double>(cpu, cpu, s, packed, grad_output);
  const Passes plain = run<T>(cpu, cpu, s, packed, grad_output);
  const double output = test::error_of(plain.output, exact.output);
  const double grad = test::error_of(plain.grad, exact.grad);
  const struct {
    const char* name;
    Context &first, &second;
  } pairs[] = {{"cuDNN", cudnn, cudnn}, {"ours, cuDNN", own, cudnn}, {"cuDNN, ours", cudnn, own}};
  for (const auto& pair : pairs) {
    CAPTURE(pair.name);
    const Passes passes = run<T>(pair.first, pair.second, s, packed, grad_output);
    CHECK(test::error_of(passes.output, exact.output) <= 2 * output);
    // fp32, of scores that are sums of products in fp32.
    CHECK(test::error_of(passes.lse, exact.lse) <= 1e-5);
    CHECK(test::error_of(passes.grad, exact.grad) <= 3 * grad);
    const Passes again = run<T>(pair.first, pair.second, s, packed, grad_output);
    CHECK(again.output == passes.output);
    CHECK(again.lse == passes.lse);
    CHECK(again.grad == passes.grad);
  }
}

constexpr Sizes kSizes[] = {
    {2, 197, 3, 64}, {1, 17, 2, 80}, {3, 128, 2, 96}, {2, 257, 2, 128}, {1, 1000, 1, 72}};

}  // namespace

TEST_CASE("attention by cuDNN: as near to fp64 as it should be, alone and mixed with our own") {
  const std::string why = why_skipped();
  if (!why.empty()) {
    MESSAGE("skipped: " << why);
    return;
  }
  Context own({.device = Device::cuda, .attention = AttentionKernels::own});
  Context cudnn({.device = Device::cuda, .attention = AttentionKernels::cudnn});
  for (const Sizes& sizes : kSizes) {
    compare<bf16>(own, cudnn, sizes);
    compare<f16>(own, cudnn, sizes);
  }
}

TEST_CASE("attention by cuDNN: queries and keys that differ in number") {
  const std::string why = why_skipped();
  if (!why.empty()) {
    MESSAGE("skipped: " << why);
    return;
  }
  Context cudnn({.device = Device::cuda, .attention = AttentionKernels::cudnn}), cpu;
  const auto queries = inputs<bf16>(2 * 5 * 2 * 64, "queries");
  const auto keys = inputs<bf16>(2 * 77 * 2 * 64, "keys");
  const auto results = [&](Context& context) {
    const Tensor q = upload<bf16>(context, {2, 5, 2, 64}, queries);
    const Tensor k = upload<bf16>(context, {2, 77, 2, 64}, keys);
    const AttentionOutput out = attention_forward(q, k, k, 0.125);
    const Tensor grad_q = Tensor::empty(context, q.shape(), q.dtype());
    const Tensor grad_k = Tensor::empty(context, k.shape(), k.dtype());
    const Tensor grad_v = Tensor::empty(context, k.shape(), k.dtype());
    attention_backward(q, q, k, k, out, 0.125, grad_q, grad_k, grad_v);
    std::vector<double> all;
    for (const Tensor& x : {out.output, grad_q, grad_k, grad_v}) {
      const std::vector<double> part = test::as_doubles(x.to_vector<bf16>());
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  };
  CHECK(test::error_of(results(cudnn), results(cpu)) <= 0.02);
}

TEST_CASE("attention by cuDNN: what it cannot do is refused by name") {
  const std::string why = why_skipped();
  if (!why.empty()) {
    MESSAGE("skipped: " << why);
    return;
  }
  Context context({.device = Device::cuda, .attention = AttentionKernels::cudnn});
  const auto refusal = [&](std::int64_t head_dim, DType dtype) {
    return cuda::cudnn_attention_refuses(context, {1, 2, 33, 33, head_dim, 1.0}, dtype);
  };
  CHECK(refusal(64, DType::bf16).empty());
  CHECK(refusal(64, DType::f32).find("bf16 and f16") != std::string::npos);
  CHECK(refusal(20, DType::f16).find("multiple of 8, got 20") != std::string::npos);
  const Tensor x = Tensor::zeros(context, {1, 4, 1, 8}, DType::f32);
  CHECK_THROWS_WITH_AS(attention_forward(x, x, x, 1.0), doctest::Contains("takes bf16 and fp16"),
                       Error);
  // Rows of 3 * 8 + 4 elements.
  const Tensor rows = Tensor::zeros(context, {1, 4, 1, 28}, DType::bf16);
  const Tensor part = rows.slice(3, 0, 8);
  CHECK_THROWS_WITH_AS(attention_forward(part, part, part, 1.0),
                       doctest::Contains("multiples of 8 elements"), Error);
  const Tensor one = Tensor::zeros(context, {1, 1, 1, 8}, DType::bf16);
  const AttentionOutput out = attention_forward(one, one, one, 1.0);
  const Tensor grad = Tensor::empty(context, one.shape(), one.dtype());
  CHECK_THROWS_WITH_AS(attention_backward(one, one, one, one, out, 1.0, grad, grad, grad),
                       doctest::Contains("none of one query and one key"), Error);
}
