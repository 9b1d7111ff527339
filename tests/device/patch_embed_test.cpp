// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cuda/patch_embed.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/patch_embed.h>

#include <cmath>

#include "array_support.h"

using namespace sherd;
using arguments::acc_t;
using arguments::PatchShape;
using test::as_doubles;
using test::error_of;
using test::Placed;
using test::random_values;

namespace {

// On a context of the CPU, in R.
template <typename R>
struct OnCpu {
  Context context;
  Tensor output, grad_weight;

  template <typename T>
  OnCpu(const PatchShape& s, std::int64_t dim, const std::vector<T>& images,
        const std::vector<T>& weight, const std::vector<T>& bias,
        const std::vector<T>& grad_output) {
    const auto tensor = [&](const Shape& shape, const std::vector<T>& values) {
      return cast(Tensor::from_host<T>(context, shape, values), dtype_of<R>::value);
    };
    const Tensor x = tensor({s.batch, s.channels, s.time, s.height, s.width}, images);
    const PatchSize patch{s.patch_time, s.patch_height, s.patch_width};
    output = patch_embed_forward(x, tensor({dim, s.columns()}, weight), tensor({dim}, bias), patch);
    grad_weight =
        patch_embed_backward_weight(tensor({s.batch, s.count(), dim}, grad_output), x, patch);
  }
};

// One problem on the device and on the CPU. offset: in elements, of all inputs and results.
template <typename T>
void check(const PatchShape& s, std::int64_t dim,
           std::initializer_list<std::size_t> offsets = {0}) {
  using A = acc_t<T>;
  CAPTURE(s.height);
  CAPTURE(s.patch_width);
  CAPTURE(dim);
  const auto rows = static_cast<std::size_t>(s.batch * s.count()),
             columns = static_cast<std::size_t>(s.columns()), width = static_cast<std::size_t>(dim);
  const auto images = random_values<T>(rows * columns, "images");
  const auto weight = random_values<T>(width * columns, "weight");
  const auto bias = random_values<T>(width, "bias");
  const auto grad_output = random_values<T>(rows * width, "grad");
  const OnCpu<double> exact(s, dim, images, weight, bias, grad_output);
  const OnCpu<T> plain(s, dim, images, weight, bias, grad_output);
  // Where the CPU's result is exact by chance, roundings of the result's type. And a library that
  // adds in blocks is better than one fp32 after the other, which is as good as can be asked for.
  const double rounding = std::is_same_v<T, double>  ? 0x1p-50
                          : std::is_same_v<T, float> ? 0x1p-25 * std::sqrt(s.columns())
                          : std::is_same_v<T, f16>   ? 0x1p-11
                                                     : 0x1p-8;
  const auto error = [](const auto& values, const Tensor& reference) {
    return error_of(as_doubles(values), reference.to_vector<double>());
  };
  const double output_error = error(plain.output.template to_vector<T>(), exact.output);
  const double grad_error = error(plain.grad_weight.template to_vector<A>(), exact.grad_weight);

  Stream& stream = test::DeviceArray<T>::stream();
  std::vector<T> first_output;
  std::vector<A> first_grad;
  test::in_all_orders([&] {
    for (const std::size_t offset : offsets) {
      CAPTURE(offset);
      const Placed<T> x(images, offset), w(weight, offset), b(bias, offset), g(grad_output, offset),
          out(rows * width, offset);
      cuda::patch_embed_forward<T>(stream, {s, dim, x.data(), w.data(), b.data(), out.data()});
      const std::vector<T> output = out.values();
      if (first_output.empty()) first_output = output;
      CHECK(test::same_numbers(output, first_output));

      const Placed<A> grad_weight(width * columns, offset);
      const std::size_t bytes = cuda::patch_embed_backward_weight_workspace_bytes<T>(s, dim);
      const test::DeviceArray<A> workspace(bytes / sizeof(A));
      cuda::patch_embed_backward_weight<T>(
          stream, {s, dim, g.data(), x.data(), grad_weight.data(), workspace.data()});
      const std::vector<A> grad = grad_weight.values();
      if (first_grad.empty()) first_grad = grad;
      CHECK(test::same_numbers(grad, first_grad));
    }
  });
  CHECK(error(first_output, exact.output) <= 2 * std::max(output_error, rounding));
  CHECK(error(first_grad, exact.grad_weight) <=
        3 * std::max(grad_error, sizeof(T) == 8 ? rounding : 0x1p-23));
}

}  // namespace

TEST_CASE_TEMPLATE("device patch embedding: patches of every width of words", T, double, float,
                   bf16, f16) {
  // batch, channels, time, height, width; patch. Sums that are no whole steps, results that are no
  // whole tiles, and more than one of them.
  check<T>({2, 3, 1, 32, 48, 1, 16, 16}, 72);
  check<T>({1, 3, 1, 28, 42, 1, 14, 14}, 40);
  check<T>({3, 3, 1, 32, 32, 1, 4, 4}, 136);
  check<T>({2, 1, 1, 21, 15, 1, 7, 5}, 33);
  // The output's rows allow less than the patches' do.
  check<T>({1, 2, 1, 16, 16, 1, 8, 8}, 10);
  check<T>({1, 2, 1, 16, 16, 1, 8, 8}, 13);
}

TEST_CASE_TEMPLATE("device patch embedding: patches of videos", T, double, float, bf16, f16) {
  check<T>({2, 3, 4, 16, 24, 2, 8, 8}, 64);
  check<T>({1, 2, 6, 6, 10, 3, 2, 5}, 7);
  check<T>({1, 1, 1, 1, 1, 1, 1, 1}, 1);
}

TEST_CASE_TEMPLATE("device patch embedding: the same bits at any address", T, float, bf16, f16) {
  check<T>({1, 3, 1, 16, 32, 1, 8, 8}, 24, {0, 1, 2});
}

TEST_CASE_TEMPLATE("device patch embedding: a gradient summed in parts", T, double, float, bf16) {
  const PatchShape shape{3, 1, 1, 52, 44, 1, 4, 4};  // 429 rows
  CHECK(cuda::patch_embed_cut<T>(shape, 24).parts == 2);
  check<T>(shape, 24, {0, 1});
}

TEST_CASE_TEMPLATE("device patch embedding: an infinite pixel touches its patch and column alone",
                   T, float, bf16) {
  // 288 rows in two parts; the steps of both sums have a rest. The pixel is the first of a patch.
  const PatchShape s{2, 3, 1, 48, 48, 1, 4, 4};
  constexpr std::int64_t kDim = 8, kRows = 288, kColumns = 48;
  for (const std::int64_t row : {10, 287}) {
    CAPTURE(row);
    auto images = random_values<T>(kRows * kColumns, "images");
    const std::int64_t patch = row % 144;
    images[static_cast<std::size_t>(row / 144 * 6912 + patch / 12 * 4 * 48 + patch % 12 * 4)] =
        test::number<T>(INFINITY);
    const Placed<T> x(images, 0), w(random_values<T>(kDim * kColumns, "weight"), 0),
        g(random_values<T>(kRows * kDim, "grad"), 0), out(kRows * kDim, 0);
    const Placed<float> grad_weight(kDim * kColumns, 0);
    Stream& stream = test::DeviceArray<T>::stream();
    cuda::patch_embed_forward<T>(stream, {s, kDim, x.data(), w.data(), nullptr, out.data()});
    const test::DeviceArray<float> workspace(2 * kDim * kColumns);
    cuda::patch_embed_backward_weight<T>(
        stream, {s, kDim, g.data(), x.data(), grad_weight.data(), workspace.data()});
    const std::vector<double> output = as_doubles(out.values());
    const std::vector<double> grad = as_doubles(grad_weight.values());
    for (std::size_t i = 0; i < output.size(); ++i)
      CHECK((i / kDim == static_cast<std::size_t>(row) ? std::isinf(output[i])
                                                       : std::isfinite(output[i])));
    for (std::size_t i = 0; i < grad.size(); ++i)
      CHECK((i % kColumns == 0 ? std::isinf(grad[i]) : std::isfinite(grad[i])));
  }
}

TEST_CASE("device patch embedding: the cut bounds the workspace") {
  // ViT-L/16 and ViT-H/14, 256 images.
  const PatchShape large{256, 3, 1, 224, 224, 1, 16, 16}, huge{256, 3, 1, 224, 224, 1, 14, 14};
  CHECK(cuda::patch_embed_cut<bf16>(large, 1024).parts == 6);
  CHECK(cuda::patch_embed_cut<bf16>(huge, 1280).parts == 6);
  CHECK(cuda::patch_embed_backward_weight_workspace_bytes<bf16>(large, 1024) == 6 * 1024 * 768 * 4);
  // As many parts as a part has 256 rows.
  const PatchShape one{1, 3, 1, 224, 224, 1, 16, 16};
  CHECK(cuda::patch_embed_backward_weight_workspace_bytes<bf16>(one, 1024) == 0);
}

TEST_CASE("device patch embedding: tensors reach its kernels, no patches are written") {
  const std::int64_t batch = 2, dim = 24;
  const Shape image_shape{batch, 3, 32, 32};
  const PatchSize patch{1, 8, 8};
  struct Results {
    Tensor output, grad_weight, placed;
    std::int64_t flops, peak;
  };
  const auto on = [&](Context& context) {
    const auto make = [&](const Shape& shape, const char* name) {
      const Tensor x = Tensor::empty(context, shape, DType::f32);
      if (!context.is_meta()) {
        const auto values = random_values<float>(static_cast<std::size_t>(shape.numel()), name);
        x.copy_from_host(values.data(), values.size() * sizeof(float));
      }
      return x;
    };
    const Tensor images = make(image_shape, "images").permute({0, 1, 3, 2});
    const Tensor weight = make({dim, 3, 8, 8}, "weight"), bias = make({dim}, "bias");
    const Tensor grad = make({batch, 16, dim}, "grad");
    const Tensor place = Tensor::empty(context, weight.shape(), DType::f32);
    const auto version = place.storage().version();
    const Tensor whole = contiguous(images);
    context.ledger().reset_peak();
    const std::int64_t before = context.ledger().live_total();
    Results results;
    results.output = patch_embed_forward(whole, weight, bias, patch);
    results.peak = context.ledger().peak_total() - before;
    results.grad_weight = patch_embed_backward_weight(grad, images, patch);
    results.placed = patch_embed_backward_weight(grad, images, patch, place);
    CHECK(&results.placed.storage() == &place.storage());
    CHECK(place.storage().version() > version);
    results.flops = context.work().matmul_flops;
    return results;
  };
  Context cpu, cuda({.device = Device::cuda});
  Context meta({.device = Device::meta, .meta_of = Device::cuda});
  const Results expected = on(cpu), got = on(cuda), plan = on(meta);
  const auto close = [](const Tensor& a, const Tensor& b) {
    REQUIRE(a.shape() == b.shape());
    return error_of(as_doubles(a.to_vector<float>()), as_doubles(b.to_vector<float>())) < 1e-6;
  };
  CHECK(close(got.output, expected.output));
  CHECK(close(got.grad_weight, expected.grad_weight));
  CHECK(close(got.placed.reshape({dim, 192}), expected.grad_weight));
  CHECK(got.flops == 3 * 2 * batch * 16 * dim * 192);
  CHECK(expected.flops == got.flops);
  CHECK(plan.flops == got.flops);
  // The output and nothing else.
  Context one({.device = Device::meta, .meta_of = Device::cuda});
  Tensor::empty(one, got.output.shape(), DType::f32);
  CHECK(got.peak == one.ledger().peak_total());
  CHECK(plan.peak == got.peak);
  for (std::size_t i = 0; i < kMemoryCategories; ++i)
    CHECK(meta.ledger().peaks()[i] == cuda.ledger().peaks()[i]);
}

TEST_CASE("device patch embedding: no images, no channels, too many patches") {
  Context& context = test::device_context();
  const auto zeros = [&](const Shape& shape) { return Tensor::zeros(context, shape, DType::bf16); };
  const PatchSize patch{1, 4, 4};
  CHECK(patch_embed_forward(zeros({0, 3, 8, 8}), zeros({5, 48}), zeros({5}), patch).shape() ==
        Shape{0, 4, 5});
  const Tensor place = full(context, {5, 48}, DType::f32, 3.0);
  patch_embed_backward_weight(zeros({0, 4, 5}), zeros({0, 3, 8, 8}), patch, place);
  CHECK(place.to_vector<float>() == std::vector<float>(5 * 48, 0.f));
  patch_embed_backward_weight(zeros({1, 0, 5}), zeros({1, 3, 0, 8}), patch, place);
  CHECK(place.to_vector<float>() == std::vector<float>(5 * 48, 0.f));
  // The bias alone.
  const Tensor bias = full(context, {5}, DType::bf16, 2.0);
  const Tensor output = patch_embed_forward(zeros({1, 0, 8, 8}), zeros({5, 0}), bias, patch);
  CHECK(cast(output, DType::f32).to_vector<float>() == std::vector<float>(4 * 5, 2.f));
  CHECK(patch_embed_backward_weight(output, zeros({1, 0, 8, 8}), patch).numel() == 0);

  Context meta({.device = Device::meta, .meta_of = Device::cuda});
  const auto empty = [&](const Shape& shape) { return Tensor::empty(meta, shape, DType::bf16); };
  CHECK_THROWS_WITH_AS(
      patch_embed_forward(empty({1 << 11, 1, 1 << 10, 1 << 10}), empty({5, 1}), {}, {1, 1, 1}),
      doctest::Contains("2147483648 patches of 1 elements with 5 features are too many"), Error);
}
