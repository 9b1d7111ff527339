// SPDX-License-Identifier: Apache-2.0
#include "calibration_cases.h"

#include <sherd/kernels/activation.h>
#include <sherd/kernels/attention.h>
#include <sherd/kernels/cross_entropy.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/layer_norm.h>
#include <sherd/kernels/matmul.h>
#include <sherd/kernels/optimizer.h>
#include <sherd/kernels/patch_embed.h>
#include <sherd/kernels/random.h>
#include <sherd/kernels/reduce.h>
#include <sherd/kernels/tokens.h>

#include <cmath>

namespace sherd::cli {
namespace {

using Call = std::function<void()>;
using Cases = std::vector<CalibrationCase>;

Tensor random(Context& context, const Shape& shape, DType dtype) {
  const Tensor out = Tensor::empty(context, shape, dtype);
  fill_normal(out, 0.0, 1.0, RandomStream(context.seed(), "calibrate", "values"));
  return out;
}

// A kernel over some tensors of one shape; call(tensors) computes.
template <typename Body>
void over(Cases& cases, const Shape& shape, DType dtype, std::size_t count, const Body& body) {
  cases.push_back({[=](Context& context) -> Call {
    std::vector<Tensor> x;
    for (std::size_t i = 0; i < count; ++i) x.push_back(random(context, shape, dtype));
    return [=] { body(x); };
  }});
}

using Tensors = std::vector<Tensor>;

void add_products(Cases& cases, std::int64_t rows, std::int64_t in, std::int64_t out, DType dtype) {
  const auto make = [=](auto body) {
    return [=](Context& context) -> Call {
      const Tensor x = random(context, {rows, in}, dtype), w = random(context, {out, in}, dtype),
                   g = random(context, {rows, out}, dtype), b = random(context, {out}, dtype);
      return [=] { body(x, w, g, b); };
    };
  };
  using T = const Tensor&;
  cases.push_back({make([](T x, T w, T, T b) { linear_forward(x, w, b); })});
  cases.push_back({make([](T, T w, T g, T) { linear_backward_input(g, w); })});
  cases.push_back({make([](T x, T, T g, T) { linear_backward_weight(g, x); })});
}

void add_attention(Cases& cases, std::int64_t batch, std::int64_t heads, std::int64_t tokens,
                   std::int64_t width, DType dtype) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(width));
  const auto part = [](const Tensor& x, std::int64_t index) { return x.select(2, index); };
  const Shape packed{batch, tokens, 3, heads, width};
  cases.push_back({[=](Context& context) -> Call {
    const Tensor x = random(context, packed, dtype);
    return [=] { attention_forward(part(x, 0), part(x, 1), part(x, 2), scale); };
  }});
  cases.push_back({[=](Context& context) -> Call {
    const Tensor x = random(context, packed, dtype), grads = Tensor::empty(context, packed, dtype);
    const Tensor g = random(context, {batch, tokens, heads, width}, dtype);
    const AttentionOutput forward = attention_forward(part(x, 0), part(x, 1), part(x, 2), scale);
    return [=] {
      attention_backward(g, part(x, 0), part(x, 1), part(x, 2), forward, scale, part(grads, 0),
                         part(grads, 1), part(grads, 2));
    };
  }});
}

void add_layer_norm(Cases& cases, const Shape& shape, DType dtype) {
  const Shape features{shape.dims().back()};
  const auto rows = [=](Context& context) {
    return Tensors{random(context, shape, dtype), random(context, shape, dtype),
                   random(context, features, dtype), random(context, features, dtype)};
  };
  cases.push_back({[=](Context& context) -> Call {
    const Tensors x = rows(context);
    return [=] { layer_norm_forward(x[0], x[2], x[3], 1e-6); };
  }});
  cases.push_back({[=](Context& context) -> Call {
    const Tensors x = rows(context);
    return [=] { layer_norm_forward(x[0], x[2], x[3], 1e-6, x[1]); };
  }});
  for (const bool accumulates : {false, true}) {
    cases.push_back({[=](Context& context) -> Call {
      const Tensors x = rows(context);
      const LayerNormOutput out = layer_norm_forward(x[0], x[2], x[3], 1e-6);
      const Tensor sum = accumulates ? random(context, shape, dtype) : Tensor();
      return [=] { layer_norm_backward(x[1], x[0], out.mean, out.rstd, x[2], true, true, sum); };
    }});
  }
}

void add_elementwise(Cases& cases, const Shape& shape, DType dtype) {
  const std::int64_t rows = shape.dim(0), columns = shape.dim(1);
  const RandomStream stream(1, "calibrate", "dropout");
  over(cases, shape, dtype, 1, [](const Tensors& x) { fill(x[0], 0.5); });
  over(cases, shape, dtype, 2, [](const Tensors& x) { add(x[0], x[1]); });
  over(cases, shape, dtype, 2, [](const Tensors& x) { add_inplace(x[0], x[1]); });
  over(cases, shape, dtype, 1, [](const Tensors& x) { scale(x[0], 0.5); });
  over(cases, shape, dtype, 1, [](const Tensors& x) { clone(x[0]); });
  over(cases, shape, dtype, 1, [stream](const Tensors& x) { dropout(x[0], 0.1, stream, 0); });
  over(cases, shape, dtype, 1, [](const Tensors& x) { linear_backward_bias(x[0]); });
  for (const Activation activation : {Activation::gelu_erf, Activation::relu}) {
    over(cases, shape, dtype, 1, [=](const Tensors& x) { activation_forward(x[0], activation); });
    over(cases, shape, dtype, 2,
         [=](const Tensors& x) { activation_backward(x[0], x[1], activation); });
  }
  // One of two columns of blocks, as views of packed tensors are.
  over(cases, {rows, 2, columns}, dtype, 1, [](const Tensors& x) { clone(x[0].select(1, 0)); });
  cases.push_back({[=](Context& context) -> Call {
    const Tensor x = random(context, shape, dtype), y = random(context, shape, dtype);
    const Tensor factors = random(context, {rows}, dtype == DType::f64 ? dtype : DType::f32);
    return [=] { add_scaled_rows(x, y, factors); };
  }});
  cases.push_back({[=](Context& context) -> Call {
    const Tensor x = random(context, shape, dtype);
    const Tensor factors = random(context, {rows}, dtype == DType::f64 ? dtype : DType::f32);
    return [=] { scale_rows(x, factors); };
  }});
  const DType other = dtype == DType::f32 ? DType::bf16 : DType::f32;
  over(cases, shape, dtype, 1, [other](const Tensors& x) { cast(x[0], other); });
  over(cases, shape, dtype, 1, [](const Tensors& x) { sum(x[0]); });
}

void add_tokens(Cases& cases, std::int64_t batch, std::int64_t side, std::int64_t dim,
                DType dtype) {
  const std::int64_t patch = 16, patches = side * side;
  over(cases, {batch, 3, side * patch, side * patch}, dtype, 1, [=](const Tensors& x) {
    patchify(x[0], {1, patch, patch});
  });
  cases.push_back({[=](Context& context) -> Call {
    const Tensor tokens = random(context, {batch, patches, dim}, dtype);
    const Tensor first = random(context, {1, 1, dim}, dtype);
    const Tensor position = random(context, {1, patches + 1, dim}, dtype);
    return [=] { assemble_tokens(tokens, first, position); };
  }});
  const Shape all{batch, patches + 1, dim};
  over(cases, all, dtype, 1, [](const Tensors& x) { assemble_tokens_backward(x[0], true); });
  over(cases, all, dtype, 1, [](const Tensors& x) { select_token(x[0], 0); });
  over(cases, all, dtype, 1, [](const Tensors& x) { mean_tokens(x[0], 1); });
  over(cases, {batch, dim}, dtype, 1,
       [=](const Tensors& x) { select_token_backward(x[0], patches + 1, 0); });
  over(cases, {batch, dim}, dtype, 1,
       [=](const Tensors& x) { mean_tokens_backward(x[0], patches + 1, 1); });
}

void add_loss(Cases& cases, std::int64_t rows, std::int64_t classes, DType dtype) {
  const auto target = [=](Context& context) {
    CrossEntropyTarget made;
    made.labels = Tensor::zeros(context, {rows}, DType::i64, MemoryCategory::activations);
    return made;
  };
  cases.push_back({[=](Context& context) -> Call {
    const Tensor logits = random(context, {rows, classes}, dtype);
    return [=, labels = target(context)] { cross_entropy_forward(logits, labels); };
  }});
  cases.push_back({[=](Context& context) -> Call {
    const Tensor logits = random(context, {rows, classes}, dtype);
    const CrossEntropyTarget labels = target(context);
    const Tensor one = full(context, {1}, dtype == DType::f64 ? dtype : DType::f32, 1.0);
    const CrossEntropyOutput out = cross_entropy_forward(logits, labels);
    return [=] { cross_entropy_backward(one, logits, labels, out.lse, 1.0); };
  }});
}

void add_updates(Cases& cases, std::int64_t count, DType dtype) {
  const AdamWStep step{1e-3, 0.9, 0.999, 1e-8, 0.05, 1};
  const DType master = dtype == DType::f64 ? DType::f64 : DType::f32;
  cases.push_back({[=](Context& context) -> Call {
    const Tensor x = random(context, {count}, master), g = random(context, {count}, master);
    const Tensor a = full(context, {count}, master, 0.0), b = full(context, {count}, master, 1.0);
    const Tensor rounded = size_of(dtype) == 2 ? Tensor::empty(context, {count}, dtype) : Tensor();
    return [=] { adamw_update(x, g, a, b, step, {}, {}, rounded); };
  }});
  over(cases, {count}, master, 3, [](const Tensors& x) {
    sgd_update(x[0], x[1], x[2], {1e-3, 0.9, 0.05, false});
  });
  cases.push_back({[=](Context& context) -> Call {
    const Tensor x = random(context, {count}, master);
    return [=, &context] {
      SquareSum squares(context);
      squares.add(x);
    };
  }});
}

}  // namespace

std::vector<CalibrationCase> calibration_cases(DType dtype, bool quick, std::int64_t scale) {
  Cases cases;
  for (const auto& [base, dim] : {std::pair<std::int64_t, std::int64_t>{128, 64},
                                  {394, 192},
                                  {788, 384},
                                  {1576, 768},
                                  {1028, 1280}}) {
    if (quick && dim > 64) break;
    const std::int64_t rows = base * scale;
    add_layer_norm(cases, {rows, dim}, dtype);
    add_elementwise(cases, {rows, dim}, dtype);
    add_elementwise(cases, {rows, 4 * dim}, dtype);
    for (const auto& [in, out] :
         {std::pair{dim, 3 * dim}, {dim, dim}, {dim, 4 * dim}, {4 * dim, dim}}) {
      add_products(cases, rows, in, out, dtype);
      add_products(cases, rows / 2, in, out, dtype);
    }
    add_products(cases, rows / 100 + 1, dim, 1000, dtype);  // a head
  }
  add_attention(cases, 8 * scale, 4, 17, 16, dtype);
  add_attention(cases, 2 * scale, 3, 197, 64, dtype);
  add_tokens(cases, 2 * scale, 2, 64, dtype);
  add_loss(cases, 8, 10, dtype);
  add_loss(cases, 8, 1000, dtype);
  add_updates(cases, 1 << 10, dtype);
  add_updates(cases, 1 << 15, dtype);
  if (quick) return cases;
  add_attention(cases, 8 * scale, 12, 197, 64, dtype);
  add_attention(cases, 8 * scale, 12, 50, 64, dtype);
  add_attention(cases, 4 * scale, 16, 257, 80, dtype);
  add_attention(cases, 1 * scale, 12, 577, 64, dtype);
  add_tokens(cases, 2 * scale, 14, 192, dtype);
  add_tokens(cases, 8 * scale, 14, 768, dtype);
  add_loss(cases, 128, 10, dtype);
  add_loss(cases, 128, 1000, dtype);
  add_updates(cases, 1 << 19, dtype);
  add_updates(cases, 7 << 20, dtype);
  return cases;
}

}  // namespace sherd::cli
