// SPDX-License-Identifier: Apache-2.0
// Every differentiable operation against central differences in fp64, odd shapes and strided views
// included. One table: a name, the shapes of its inputs, the function.
#include <doctest/doctest.h>
#include <sherd/autograd/gradcheck.h>
#include <sherd/autograd/operations.h>
#include <sherd/autograd/tape.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/random.h>
#include <sherd/models/vit.h>

#include <cmath>

using namespace sherd;

namespace {

struct Case {
  std::string name;
  std::vector<Shape> inputs;
  std::function<Variable(std::span<const Variable>)> f;
};

Tensor random_tensor(Context& context, const Shape& shape, const std::string& name) {
  const Tensor x = Tensor::empty(context, shape, DType::f64);
  fill_normal(x, 0.1, 0.9, RandomStream(3, "test", name));
  return x;
}

// The same values behind other strides: dimensions stored in reverse, with a gap.
Tensor strided(const Tensor& x) {
  std::vector<std::int64_t> dims(x.shape().dims().rbegin(), x.shape().dims().rend());
  std::vector<int> order;
  for (int i = x.rank() - 1; i >= 0; --i) order.push_back(i);
  dims.back() += 1;
  const Tensor wide =
      Tensor::zeros(x.context(), Shape(std::span<const std::int64_t>(dims)), x.dtype());
  const Tensor view = wide.slice(x.rank() - 1, 0, dims.back() - 1).permute(order);
  const std::vector<double> values = x.to_vector<double>();
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    std::int64_t rest = i, offset = 0;
    for (int d = x.rank() - 1; d >= 0; --d) {
      offset += rest % x.dim(d) * view.stride(d);
      rest /= x.dim(d);
    }
    wide.data<double>()[offset] = values[static_cast<std::size_t>(i)];
  }
  return view;
}

CrossEntropyTarget some_labels(Context& context, std::int64_t rows, std::int64_t classes,
                               double smoothing) {
  std::vector<std::int64_t> labels;
  for (std::int64_t r = 0; r < rows; ++r) labels.push_back((r * 7 + 3) % classes);
  return {Tensor::from_host<std::int64_t>(context, {rows}, labels), {}, smoothing};
}

CrossEntropyTarget some_probabilities(Context& context, std::int64_t rows, std::int64_t classes) {
  std::vector<double> p(static_cast<std::size_t>(rows * classes));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < classes; ++c) {
      p[static_cast<std::size_t>(r * classes + c)] =
          2.0 * static_cast<double>(c + 1) / static_cast<double>(classes * (classes + 1));
    }
  }
  return {{}, Tensor::from_host<double>(context, {rows, classes}, p), 0.0};
}

Case attention_case(std::int64_t batch, std::int64_t n, std::int64_t m, std::int64_t heads,
                    std::int64_t dim) {
  return {
      "attention n=" + std::to_string(n) + " m=" + std::to_string(m) + " d=" + std::to_string(dim),
      {{batch, n, heads, dim}, {batch, m, heads, dim}, {batch, m, heads, dim}},
      [dim](auto in) {
        return attention(in[0], in[1], in[2], 1.0 / std::sqrt(static_cast<double>(dim)));
      }};
}

Case packed_case(std::int64_t batch, std::int64_t n, std::int64_t heads, std::int64_t dim) {
  return {"attention_packed n=" + std::to_string(n) + " d=" + std::to_string(dim),
          {{batch, n, 3 * heads * dim}},
          [=](auto in) {
            return attention_packed(in[0], heads, 1.0 / std::sqrt(static_cast<double>(dim)));
          }};
}

std::vector<Case> cases(Context& context) {
  return {
      {"add", {{3, 17}, {3, 17}}, [](auto in) { return add(in[0], in[1]); }},
      {"add of itself", {{5}}, [](auto in) { return add(in[0], in[0]); }},
      {"scale", {{7, 3}}, [](auto in) { return scale(in[0], -1.7); }},
      {"cast", {{4, 5}}, [](auto in) { return cast(in[0], DType::f64); }},
      {"reshape",
       {{2, 3, 4}},
       [](auto in) {
         return reshape(in[0], {6, 4});
       }},
      {"permute",
       {{2, 3, 4}},
       [](auto in) {
         return permute(in[0], {2, 0, 1});
       }},
      {"sum", {{3, 5, 2}}, [](auto in) { return sum(in[0]); }},
      {"matmul", {{5, 7}, {7, 3}}, [](auto in) { return matmul(in[0], in[1]); }},
      {"linear", {{2, 5, 7}, {3, 7}, {3}}, [](auto in) { return linear(in[0], in[1], in[2]); }},
      {"linear without bias", {{4, 7}, {3, 7}}, [](auto in) { return linear(in[0], in[1], {}); }},
      {"linear with gelu",
       {{3, 5}, {4, 5}, {4}},
       [](auto in) { return linear_activation(in[0], in[1], in[2], Activation::gelu_erf); }},
      {"relu", {{3, 17}}, [](auto in) { return activate(in[0], Activation::relu); }},
      {"gelu", {{3, 17}}, [](auto in) { return activate(in[0], Activation::gelu_erf); }},
      {"gelu_tanh", {{3, 17}}, [](auto in) { return activate(in[0], Activation::gelu_tanh); }},
      {"layer_norm",
       {{2, 3, 19}, {19}, {19}},
       [](auto in) { return layer_norm(in[0], in[1], in[2], 1e-6); }},
      {"layer_norm, 150 rows",
       {{150, 5}, {5}, {5}},
       [](auto in) { return layer_norm(in[0], in[1], in[2], 1e-5); }},
      {"layer_norm beside a residual",
       {{4, 9}, {9}, {9}},
       [](auto in) { return add(in[0], layer_norm(in[0], in[1], in[2], 1e-6)); }},
      attention_case(1, 1, 1, 1, 1),
      attention_case(2, 5, 3, 2, 4),
      attention_case(1, 50, 50, 1, 64),
      attention_case(1, 17, 33, 2, 80),
      attention_case(1, 197, 197, 1, 64),
      attention_case(1, 257, 257, 1, 80),
      packed_case(2, 1, 3, 4),
      packed_case(2, 17, 2, 5),
      packed_case(1, 50, 2, 64),
      {"cross_entropy",
       {{6, 5}},
       [&](auto in) { return cross_entropy(in[0], some_labels(context, 6, 5, 0.0)); }},
      {"cross_entropy, smoothed",
       {{6, 10}},
       [&](auto in) { return cross_entropy(in[0], some_labels(context, 6, 10, 0.1), 8); }},
      {"cross_entropy, soft targets",
       {{4, 7}},
       [&](auto in) { return cross_entropy(in[0], some_probabilities(context, 4, 7)); }},
      {"patchify",
       {{2, 3, 8, 4}},
       [](auto in) {
         return patchify(in[0], {1, 4, 2});
       }},
      {"patchify 3-D",
       {{2, 3, 4, 4, 6}},
       [](auto in) {
         return patchify(in[0], {2, 2, 3});
       }},
      {"assemble_tokens",
       {{2, 4, 5}, {1, 1, 5}, {1, 5, 5}},
       [](auto in) { return assemble_tokens(in[0], in[1], in[2]); }},
      {"assemble_tokens without class token",
       {{2, 4, 5}, {1, 4, 5}},
       [](auto in) { return assemble_tokens(in[0], {}, in[1]); }},
      {"select_token", {{2, 4, 5}}, [](auto in) { return select_token(in[0], 2); }},
      {"mean_tokens", {{2, 4, 5}}, [](auto in) { return mean_tokens(in[0], 1); }},
      {"dropout", {{4, 33}}, [](auto in) { return dropout(in[0], 0.3, "layer"); }},
      {"drop_path",
       {{9, 3, 5}, {9, 3, 5}},
       [](auto in) { return add_drop_path(in[0], in[1], 0.4, "layer"); }},
  };
}

}  // namespace

TEST_SUITE("gradcheck") {
  TEST_CASE("every operation, contiguous inputs") {
    Context context({.threads = 2, .seed = 5});
    for (const Case& test : cases(context)) {
      CAPTURE(test.name);
      std::vector<Tensor> inputs;
      for (const Shape& shape : test.inputs) {
        inputs.push_back(random_tensor(context, shape, test.name + std::to_string(inputs.size())));
      }
      CHECK_NOTHROW(gradcheck(test.name, test.f, inputs));
    }
  }

  TEST_CASE("every operation, strided inputs") {
    Context context({.threads = 2, .seed = 5});
    for (const Case& test : cases(context)) {
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
      CHECK_NOTHROW(gradcheck(test.name, transposed, inputs, {.max_elements = 40}));
    }
  }

  TEST_CASE("every operation on meta: the shapes and the bytes of the CPU") {
    const auto run_on = [](Device device, DType dtype) {
      Context context({.device = device, .threads = 2, .seed = 5});
      std::vector<std::pair<std::string, MemoryBreakdown>> results;
      for (const Case& test : cases(context)) {
        if (test.name.find("soft targets") != std::string::npos && dtype != DType::f64) continue;
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
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
      const auto real = run_on(Device::cpu, dtype), plan = run_on(Device::meta, dtype);
      REQUIRE(real.size() == plan.size());
      for (std::size_t i = 0; i < real.size(); ++i) {
        CAPTURE(real[i].first);
        CHECK(plan[i].first == real[i].first);
        CHECK(plan[i].second == real[i].second);
      }
    }
  }

  TEST_CASE("recomputed modules of a ViT") {
    Context context({.threads = 2, .seed = 5});
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
      CHECK_NOTHROW(gradcheck(
          entry.first, [&](auto in) { return (*module)(in[0]); }, inputs));
      CHECK(forwards == 2 + 2 * 4 * 3 * 6);  // two for the gradient
    }
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
