// SPDX-License-Identifier: Apache-2.0
// Every differentiable operation against central differences in fp64, odd shapes and strided views
// included.
#include "operation_cases.h"

#include <doctest/doctest.h>
#include <sherd/autograd/gradcheck.h>
#include <sherd/autograd/tape.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/random.h>
#include <sherd/models/vit.h>

#include <algorithm>
#include <cmath>

using namespace sherd;
using namespace sherd::test;

namespace {

// The same values behind other strides: dimensions stored in reverse, with a gap.
Tensor strided(const Tensor& x) {
  std::vector<std::int64_t> dims(x.shape().dims().rbegin(), x.shape().dims().rend());
  std::vector<int> order;
  for (int i = x.rank() - 1; i >= 0; --i) order.push_back(i);
  dims.back() += 1;
  const Shape wide(std::span<const std::int64_t>(dims.data(), dims.size()));
  const auto view_of = [&](const Tensor& all) {
    return all.slice(x.rank() - 1, 0, dims.back() - 1).permute(order);
  };
  const Tensor::Strides strides = view_of(Tensor::empty(x.context(), wide, x.dtype())).strides();
  const std::vector<double> values = x.to_vector<double>();
  std::vector<double> stored(static_cast<std::size_t>(wide.numel()));
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    std::int64_t rest = i, offset = 0;
    for (int d = x.rank() - 1; d >= 0; --d) {
      offset += rest % x.dim(d) * strides[static_cast<std::size_t>(d)];
      rest /= x.dim(d);
    }
    stored[static_cast<std::size_t>(offset)] = values[static_cast<std::size_t>(i)];
  }
  return view_of(Tensor::from_host<double>(x.context(), wide, stored));
}

// Fewer where the emulator computes.
std::int64_t elements_on(Device device, std::int64_t most) {
  return device == Device::cpu ? most : std::min<std::int64_t>(most, 6);
}

void check_recomputed_modules(Device device) {
  Context context({.device = device, .threads = 2, .seed = 5});
  Sequential model;
  model.append("mlp", std::make_shared<Mlp>(6, 10, Activation::gelu_erf, 0.3));
  model.append("attn", std::make_shared<Attention>(AttentionSettings{6, 2, 3, true, 0.3}));
  model.append("block", std::make_shared<ViTBlock>(
                            ViTSettings{.dim = 6, .heads = 2, .head_dim = 3, .drop = 0.2}, 0.4));
  model.initialize(context, DType::f64);
  // Larger than at the start of a training, so that every part counts.
  for (Parameter* parameter : model.parameters()) {
    fill_normal(parameter->data(), 0.1, 0.5, RandomStream(3, "test", parameter->name()));
  }
  for (const auto& entry : model.children()) {
    const std::shared_ptr<Module>& module = entry.second;
    CAPTURE(entry.first);
    module->set_recompute(true);
    int forwards = 0;
    module->children().front().second->add_pre_forward_hook(
        [&](Module&, const Variable& x) { return ++forwards, x; });
    const std::vector<Tensor> inputs{random_tensor(context, {4, 3, 6}, entry.first)};
    CHECK_NOTHROW(gradcheck(entry.first, [&](auto in) { return (*module)(in[0]); }, inputs,
                            {.max_elements = elements_on(device, 72)}));
    // Two for the gradient.
    CHECK(forwards == 2 + 2 * elements_on(device, 4 * 3 * 6));
  }
}

}  // namespace

TEST_SUITE("gradcheck") {
  TEST_CASE("every operation, contiguous inputs") {
    for (const Device device : test_devices()) {
      Context context({.device = device, .threads = 2, .seed = 5});
      for (const Case& test : cases(context)) {
        CAPTURE(name_of(device));
        CAPTURE(test.name);
        std::vector<Tensor> inputs;
        for (const Shape& shape : test.inputs) {
          const std::string name = test.name + std::to_string(inputs.size());
          inputs.push_back(random_tensor(context, shape, name));
        }
        CHECK_NOTHROW(
            gradcheck(test.name, test.f, inputs, {.max_elements = elements_on(device, 200)}));
      }
    }
  }

  TEST_CASE("every operation, strided inputs") {
    for (const Device device : test_devices()) {
      Context context({.device = device, .threads = 2, .seed = 5});
      for (const Case& test : cases(context)) {
        CAPTURE(name_of(device));
        CAPTURE(test.name);
        std::vector<Tensor> inputs;
        for (const Shape& shape : test.inputs) {
          const std::string name = test.name + std::to_string(inputs.size());
          inputs.push_back(strided(random_tensor(context, shape, name)));
        }
        // Transposed outputs, so that gradients arrive with strides too.
        const auto transposed = [&](std::span<const Variable> in) {
          const Variable y = test.f(in);
          if (y.shape().rank() == 2) return permute(y, {1, 0});
          if (y.shape().rank() == 3) return permute(y, {2, 0, 1});
          if (y.shape().rank() == 4) return permute(y, {3, 1, 0, 2});
          return y;
        };
        CHECK_NOTHROW(
            gradcheck(test.name, transposed, inputs, {.max_elements = elements_on(device, 40)}));
      }
    }
  }

  TEST_CASE("every operation on meta: the shapes and the bytes of the device") {
    const auto run_on = [](Device device, DType dtype, Device meta_of = Device::cpu) {
      Context context({.device = device, .meta_of = meta_of, .threads = 2, .seed = 5});
      std::vector<std::pair<std::string, MemoryBreakdown>> results;
      for (const Case& test : cases(context)) {
        context.ledger().reset_peak();
        Tape tape(context);
        std::vector<Variable> inputs;
        for (const Shape& shape : test.inputs) {
          inputs.push_back(tape.watch(full(context, shape, dtype, 0.5)));
        }
        Variable output;
        {
          const TapeScope recording(tape);
          output = test.f(inputs);
        }
        std::string shapes = test.name + " " + output.shape().to_string();
        tape.backward(output, full(context, output.shape(), output.tensor().dtype(), 1.0));
        for (const Variable& input : inputs) shapes += " " + tape.gradient(input).describe();
        results.emplace_back(shapes, context.ledger().peaks());
      }
      return results;
    };
    for (const Device device : test_devices()) {
      for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
        const auto real = run_on(device, dtype), plan = run_on(Device::meta, dtype, device);
        REQUIRE(real.size() == plan.size());
        for (std::size_t i = 0; i < real.size(); ++i) {
          CAPTURE(name_of(device));
          CAPTURE(real[i].first);
          CHECK(plan[i].first == real[i].first);
          CHECK(plan[i].second == real[i].second);
        }
      }
    }
  }

  TEST_CASE("recomputed modules of a ViT") {
    for (const Device device : test_devices()) check_recomputed_modules(device);
  }

  TEST_CASE("a wrong gradient is found") {
    struct WrongNode final : Node {
      const char* name() const override { return "wrong"; }
      void backward(Gradients& g) override { g.set(0, g.output()); }
    };
    Context context;
    const Tensor x = random_tensor(context, {3}, "x");
    const auto wrong = [](std::span<const Variable> in) {
      return record({in[0]}, scale(in[0].tensor(), 2.0),
                    [] { return std::make_unique<WrongNode>(); });
    };
    CHECK_THROWS_WITH_AS(gradcheck("wrong", wrong, std::vector<Tensor>{x}),
                         doctest::Contains("central differences give"), Error);
  }
}
