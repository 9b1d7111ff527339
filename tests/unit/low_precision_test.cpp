// SPDX-License-Identifier: Apache-2.0
// Parameters of bf16 and fp16: gradients in fp32, what the tape casts, conversions in copy(), the
// loss, and a whole model against fp64.
#include <doctest/doctest.h>
#include <sherd/autograd/operations.h>
#include <sherd/autograd/tape.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/layer_norm.h>
#include <sherd/kernels/matmul.h>
#include <sherd/kernels/random.h>
#include <sherd/models/vit.h>

#include <cmath>

using namespace sherd;

namespace {

Tensor random_tensor(Context& context, const Shape& shape, DType dtype, const std::string& name) {
  const Tensor x = Tensor::empty(context, shape, dtype);
  fill_normal(x, 0.0, 1.0, RandomStream(11, "test", name));
  return x;
}

std::vector<float> floats(const Tensor& x) {
  return cast(x, DType::f32).to_vector<float>();
}

std::vector<std::uint16_t> bits(const Tensor& x) {
  std::vector<std::uint16_t> words(static_cast<std::size_t>(x.numel()));
  x.copy_to_host(words.data(), words.size() * 2);
  return words;
}

constexpr DType kSmall[] = {DType::bf16, DType::f16};

}  // namespace

TEST_CASE("gradients of parameters leave their kernels in fp32") {
  for (const Device device : {Device::cpu, Device::meta}) {
    Context context({.device = device, .threads = 2});
    for (const auto& [dtype, wide] :
         {std::pair{DType::bf16, DType::f32}, std::pair{DType::f16, DType::f32},
          std::pair{DType::f32, DType::f32}, std::pair{DType::f64, DType::f64}}) {
      const Tensor x = full(context, {4, 6}, dtype, 1.0), w = full(context, {6}, dtype, 1.0);
      CHECK(linear_backward_weight(x, x).dtype() == wide);
      CHECK(linear_backward_bias(x).dtype() == wide);
      CHECK(linear_backward_input(x, full(context, {6, 3}, dtype, 1.0)).dtype() == dtype);
      const LayerNormOutput y = layer_norm_forward(x, w, w, 1e-6);
      const LayerNormGradients norm = layer_norm_backward(x, x, y.mean, y.rstd, w, true, true);
      CHECK((norm.input.dtype() == dtype && norm.weight.dtype() == wide));
      CHECK(norm.bias.dtype() == wide);
      const TokenGradients tokens =
          assemble_tokens_backward(full(context, {2, 3, 4}, dtype, 1.0), true);
      CHECK((tokens.patches.dtype() == dtype && tokens.class_token.dtype() == wide));
      CHECK(tokens.position.dtype() == wide);
      const Tensor wrong = full(context, {6, 6}, dtype == wide ? DType::bf16 : dtype, 0.0);
      CHECK_THROWS_WITH_AS(linear_backward_weight(x, x, wrong), doctest::Contains("the place"),
                           Error);
    }
  }
}

TEST_CASE("a weight's gradient keeps what 16 bits lose, on any number of threads") {
  // 1 + 4095 times 2^-12: nothing of the small terms would survive in bf16, nor in fp16's sum.
  const std::int64_t rows = 4096;
  for (const DType dtype : kSmall) {
    for (const int threads : {1, 2, 3, 7}) {
      Context context({.threads = threads});
      const Tensor grad = full(context, {rows, 5}, dtype, 0x1p-12);
      fill(grad.slice(0, 0, 1), 1.0);
      const Tensor ones = full(context, {rows, 33}, dtype, 1.0);
      const Tensor place = full(context, {5, 11, 3}, DType::f32, 7.0);
      const Tensor out = linear_backward_weight(grad, ones, place);
      CHECK(out.shared_storage() == place.shared_storage());
      CHECK(out.to_vector<float>() == std::vector<float>(5 * 33, 1.0f + 4095 * 0x1p-12f));
      CHECK(linear_backward_bias(grad).to_vector<float>() ==
            std::vector<float>(5, 1.0f + 4095 * 0x1p-12f));
    }
  }
}

TEST_CASE("linear takes a convolution's weight") {
  Context context;
  const Tensor x = random_tensor(context, {3, 12}, DType::f32, "x"),
               w = random_tensor(context, {5, 3, 2, 2}, DType::f32, "w");
  const Tensor matrix = w.reshape({5, 12});
  CHECK(floats(linear_forward(x, w, {})) == floats(linear_forward(x, matrix, {})));
  const Tensor grad = random_tensor(context, {3, 5}, DType::f32, "grad");
  CHECK(floats(linear_backward_input(grad, w)) == floats(linear_backward_input(grad, matrix)));
  CHECK_THROWS_WITH_AS(linear_forward(x, w.reshape({60}), {}), doctest::Contains("f32 [60]"),
                       Error);
  CHECK_THROWS_WITH_AS(linear_forward(grad, w, {}), doctest::Contains("f32 [5, 3, 2, 2]"), Error);
  const Tensor apart = full(context, {5, 24}, DType::f32, 0.0).slice(1, 0, 12);
  CHECK_THROWS_WITH_AS(linear_backward_weight(grad, x, apart), doctest::Contains("not contiguous"),
                       Error);
}

TEST_CASE("copy converts: the bits of cast, strides read, NaN stays NaN") {
  Context context({.threads = 2});
  for (const DType dtype : kSmall) {
    const Tensor x = random_tensor(context, {37, 1001}, DType::f32, "x");
    const Tensor out = full(context, {1001, 37}, dtype, 0.0);
    const std::uint64_t version = out.storage().version();
    copy(out, x.permute({1, 0}));
    CHECK(out.storage().version() > version);
    CHECK(bits(out) == bits(cast(x.permute({1, 0}), dtype)));
    const Tensor back = full(context, {1001, 37}, DType::f32, 0.0);
    copy(back, out);
    CHECK(floats(back) == floats(out));
    const Tensor exact = full(context, {1}, DType::f64, 1.0 + 0x1p-30);
    copy(exact, full(context, {1}, dtype, -2.5));
    CHECK(exact.item() == -2.5);
    const std::vector<float> nan(19, std::nanf(""));
    const Tensor hole = full(context, {19}, dtype, 0.0);
    copy(hole, Tensor::from_host<float>(context, {19}, nan));
    for (const float value : floats(hole)) CHECK(std::isnan(value));
  }
  const std::vector<std::int64_t> labels{1};
  CHECK_THROWS_WITH_AS(copy(full(context, {1}, DType::f32, 0.0),
                            Tensor::from_host<std::int64_t>(context, {1}, labels)),
                       doctest::Contains("got f32 [1] and i64 [1]"), Error);
  Context plan({.device = Device::meta});
  copy(full(plan, {3}, DType::bf16, 0.0), full(plan, {3}, DType::f32, 0.0));
}

TEST_CASE("tape: a gradient is cast to the type of its place") {
  Context context;
  for (const DType dtype : kSmall) {
    const Tensor x = random_tensor(context, {300, 3}, dtype, "x");
    Parameter weight({2, 3}, Initializer::normal(1.0), true);
    weight.set_name("w");
    weight.materialize(context, dtype);
    const auto gradient_of = [&](const auto& use) {
      weight.clear_grad();
      Tape tape(context);
      const TapeScope recording(tape);
      tape.backward(sum(use(weight.variable())));
      CHECK(weight.grad().dtype() == DType::f32);
      return weight.grad().to_vector<float>();
    };
    const Tensor ones = full(context, {300, 2}, dtype, 1.0);
    const auto linear_grad = gradient_of([&](const Variable& w) { return linear(x, w, {}); });
    CHECK(linear_grad == linear_backward_weight(ones, x).to_vector<float>());
    CHECK(linear_grad != floats(cast(linear_backward_weight(ones, x), dtype)));

    // An operation that gives 16 bits: widened, and added to what another gave in 32.
    const Activation gelu = Activation::gelu_erf;
    const auto gelu_grad = gradient_of([&](const Variable& w) { return activate(w, gelu); });
    CHECK(gelu_grad ==
          floats(activation_backward(full(context, {2, 3}, dtype, 1.0), weight.data(), gelu)));
    const auto both = gradient_of([&](const Variable& w) {
      return add(reshape(sum(linear(x, w, {})), {1}), reshape(sum(activate(w, gelu)), {1}));
    });
    for (std::size_t i = 0; i < both.size(); ++i) CHECK(both[i] == linear_grad[i] + gelu_grad[i]);

    // A kernel that gives 32 bits for what is no parameter: rounded once.
    Tape tape(context);
    const TapeScope recording(tape);
    const Variable activation = tape.watch(weight.data());
    tape.backward(sum(linear(x, activation, {})));
    CHECK(bits(tape.gradient(activation)) == bits(cast(linear_backward_weight(ones, x), dtype)));

    // layer_norm adds to the gradient of its input in place, where that has the input's type.
    const Tensor gain = full(context, {3}, dtype, 1.0);
    CHECK_NOTHROW(
        gradient_of([&](const Variable& w) { return add(w, layer_norm(w, gain, gain, 1e-6)); }));
  }
}

TEST_CASE("parameter: small contributions of many backward passes add up") {
  Context context;
  for (const DType dtype : kSmall) {
    Parameter parameter({1}, Initializer::ones(), true);
    parameter.materialize(context, dtype);
    for (const double factor : {1.0, 0x1p-12, 0x1p-12, 0x1p-12}) {
      Tape tape(context);
      const TapeScope recording(tape);
      tape.backward(scale(parameter.variable(), factor));
    }
    CHECK(parameter.grad().item() == 1.0 + 3 * 0x1p-12);
  }
}

TEST_CASE("parameter: the gradient is written in place, in fp32") {
  Context context;
  const Tensor flat = full(context, {64}, DType::f32, 9.0, MemoryCategory::gradients);
  Parameter weight({2, 3, 2, 2}, Initializer::normal(1.0), true);
  weight.set_name("w");
  weight.materialize(context, DType::bf16);
  weight.set_grad_place([&] { return flat.slice(0, 8, 32).reshape({2, 3, 2, 2}); });
  const Tensor x = random_tensor(context, {5, 12}, DType::bf16, "x");
  const auto backward = [&] {
    Tape tape(context);
    const TapeScope recording(tape);
    tape.backward(linear(x, weight.variable(), {}), full(context, {5, 2}, DType::bf16, 1.0));
  };
  backward();
  CHECK(weight.grad().shared_storage() == flat.shared_storage());
  CHECK(floats(weight.grad()) ==
        floats(linear_backward_weight(full(context, {5, 2}, DType::bf16, 1.0), x)));
  const auto all = flat.to_vector<float>();
  CHECK((all[7] == 9.0f && all[8] != 9.0f && all[31] != 9.0f && all[32] == 9.0f));

  weight.clear_grad();
  weight.set_grad_place([&] { return full(context, {2, 3, 2, 2}, DType::bf16, 0.0); });
  CHECK_THROWS_WITH_AS(backward(), doctest::Contains("expected contiguous f32"), Error);
  CHECK_THROWS_WITH_AS(weight.accumulate_grad(full(context, {2, 3, 2, 2}, DType::bf16, 0.0)),
                       doctest::Contains("its gradient is bf16 [2, 3, 2, 2], expected f32"), Error);
  CHECK_THROWS_WITH_AS(
      weight.accumulate_grad(full(context, {2, 3, 2, 2}, DType::f32, 0.0)),
      doctest::Contains("the place for its gradient is bf16 [2, 3, 2, 2], expected f32"), Error);
}

TEST_CASE("cross_entropy of 16-bit logits: the loss is fp32, its gradient of the logits' type") {
  Context context;
  const std::vector<std::int64_t> labels{0, 2, 1};
  const CrossEntropyTarget target{Tensor::from_host<std::int64_t>(context, {3}, labels), {}, 0.1};
  for (const DType dtype : kSmall) {
    const Tensor logits = random_tensor(context, {3, 4}, dtype, "logits");
    const auto run = [&](const Tensor& x) {
      Tape tape(context);
      const TapeScope recording(tape);
      const Variable watched = tape.watch(x);
      const Variable loss = cross_entropy(watched, target);
      tape.backward(loss, full(context, {}, DType::f32, 3.0));
      return std::pair{loss.tensor(), tape.gradient(watched)};
    };
    const auto [loss, grad] = run(logits);
    const auto [wide_loss, wide_grad] = run(cast(logits, DType::f32));
    CHECK(loss.to_vector<float>() == wide_loss.to_vector<float>());
    CHECK(bits(grad) == bits(cast(wide_grad, dtype)));
  }
}

TEST_CASE("ViT in bf16 and fp16: gradients near those of fp64, and planned to the byte") {
  ViTSettings settings;
  settings.image_height = settings.image_width = 16;
  settings.patch = 4;
  settings.dim = 48;
  settings.depth = 2;
  settings.heads = 3;
  settings.mlp_ratio = 2.0;
  settings.classes = 10;
  std::vector<std::int64_t> labels{1, 7, 3, 9};
  const auto backward = [&](Context& context, DType dtype) {
    auto model = std::make_unique<VisionTransformer>(settings);
    // The weights of all types are those that bf16 and fp16 both hold.
    model->initialize(context, DType::f64);
    for (Parameter* parameter : model->parameters()) {
      Tensor x = cast(cast(parameter->data(), DType::bf16), DType::f16);
      parameter->set_data(cast(x, dtype, MemoryCategory::parameters));
    }
    const Tensor images = Tensor::empty(context, {4, 3, 16, 16}, dtype);
    fill_normal(images, 0.0, 1.0, RandomStream(3, "test", "images"));
    const Tensor target = Tensor::from_host<std::int64_t>(context, {4}, labels);
    context.ledger().reset_peak();
    Tape tape(context);
    const TapeScope recording(tape);
    const Variable loss = cross_entropy((*model)(images), {target, {}, 0.0});
    CHECK(loss.tensor().dtype() == (dtype == DType::f64 ? DType::f64 : DType::f32));
    tape.backward(loss);
    return model;
  };
  Context reference({.threads = 2, .seed = 4});
  const auto exact = backward(reference, DType::f64);
  for (const auto& type : {std::pair{DType::bf16, 0.015}, std::pair{DType::f16, 0.002}}) {
    const DType dtype = type.first;
    Context context({.threads = 2, .seed = 4});
    Context plan({.device = Device::meta, .threads = 2, .seed = 4});
    const auto model = backward(context, dtype);
    backward(plan, dtype);
    CHECK(plan.ledger().peaks() == context.ledger().peaks());
    double error = 0, norm = 0;
    for (std::size_t p = 0; p < model->parameters().size(); ++p) {
      const Tensor& grad = model->parameters()[p]->grad();
      CHECK(grad.dtype() == DType::f32);
      const auto values = grad.to_vector<float>();
      const auto expected = exact->parameters()[p]->grad().to_vector<double>();
      for (std::size_t i = 0; i < values.size(); ++i) {
        error += std::pow(static_cast<double>(values[i]) - expected[i], 2);
        norm += expected[i] * expected[i];
      }
    }
    CAPTURE(name_of(dtype));
    CHECK(std::sqrt(error / norm) < type.second);
  }
}
