// SPDX-License-Identifier: Apache-2.0
#include "kernel_cases.h"

#include <fmt/format.h>
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

#include <algorithm>
#include <cmath>
#include <numeric>

namespace sherd::cli {
namespace {

// Values as a network has them: constants make products run at higher clocks.
Tensor random(Context& context, const Shape& shape, DType dtype) {
  const Tensor out = Tensor::empty(context, shape, dtype);
  fill_normal(out, 0.0, 1.0, RandomStream(context.seed(), "bench", "values"));
  return out;
}

std::int64_t bytes_of(std::initializer_list<Tensor> tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), std::int64_t{0},
                         [](std::int64_t sum, const Tensor& x) {
                           return sum + x.numel() * static_cast<std::int64_t>(size_of(x.dtype()));
                         });
}

std::string rows_text(std::int64_t rows, std::int64_t columns) {
  return fmt::format("{} x {}", rows, columns);
}

}  // namespace

void visit_products(Context& context, const KernelSizes& sizes, const KernelCaseVisitor& visit) {
  const ViTSettings& model = sizes.model;
  const std::int64_t rows = sizes.batch * model.tokens(), dim = model.dim;
  const std::int64_t inner = model.heads * model.head_dim;
  const struct {
    const char* name;
    std::int64_t in, out;
  } layers[] = {{"qkv", dim, 3 * inner},
                {"proj", inner, dim},
                {"fc1", dim, model.hidden()},
                {"fc2", model.hidden(), dim}};
  for (const auto& layer : layers) {
    const Tensor input = random(context, {rows, layer.in}, sizes.dtype);
    const Tensor grad = random(context, {rows, layer.out}, sizes.dtype);
    const Tensor weight = random(context, {layer.out, layer.in}, sizes.dtype);
    const Tensor bias = random(context, {layer.out}, sizes.dtype);
    const std::string shape = fmt::format("{} x {} x {}", rows, layer.out, layer.in);
    const auto show = [&](const char* what, const std::function<void()>& call) {
      visit({fmt::format("{} {}", layer.name, what), shape, sizes.dtype, 0, call});
    };
    show("forward", [&] { linear_forward(input, weight, {}); });
    show("forward, bias", [&] { linear_forward(input, weight, bias); });
    if (std::string_view(layer.name) == "fc1") {
      show("forward, bias, GELU",
           [&] { linear_forward(input, weight, bias, Activation::gelu_erf); });
    }
    show("input gradient", [&] { linear_backward_input(grad, weight); });
    show("weight gradient", [&] { linear_backward_weight(grad, input); });
    visit({fmt::format("{} bias gradient", layer.name), rows_text(rows, layer.out), sizes.dtype,
           bytes_of({grad}), [&] { linear_backward_bias(grad); }});
  }
}

void visit_attention(Context& context, const KernelSizes& sizes, std::int64_t tokens,
                     const KernelCaseVisitor& visit) {
  const std::int64_t heads = sizes.model.heads, width = sizes.model.head_dim;
  const std::int64_t batch = std::max<std::int64_t>(1, sizes.batch * sizes.model.tokens() / tokens);
  // Views of one tensor, as the model has them.
  const Tensor packed = random(context, {batch, tokens, 3, heads, width}, sizes.dtype);
  const Tensor packed_grad = Tensor::empty(context, packed.shape(), sizes.dtype);
  const auto part = [](const Tensor& x, std::int64_t index) { return x.select(2, index); };
  const Tensor q = part(packed, 0), k = part(packed, 1), v = part(packed, 2);
  const double scale = 1.0 / std::sqrt(static_cast<double>(width));
  const std::string shape = fmt::format("B {}, H {}, N {}, D {}", batch, heads, tokens, width);
  visit({"attention forward", shape, sizes.dtype, 0, [&] { attention_forward(q, k, v, scale); }});
  const AttentionOutput forward = attention_forward(q, k, v, scale);
  const Tensor grad = random(context, forward.output.shape(), sizes.dtype);
  visit({"attention backward", shape, sizes.dtype, 0, [&] {
           attention_backward(grad, q, k, v, forward, scale, part(packed_grad, 0),
                              part(packed_grad, 1), part(packed_grad, 2));
         }});
}

namespace {

void visit_layer_norm(Context& context, std::int64_t rows, std::int64_t dim, DType dtype,
                      const KernelCaseVisitor& visit) {
  const Tensor input = random(context, {rows, dim}, dtype);
  const Tensor grad = random(context, {rows, dim}, dtype);
  const Tensor weight = random(context, {dim}, dtype), bias = random(context, {dim}, dtype);
  const LayerNormOutput out = layer_norm_forward(input, weight, bias, 1e-6);
  visit({"layer norm forward", rows_text(rows, dim), dtype,
         bytes_of({input, out.output, out.mean, out.rstd}),
         [&] { layer_norm_forward(input, weight, bias, 1e-6); }});
  visit({"layer norm backward", rows_text(rows, dim), dtype,
         bytes_of({grad, input, input, out.mean, out.rstd}),
         [&] { layer_norm_backward(grad, input, out.mean, out.rstd, weight, true, true); }});
}

void visit_loss(Context& context, std::int64_t rows, std::int64_t classes, DType dtype,
                const KernelCaseVisitor& visit) {
  const Tensor logits = random(context, {rows, classes}, dtype);
  std::vector<std::int64_t> labels(static_cast<std::size_t>(rows));
  for (std::size_t i = 0; i < labels.size(); ++i)
    labels[i] = static_cast<std::int64_t>(i * 7) % classes;
  CrossEntropyTarget target;
  target.labels = Tensor::from_host<std::int64_t>(context, {rows}, labels);
  const Tensor one = full(context, {1}, dtype == DType::f64 ? DType::f64 : DType::f32, 1.0);
  const CrossEntropyOutput out = cross_entropy_forward(logits, target);
  visit({"cross entropy forward", rows_text(rows, classes), dtype, bytes_of({logits}),
         [&] { cross_entropy_forward(logits, target); }});
  visit({"cross entropy backward", rows_text(rows, classes), dtype, bytes_of({logits, logits}),
         [&] { cross_entropy_backward(one, logits, target, out.lse, 1.0); }});
}

}  // namespace

void visit_memory_bound(Context& context, const KernelSizes& sizes,
                        const KernelCaseVisitor& visit) {
  const ViTSettings& model = sizes.model;
  const std::int64_t rows = sizes.batch * model.tokens(), dim = model.dim;
  visit_layer_norm(context, rows, dim, sizes.dtype, visit);
  if (sizes.dtype != DType::f32) visit_layer_norm(context, rows, dim, DType::f32, visit);
  const RandomStream stream(context.seed(), "bench", "dropout");
  {
    const Tensor x = random(context, {rows, model.hidden()}, sizes.dtype);
    const Tensor grad = random(context, x.shape(), sizes.dtype);
    const std::string shape = rows_text(rows, model.hidden());
    visit({"GELU forward", shape, sizes.dtype, bytes_of({x, x}),
           [&] { activation_forward(x, Activation::gelu_erf); }});
    visit({"GELU backward", shape, sizes.dtype, bytes_of({x, grad, x}),
           [&] { activation_backward(grad, x, Activation::gelu_erf); }});
    visit({"dropout", shape, sizes.dtype, bytes_of({x, x}), [&] { dropout(x, 0.1, stream, 0); }});
  }
  {
    const Tensor x = random(context, {rows, dim}, sizes.dtype);
    const Tensor y = random(context, {rows, dim}, sizes.dtype);
    visit({"add", rows_text(rows, dim), sizes.dtype, bytes_of({x, y, x}), [&] { add(x, y); }});
  }
  {
    const std::int64_t channels = model.channels, patch = model.patch;
    const Tensor images = random(
        context, {sizes.batch, channels, model.image_height, model.image_width}, sizes.dtype);
    const Tensor tokens = random(context, {sizes.batch, model.patches(), dim}, sizes.dtype);
    const Tensor first = random(context, {1, 1, dim}, sizes.dtype);
    const Tensor position = random(context, {1, model.tokens(), dim}, sizes.dtype);
    const Tensor weight = random(context, {dim, channels, patch, patch}, sizes.dtype);
    const Tensor bias = random(context, {dim}, sizes.dtype);
    const PatchSize size{1, patch, patch};
    const std::string shape = fmt::format("{} images of {} x {} x {}", sizes.batch, channels,
                                          model.image_height, model.image_width);
    visit({"patchify", shape, sizes.dtype, bytes_of({images, images}),
           [&] { patchify(images, size); }});
    // Beside the same by a product over a matrix of patches.
    const auto show = [&](const char* name, const std::function<void()>& call) {
      visit({name, shape, sizes.dtype, 0, call});
    };
    show("patch embedding", [&] { patch_embed_forward(images, weight, bias, size); });
    show("patchify, product", [&] { linear_forward(patchify(images, size), weight, bias); });
    show("patch weight gradient", [&] { patch_embed_backward_weight(tokens, images, size); });
    show("patchify, weight gradient",
         [&] { linear_backward_weight(tokens, patchify(images, size)); });
    visit({"assemble tokens", rows_text(rows, dim), sizes.dtype, bytes_of({tokens, tokens}),
           [&] { assemble_tokens(tokens, first, position); }});
  }
  visit_loss(context, sizes.batch, model.classes, sizes.dtype, visit);
  // What an optimizer does with the parameters of a block.
  const std::int64_t count = 12 * dim * dim;
  const std::string shape = fmt::format("{}", count);
  const Tensor master = random(context, {count}, DType::f32);
  const Tensor grad = random(context, {count}, DType::f32);
  const Tensor average = full(context, {count}, DType::f32, 0.0);
  const Tensor average_square = full(context, {count}, DType::f32, 1.0);
  const AdamWStep step{1e-3, 0.9, 0.999, 1e-8, 0.05, 1};
  const std::int64_t updated =
      bytes_of({master, master, grad, average, average, average_square, average_square});
  visit({"AdamW", shape, DType::f32, updated,
         [&] { adamw_update(master, grad, average, average_square, step); }});
  const DType narrow = sizes.dtype == DType::f32 ? DType::bf16 : sizes.dtype;
  // And with the copy of the parameters that forward reads.
  const Tensor rounded = Tensor::empty(context, {count}, narrow);
  visit({fmt::format("AdamW, rounded to {}", name_of(narrow)), shape, DType::f32,
         updated + bytes_of({rounded}),
         [&] { adamw_update(master, grad, average, average_square, step, {}, {}, rounded); }});
  visit({fmt::format("cast to {}", name_of(narrow)), shape, DType::f32,
         count * static_cast<std::int64_t>(4 + size_of(narrow)), [&] { cast(master, narrow); }});
  ExactSum squares;
  visit({"sum of squares, exact", shape, DType::f32, bytes_of({grad}),
         [&] { add_sum_of_squares(grad, squares); }});
}

}  // namespace sherd::cli
