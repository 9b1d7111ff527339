// SPDX-License-Identifier: Apache-2.0
// Note [Attention as cuDNN knows it]
// Forward is one operation of cuDNN (since 9.13), or where no engine takes that one, the products
// and the softmax that its engines know together as attention. Backward has an operation too, but
// no engine of 9.19 is proposed for it, so it is the graph of products. In graphs keys (and values,
// in backward) are given transposed; between two products everything is fp32 but what a product
// reads, which is of the tensors' type. Engines go by the shape of the whole graph: without the
// product by 1 in backward, which seems idle, they take more workspace.
//
// The gradient of the queries is what may be summed in an order that changes: with a tensor of fp32
// between dS k and it, blocks of keys add to that tensor as they come. Without that tensor engines
// keep dS in workspace and sum in one order: 2 bytes for each sample, head, query and key, queries
// and keys rounded up to 128. The note by which cuDNN marks nondeterministic engines says nothing
// here: in 9.19 it stands beside neither.
//
// Statistics and the sums of dO * O must be gapless: for other strides engines give wrong gradients
// and no error. The natural log-sum-exp that forward writes is the one that backward subtracts, so
// either may be ours.
#include <sherd/kernels/cuda/attention_cudnn.h>
#include <sherd/kernels/cuda/cudnn_graph.h>

#include <map>
#include <optional>

namespace sherd::cuda {
namespace {

using cudnn::Extents;
using cudnn::Graph;
using cudnn::Plan;

// Numbers of the tensors with memory.
enum Id : std::int64_t {
  kQ = 1,
  kK,
  kV,
  kScale,
  kOut,
  kLse,
  kOne,
  kGradOut,
  kSums,
  kGradQ,
  kGradK,
  kGradV
};

constexpr std::size_t kOldest = 91600;  // before it backward was wrong for some numbers of keys

template <typename T>
constexpr DType kDType = std::is_same_v<T, f16> ? DType::f16 : DType::bf16;

// A view of [batch, heads, tokens, head_dim] without its address.
struct Layout {
  const char* name;
  Extents sizes, strides;
};

template <typename T>
Layout layout_of(const char* name, const AttentionShape& s, std::int64_t tokens,
                 const AttentionView<T>& view) {
  // Where a size is 1 its stride means nothing, and is not the reason for another plan.
  const std::int64_t head = s.heads > 1 ? view.head_stride : s.head_dim;
  const std::int64_t token = tokens > 1 ? view.token_stride : s.heads * head;
  const std::int64_t batch = s.batch > 1 ? view.batch_stride : tokens * token;
  return {name, {s.batch, s.heads, tokens, s.head_dim}, {batch, head, token, 1}};
}

Layout transposed(Layout layout) {
  std::swap(layout.sizes[2], layout.sizes[3]);
  std::swap(layout.strides[2], layout.strides[3]);
  return layout;
}

// In the order of the calls.
using Layouts = std::vector<Layout>;

template <typename T>
Layouts forward_layouts(const AttentionShape& s, AttentionView<const T> q, AttentionView<const T> k,
                        AttentionView<const T> v, AttentionView<T> output) {
  return {layout_of("query", s, s.queries, q), layout_of("key", s, s.keys, k),
          layout_of("value", s, s.keys, v), layout_of("output", s, s.queries, output)};
}

template <typename T>
Layouts backward_layouts(const AttentionShape& s, AttentionView<const T> grad_output,
                         AttentionView<const T> q, AttentionView<const T> k,
                         AttentionView<const T> v, AttentionView<const T> output,
                         AttentionView<T> grad_q, AttentionView<T> grad_k,
                         AttentionView<T> grad_v) {
  return {layout_of("query", s, s.queries, q),
          layout_of("key", s, s.keys, k),
          layout_of("value", s, s.keys, v),
          layout_of("output", s, s.queries, output),
          layout_of("gradient of the output", s, s.queries, grad_output),
          layout_of("gradient of the query", s, s.queries, grad_q),
          layout_of("gradient of the key", s, s.keys, grad_k),
          layout_of("gradient of the value", s, s.keys, grad_v)};
}

Extents row_statistics(const AttentionShape& s) {
  return {s.batch, s.heads, s.queries, 1};
}
Extents row_strides(const AttentionShape& s) {
  return {s.heads * s.queries, s.queries, 1, 1};
}

Graph forward_operation(const AttentionShape& s, DType dtype, const Layouts& l) {
  Graph g;
  for (const Id id : {kQ, kK, kV}) g.tensor(id, dtype, l[id - kQ].sizes, l[id - kQ].strides);
  g.tensor(kOut, dtype, l[3].sizes, l[3].strides);
  g.tensor(kLse, DType::f32, row_statistics(s), row_strides(s));
  g.scalar(kScale);
  g.attention_forward(kQ, kK, kV, kScale, kOut, kLse);
  return g;
}

Graph forward_products(const AttentionShape& s, DType dtype, const Layouts& l) {
  Graph g;
  const Layout keys = transposed(l[1]);
  g.tensor(kQ, dtype, l[0].sizes, l[0].strides);
  g.tensor(kK, dtype, keys.sizes, keys.strides);
  g.tensor(kV, dtype, l[2].sizes, l[2].strides);
  g.tensor(kOut, dtype, l[3].sizes, l[3].strides);
  g.tensor(kLse, DType::f32, row_statistics(s), row_strides(s));
  g.scalar(kScale);
  const Extents all{s.batch, s.heads, s.queries, s.keys}, rows = row_statistics(s);
  const auto products = g.between(DType::f32, all), scores = g.between(DType::f32, all),
             shifted = g.between(DType::f32, all), exponentials = g.between(DType::f32, all),
             probabilities = g.between(dtype, all), largest = g.between(DType::f32, rows),
             sums = g.between(DType::f32, rows), logarithms = g.between(DType::f32, rows);
  g.matmul(kQ, kK, products);
  g.pointwise(CUDNN_POINTWISE_MUL, products, kScale, scores);
  g.reduce(CUDNN_REDUCE_TENSOR_MAX, scores, largest);
  g.pointwise(CUDNN_POINTWISE_SUB, scores, largest, shifted);
  g.pointwise(CUDNN_POINTWISE_EXP, shifted, exponentials);
  g.reduce(CUDNN_REDUCE_TENSOR_ADD, exponentials, sums);
  g.pointwise(CUDNN_POINTWISE_LOG, sums, logarithms);
  g.pointwise(CUDNN_POINTWISE_ADD, largest, logarithms, kLse);
  g.pointwise(CUDNN_POINTWISE_DIV, exponentials, sums, probabilities);
  g.matmul(probabilities, kV, kOut);
  return g;
}

Graph backward_products(const AttentionShape& s, DType dtype, const Layouts& l) {
  Graph g;
  const Layout keys = transposed(l[1]), values = transposed(l[2]);
  g.tensor(kQ, dtype, l[0].sizes, l[0].strides);
  g.tensor(kK, dtype, keys.sizes, keys.strides);
  g.tensor(kV, dtype, values.sizes, values.strides);
  g.tensor(kOut, dtype, l[3].sizes, l[3].strides);
  g.tensor(kGradOut, dtype, l[4].sizes, l[4].strides);
  g.tensor(kGradQ, dtype, l[5].sizes, l[5].strides);
  g.tensor(kGradK, dtype, l[6].sizes, l[6].strides);
  g.tensor(kGradV, dtype, l[7].sizes, l[7].strides);
  g.tensor(kLse, DType::f32, row_statistics(s), row_strides(s));
  g.tensor(kSums, DType::f32, row_statistics(s), row_strides(s));
  g.scalar(kScale);
  g.scalar(kOne);
  const Extents all{s.batch, s.heads, s.queries, s.keys};
  const Extents turned{s.batch, s.heads, s.keys, s.queries};
  const Extents turned_strides{s.heads * s.queries * s.keys, s.queries * s.keys, 1, s.keys};
  const auto fp32 = [&] { return g.between(DType::f32, all); };

  // sums = row sums of dO * O
  const auto weighted = g.between(DType::f32, l[3].sizes);
  const auto sums = g.between(DType::f32, row_statistics(s));
  g.pointwise(CUDNN_POINTWISE_MUL, kGradOut, kOut, weighted);
  g.reduce(CUDNN_REDUCE_TENSOR_ADD, weighted, sums);
  g.pointwise(CUDNN_POINTWISE_MUL, sums, kOne, kSums);
  // P = exp(scale q kᵀ - lse); dV = Pᵀ dO
  const auto products = fp32(), scores = fp32(), shifted = fp32(), probabilities = fp32();
  const auto probabilities_t = g.between(dtype, turned, turned_strides);
  g.matmul(kQ, kK, products);
  g.pointwise(CUDNN_POINTWISE_MUL, products, kScale, scores);
  g.pointwise(CUDNN_POINTWISE_SUB, scores, kLse, shifted);
  g.pointwise(CUDNN_POINTWISE_EXP, shifted, probabilities);
  g.reshape(probabilities, probabilities_t);
  g.matmul(probabilities_t, kGradOut, kGradV);
  // dS = scale P * (dO vᵀ - sums); dK = dSᵀ q
  const auto grad_p = fp32(), centred = fp32(), unscaled = fp32(), grad_s = fp32();
  const auto grad_s_t = g.between(dtype, turned, turned_strides);
  g.matmul(kGradOut, kV, grad_p);
  g.pointwise(CUDNN_POINTWISE_SUB, grad_p, kSums, centred);
  g.pointwise(CUDNN_POINTWISE_MUL, centred, probabilities, unscaled);
  g.pointwise(CUDNN_POINTWISE_MUL, unscaled, kScale, grad_s);
  g.reshape(grad_s, grad_s_t);
  g.matmul(grad_s_t, kQ, kGradK);
  // dQ = dS k
  const auto keys_again = g.between(dtype, l[1].sizes, l[1].strides);
  g.reshape(kK, keys_again);
  g.matmul(grad_s, keys_again, kGradQ);
  return g;
}

// What holds for every GPU; empty where nothing is against it.
std::string refusal(const Context& context, const AttentionShape& s, DType dtype) {
  if (cudnnGetVersion() < kOldest)
    return fmt::format("needs cuDNN 9.16 or later, this is {}", cudnn::version());
  if (context.device() != Device::cuda)
    return fmt::format("makes its plans on a GPU, the context is on {}", name_of(context.device()));
  if (dtype != DType::bf16 && dtype != DType::f16)
    return fmt::format("takes bf16 and f16, got {}", name_of(dtype));
  if (s.head_dim % 8 != 0)
    return fmt::format("needs a head dimension that is a multiple of 8, got {}", s.head_dim);
  return {};
}

void check_layouts(const Layouts& layouts) {
  for (const Layout& layout : layouts) {
    for (int i = 0; i < 3; ++i) {
      SHERD_CHECK(layout.strides[i] > 0 && layout.strides[i] % 8 == 0,
                  "the {} has strides [{}, {}, {}] of samples, heads and tokens, cuDNN needs "
                  "multiples of 8 elements",
                  layout.name, layout.strides[0], layout.strides[1], layout.strides[2]);
    }
  }
}

std::string describe(const AttentionShape& s, DType dtype, bool backward) {
  return fmt::format(
      "attention by cuDNN, {} of {} with {} samples, {} heads, {} queries, {} keys and a head "
      "dimension of {}",
      backward ? "backward" : "forward", name_of(dtype), s.batch, s.heads, s.queries, s.keys,
      s.head_dim);
}

// One of a context. Plans that cannot be are remembered by why.
struct Plans {
  struct Made {
    std::optional<Plan> plan;
    std::string why;
  };
  cudnn::Handle handle;
  std::map<std::vector<std::int64_t>, Made> made;

  static Plans& of(Context& context) { return context.attachment<Plans>(); }
  const Plan& get(Context& context, const AttentionShape& s, DType dtype, const Layouts& layouts);

 private:
  Plan make(Context& context, const AttentionShape& s, DType dtype, const Layouts& layouts);
};

bool is_backward(const Layouts& layouts) {
  return layouts.size() > 4;
}

Plan Plans::make(Context& context, const AttentionShape& s, DType dtype, const Layouts& layouts) {
  const std::string against = refusal(context, s, dtype);
  SHERD_CHECK(against.empty(), "it {}", against);
  check_layouts(layouts);
  const cudnnHandle_t cudnn = handle.get(context.compute_stream().native());
  if (is_backward(layouts)) {
    SHERD_CHECK(s.queries > 1 || s.keys > 1, "it has none of one query and one key");
    return backward_products(s, dtype, layouts).plan(cudnn);
  }
  try {
    return forward_operation(s, dtype, layouts).plan(cudnn);
  } catch (const Error& first) {
    try {
      return forward_products(s, dtype, layouts).plan(cudnn);
    } catch (const Error& second) {
      fail("as one operation: {}; as products: {}", first.what(), second.what());
    }
  }
}

const Plan& Plans::get(Context& context, const AttentionShape& s, DType dtype,
                       const Layouts& layouts) {
  std::vector<std::int64_t> key{s.batch, s.heads,    s.queries,
                                s.keys,  s.head_dim, static_cast<std::int64_t>(dtype)};
  for (const Layout& layout : layouts)
    key.insert(key.end(), layout.strides.begin(), layout.strides.end());
  const auto [place, is_new] = made.try_emplace(std::move(key));
  Made& entry = place->second;
  if (is_new) {
    try {
      entry.plan.emplace(make(context, s, dtype, layouts));
    } catch (const Error& error) {
      entry.why = error.what();
    }
  }
  SHERD_CHECK(entry.plan, "{}: {}; --attention own computes it",
              describe(s, dtype, is_backward(layouts)), entry.why);
  return *entry.plan;
}

void check_aligned(std::initializer_list<cudnn::Binding> bindings) {
  for (const cudnn::Binding& binding : bindings) {
    SHERD_CHECK(reinterpret_cast<std::uintptr_t>(binding.address) % 16 == 0,
                "attention by cuDNN: needs addresses that are multiples of 16, got {}",
                binding.address);
  }
}

// The sums of dO * O come first in backward's workspace.
std::size_t sums_bytes(const AttentionShape& s) {
  const auto bytes = static_cast<std::size_t>(s.batch * s.heads * s.queries) * sizeof(float);
  return (bytes + 255) / 256 * 256;
}

}  // namespace

bool cudnn_attention_built() {
  return true;
}

std::string cudnn_version() {
  return cudnn::version();
}

std::string cudnn_attention_refuses(Context& context, const AttentionShape& s, DType dtype) {
  std::string against = refusal(context, s, dtype);
  if (!against.empty()) return against;
  const auto gapless = [&](std::int64_t tokens) {
    return AttentionView<const bf16>{nullptr, tokens * s.heads * s.head_dim, s.heads * s.head_dim,
                                     s.head_dim};
  };
  Layouts layouts;
  for (const std::int64_t tokens :
       {s.queries, s.keys, s.keys, s.queries, s.queries, s.queries, s.keys, s.keys})
    layouts.push_back(layout_of("view", s, tokens, gapless(tokens)));
  try {
    Plans::of(context).get(context, s, dtype, layouts);
    layouts.resize(4);
    Plans::of(context).get(context, s, dtype, layouts);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

template <typename T>
std::size_t cudnn_attention_forward_workspace_bytes(Context& context, const AttentionShape& s,
                                                    AttentionView<const T> q,
                                                    AttentionView<const T> k,
                                                    AttentionView<const T> v,
                                                    AttentionView<T> output) {
  return Plans::of(context)
      .get(context, s, kDType<T>, forward_layouts<T>(s, q, k, v, output))
      .workspace_bytes();
}

template <typename T>
std::size_t cudnn_attention_backward_workspace_bytes(
    Context& context, const AttentionShape& s, AttentionView<const T> grad_output,
    AttentionView<const T> q, AttentionView<const T> k, AttentionView<const T> v,
    AttentionView<const T> output, AttentionView<T> grad_q, AttentionView<T> grad_k,
    AttentionView<T> grad_v) {
  return sums_bytes(s) +
         Plans::of(context)
             .get(context, s, kDType<T>,
                  backward_layouts<T>(s, grad_output, q, k, v, output, grad_q, grad_k, grad_v))
             .workspace_bytes();
}

template <typename T>
void cudnn_attention_forward(Context& context, const AttentionShape& s, AttentionView<const T> q,
                             AttentionView<const T> k, AttentionView<const T> v,
                             AttentionView<T> output, float* lse, void* workspace) {
  Plans& plans = Plans::of(context);
  const Plan& plan = plans.get(context, s, kDType<T>, forward_layouts<T>(s, q, k, v, output));
  const auto scale = static_cast<float>(s.scale);
  const auto views = {cudnn::Binding{kQ, q.data}, {kK, k.data}, {kV, v.data}, {kOut, output.data}};
  check_aligned(views);
  std::vector<cudnn::Binding> bindings(views);
  bindings.insert(bindings.end(), {{kLse, lse}, {kScale, &scale}});
  plan.execute(plans.handle.get(context.compute_stream().native()), bindings, workspace);
}

template <typename T>
void cudnn_attention_backward(Context& context, const AttentionShape& s,
                              AttentionView<const T> grad_output, AttentionView<const T> q,
                              AttentionView<const T> k, AttentionView<const T> v,
                              AttentionView<const T> output, const float* lse,
                              AttentionView<T> grad_q, AttentionView<T> grad_k,
                              AttentionView<T> grad_v, void* workspace) {
  Plans& plans = Plans::of(context);
  const Plan& plan =
      plans.get(context, s, kDType<T>,
                backward_layouts<T>(s, grad_output, q, k, v, output, grad_q, grad_k, grad_v));
  const auto scale = static_cast<float>(s.scale);
  const float one = 1.f;
  for (const void* input : {q.data, k.data, v.data, grad_output.data, output.data}) {
    SHERD_CHECK(input != grad_q.data && input != grad_k.data && input != grad_v.data,
                "attention by cuDNN: a gradient must not be the memory of an input");
  }
  const auto views = {cudnn::Binding{kQ, q.data},
                      {kK, k.data},
                      {kV, v.data},
                      {kOut, output.data},
                      {kGradOut, grad_output.data},
                      {kGradQ, grad_q.data},
                      {kGradK, grad_k.data},
                      {kGradV, grad_v.data}};
  check_aligned(views);
  std::vector<cudnn::Binding> bindings(views);
  bindings.insert(bindings.end(),
                  {{kLse, lse}, {kSums, workspace}, {kScale, &scale}, {kOne, &one}});
  plan.execute(plans.handle.get(context.compute_stream().native()), bindings,
               static_cast<unsigned char*>(workspace) + sums_bytes(s));
}

#define SHERD_INSTANTIATE(T)                                                                    \
  template std::size_t cudnn_attention_forward_workspace_bytes<T>(                              \
      Context&, const AttentionShape&, AttentionView<const T>, AttentionView<const T>,          \
      AttentionView<const T>, AttentionView<T>);                                                \
  template std::size_t cudnn_attention_backward_workspace_bytes<T>(                             \
      Context&, const AttentionShape&, AttentionView<const T>, AttentionView<const T>,          \
      AttentionView<const T>, AttentionView<const T>, AttentionView<const T>, AttentionView<T>, \
      AttentionView<T>, AttentionView<T>);                                                      \
  template void cudnn_attention_forward<T>(                                                     \
      Context&, const AttentionShape&, AttentionView<const T>, AttentionView<const T>,          \
      AttentionView<const T>, AttentionView<T>, float*, void*);                                 \
  template void cudnn_attention_backward<T>(                                                    \
      Context&, const AttentionShape&, AttentionView<const T>, AttentionView<const T>,          \
      AttentionView<const T>, AttentionView<const T>, AttentionView<const T>, const float*,     \
      AttentionView<T>, AttentionView<T>, AttentionView<T>, void*);
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cuda
