// SPDX-License-Identifier: Apache-2.0
// The public functions of kernels/*.h on a device, against the same calls on the CPU.
#include <sherd/kernels/activation.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/random.h>
#include <sherd/kernels/tokens.h>

#include "array_support.h"

using namespace sherd;

namespace {

Tensor random_tensor(Context& context, const Shape& shape, DType dtype, const char* name) {
  const Tensor x = Tensor::empty(context, shape, dtype);
  fill_normal(x, 0, 1, RandomStream(2, "test", name));
  return x;
}

// Where double calls different libraries the last bits may differ.
void check_same(const Tensor& a, const Tensor& b) {
  REQUIRE(a.shape() == b.shape());
  REQUIRE(a.dtype() == b.dtype());
  const auto compare = [&](auto zero) {
    using T = decltype(zero);
    const auto x = a.to_vector<T>(), y = b.to_vector<T>();
    CHECK((sizeof(T) == 8 ? test::close_numbers(x, y, 1e-14) : test::like_cpu(x, y)));
  };
  switch (a.dtype()) {
    case DType::f64: return compare(double{});
    case DType::f32: return compare(float{});
    case DType::bf16: return compare(bf16{});
    default: return compare(f16{});
  }
}

using Results = std::vector<Tensor>;

// body(context, type) makes its inputs itself, the same on both.
void check_on_both(const std::function<Results(Context&, DType)>& body) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    CAPTURE(name_of(dtype));
    Context cpu_context;
    const Results expected = body(cpu_context, dtype);
    const Results results = body(test::device_context(), dtype);
    REQUIRE(results.size() == expected.size());
    for (std::size_t i = 0; i < results.size(); ++i) {
      CAPTURE(i);
      CHECK(results[i].device() == Device::cuda);
      check_same(results[i], expected[i]);
    }
  }
}

}  // namespace

TEST_CASE("cuda tensors: elementwise functions") {
  check_on_both([](Context& context, DType dtype) -> Results {
    const Tensor a = random_tensor(context, {5, 7, 6}, dtype, "a");
    const Tensor b = random_tensor(context, {6, 7, 5}, dtype, "b").permute({2, 1, 0});
    const Tensor factors =
        random_tensor(context, {5}, dtype == DType::f64 ? DType::f64 : DType::f32, "factors");
    const Tensor sum = clone(a);
    add_inplace(sum, b);
    const Tensor filled = Tensor::empty(context, {3, 3}, dtype);
    fill(filled, -2.5);
    return {full(context, {2, 5}, dtype, 0.1),
            filled,
            sum,
            add(a, b),
            scale(b, 0.3),
            contiguous(b),
            scale_rows(b, factors),
            add_scaled_rows(a, b, factors)};
  });
}

TEST_CASE("cuda tensors: casts and copies between types") {
  check_on_both([](Context& context, DType dtype) -> Results {
    const Tensor x = random_tensor(context, {9, 40}, dtype, "x").permute({1, 0});
    Results results;
    for (const DType to : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
      results.push_back(cast(x, to));
      const Tensor out = Tensor::empty(context, {40, 9}, to);
      copy(out, x);
      results.push_back(out);
    }
    std::vector<std::uint8_t> bytes(256);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i);
    results.push_back(cast(Tensor::from_host<std::uint8_t>(context, {256}, bytes), dtype));
    return results;
  });
}

TEST_CASE("cuda tensors: activations") {
  check_on_both([](Context& context, DType dtype) -> Results {
    const Tensor x = random_tensor(context, {4, 33}, dtype, "x");
    const Tensor grad = random_tensor(context, {33, 4}, dtype, "grad").permute({1, 0});
    Results results;
    for (const Activation activation :
         {Activation::none, Activation::relu, Activation::gelu_erf, Activation::gelu_tanh}) {
      results.push_back(activation_forward(x, activation));
      results.push_back(activation_backward(grad, x, activation));
    }
    return results;
  });
}

TEST_CASE("cuda tensors: patches and tokens") {
  check_on_both([](Context& context, DType dtype) -> Results {
    const Tensor images = random_tensor(context, {2, 3, 8, 12}, dtype, "images");
    const Tensor video = random_tensor(context, {2, 3, 4, 8, 12}, dtype, "video");
    const PatchSize patch{1, 4, 4}, tubelet{2, 4, 2};
    const Tensor patches = patchify(images, patch), tubelets = patchify(video, tubelet);
    const Tensor cls = random_tensor(context, {1, 1, 48}, dtype, "cls");
    const Tensor pos = random_tensor(context, {1, 7, 48}, dtype, "pos");
    const Tensor tokens = assemble_tokens(patches, cls, pos);
    const TokenGradients gradients = assemble_tokens_backward(tokens, true);
    const Tensor feature = select_token(tokens, 0), mean = mean_tokens(tokens, 1);
    return {patches,
            tubelets,
            unpatchify(patches, images.shape(), patch),
            unpatchify(tubelets, video.shape(), tubelet),
            tokens,
            assemble_tokens(patches, {}, pos.slice(1, 0, 6)),
            gradients.patches,
            gradients.class_token,
            gradients.position,
            assemble_tokens_backward(tokens, false).position,
            feature,
            select_token_backward(feature, 7, 2),
            mean,
            mean_tokens_backward(mean, 7, 1)};
  });
}

TEST_CASE("cuda tensors: dropout and stochastic depth") {
  check_on_both([](Context& context, DType dtype) -> Results {
    const RandomStream stream(4, "dropout", "layer", 3);
    return {dropout(random_tensor(context, {6, 50}, dtype, "x"), 0.4, stream, 100),
            drop_path_scale(context, 40, dtype, 0.2, stream, 3)};
  });
}
