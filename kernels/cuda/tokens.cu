// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cuda/pack.h>
#include <sherd/kernels/cuda/strided_copy.h>
#include <sherd/kernels/cuda/tokens.h>

namespace sherd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kMostSamples = 65535;  // blocks in y; each then takes several samples

unsigned sample_blocks(std::int64_t batch) {
  return static_cast<unsigned>(std::min<std::int64_t>(batch, kMostSamples));
}

// A thread takes the same place of every gridDim.y-th sample.
template <int V, typename T>
__global__ void __launch_bounds__(kThreads) assemble_kernel(AssembleTokens<T> p) {
  const std::int64_t first = p.cls != nullptr ? p.dim : 0;
  const std::int64_t sample_size = p.patch_tokens * p.dim + first;
  const std::int64_t at = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (at >= sample_size) return;
  Pack<T, V> pos;
  if (p.pos != nullptr) pos = load<V>(p.pos + at);
  for (std::int64_t sample = blockIdx.y; sample < p.batch; sample += gridDim.y) {
    Pack<T, V> out =
        load<V>(at < first ? p.cls + at : p.patches + sample * (sample_size - first) + at - first);
    if (p.pos != nullptr) {
#pragma unroll
      for (int i = 0; i < V; ++i) out.at[i] = from_acc<T>(to_acc(out.at[i]) + to_acc(pos.at[i]));
    }
    store<V>(p.out + sample * sample_size + at, out);
  }
}

// out[plane, c] = factor * the sum over i < count of in[plane plane_stride + i row_stride + c], in
// order of i; the first `also_columns` of plane 0 go to `also` too.
template <typename T, typename Out>
struct Sum {
  std::int64_t planes = 0, plane_stride = 0;
  std::int64_t count = 0, row_stride = 0;
  std::int64_t columns = 0;
  const T* in = nullptr;
  acc_t<T> factor = 1;
  Out* out = nullptr;
  Out* also = nullptr;
  std::int64_t also_columns = 0;
};

// Four bytes a thread: there are few columns beside the rows to add in order, and more threads keep
// more of them under way.
template <typename T>
inline constexpr int kSumVector = sizeof(T) < 4 ? 4 / sizeof(T) : 1;
constexpr int kSumRows = 8;  // loaded before the first is added

template <int V, typename T, typename Out>
__global__ void __launch_bounds__(kThreads) sum_kernel(Sum<T, Out> p) {
  const std::int64_t col = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (col >= p.columns) return;
  for (std::int64_t plane = blockIdx.y; plane < p.planes; plane += gridDim.y) {
    const T* const in = p.in + plane * p.plane_stride + col;
    acc_t<T> sum[V] = {};
    for (std::int64_t i = 0; i < p.count; i += kSumRows) {
      Pack<T, V> rows[kSumRows];
#pragma unroll
      for (int k = 0; k < kSumRows; ++k) {
        if (i + k < p.count) rows[k] = load<V>(in + (i + k) * p.row_stride);
      }
#pragma unroll
      for (int k = 0; k < kSumRows; ++k) {
        if (i + k >= p.count) continue;
#pragma unroll
        for (int j = 0; j < V; ++j) sum[j] += to_acc(rows[k].at[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const Out value = from_acc<Out>(sum[j] * p.factor);
      p.out[plane * p.columns + col + j] = value;
      if (col + j < p.also_columns) p.also[col + j] = value;
    }
  }
}

template <typename T, typename Out>
void sum(Stream& stream, const Sum<T, Out>& p) {
  if (p.planes == 0 || p.columns == 0) return;
  constexpr int V = kSumVector<T>;
  const bool whole = p.columns % V == 0 && p.row_stride % V == 0 && p.plane_stride % V == 0 &&
                     elements_before_vectors<V>(p.in) == 0;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.columns, kThreads * (whole ? V : 1))),
                  sample_blocks(p.planes));
  const auto kernel = whole ? sum_kernel<V, T, Out> : sum_kernel<1, T, Out>;
  launch(kernel, grid, dim3(kThreads), 0, native(stream), p);
}

// grad_in[b, t] = factor * grad_out[b] where first <= t < last, else 0.
template <typename T>
struct Spread {
  TokenShape shape;
  std::int64_t first = 0, last = 0;
  acc_t<T> factor = 1;
  const T* grad_out = nullptr;
  T* grad_in = nullptr;
};

constexpr int kLanes = 32;
constexpr int kTokenRows = 8;
constexpr int kTokensPerBlock = 64;

// A thread takes a place of the feature and every eighth token.
template <int V, typename T>
__global__ void __launch_bounds__(kLanes* kTokenRows) spread_kernel(Spread<T> p) {
  const std::int64_t col = (static_cast<std::int64_t>(blockIdx.x) * kLanes + threadIdx.x) * V;
  if (col >= p.shape.dim) return;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.z) * kTokensPerBlock;
  const std::int64_t end =
      begin + kTokensPerBlock < p.shape.tokens ? begin + kTokensPerBlock : p.shape.tokens;
  for (std::int64_t sample = blockIdx.y; sample < p.shape.batch; sample += gridDim.y) {
    const Pack<T, V> grad = load<V>(p.grad_out + sample * p.shape.dim + col);
    Pack<T, V> inside, outside;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      inside.at[i] = from_acc<T>(to_acc(grad.at[i]) * p.factor);
      outside.at[i] = from_acc<T>(0);
    }
    for (std::int64_t token = begin + threadIdx.y; token < end; token += kTokenRows) {
      T* const to = p.grad_in + (sample * p.shape.tokens + token) * p.shape.dim + col;
      if (token >= p.first && token < p.last) {  // (a choice of one would put both in memory)
        store<V>(to, inside);
      } else {
        store<V>(to, outside);
      }
    }
  }
}

template <typename T>
void spread(Stream& stream, const Spread<T>& p) {
  const TokenShape& s = p.shape;
  if (s.batch == 0 || s.tokens == 0 || s.dim == 0) return;
  constexpr int V = kVectorOf<T>;
  const bool whole = s.dim % V == 0 && elements_before_vectors<V>(p.grad_out, p.grad_in) == 0;
  const dim3 grid(static_cast<unsigned>(ceil_div(s.dim, kLanes * (whole ? V : 1))),
                  sample_blocks(s.batch),
                  static_cast<unsigned>(ceil_div(s.tokens, kTokensPerBlock)));
  const auto kernel = whole ? spread_kernel<V, T> : spread_kernel<1, T>;
  launch(kernel, grid, dim3(kLanes, kTokenRows), 0, native(stream), p);
}

// to[b] = the `size` elements at from + b stride.
template <typename T>
void copy_rows(Stream& stream, std::int64_t batch, std::int64_t stride, std::int64_t size,
               const T* from, T* to) {
  StridedView view;
  append(view, batch, stride);
  append(view, size, 1);
  strided_copy(stream, view, sizeof(T), from, to);
}

}  // namespace

template <typename T>
void assemble_tokens(Stream& stream, const AssembleTokens<T>& p) {
  const std::int64_t sample_size = (p.patch_tokens + (p.cls != nullptr ? 1 : 0)) * p.dim;
  if (p.batch == 0 || sample_size == 0) return;
  constexpr int V = kVectorOf<T>;
  const bool whole =
      p.dim % V == 0 && elements_before_vectors<V>(p.patches, p.cls, p.pos, p.out) == 0;
  const dim3 grid(static_cast<unsigned>(ceil_div(sample_size, kThreads * (whole ? V : 1))),
                  sample_blocks(p.batch));
  const auto kernel = whole ? assemble_kernel<V, T> : assemble_kernel<1, T>;
  launch(kernel, grid, dim3(kThreads), 0, native(stream), p);
}

template <typename T>
void assemble_tokens_backward(Stream& stream, const AssembleTokensBackward<T>& p) {
  const std::int64_t first = p.has_cls ? p.dim : 0;
  const std::int64_t patches = p.patch_tokens * p.dim;
  if (p.grad_patches != nullptr)
    copy_rows(stream, p.batch, first + patches, patches, p.grad_out + first, p.grad_patches);
  acc_t<T>* const grad_cls = p.has_cls ? p.grad_cls : nullptr;
  Sum<T, acc_t<T>> s;
  s.planes = 1;
  s.count = p.batch;
  s.row_stride = first + patches;
  s.in = p.grad_out;
  if (p.grad_pos != nullptr) {
    s.columns = first + patches;
    s.out = p.grad_pos;
    s.also = grad_cls;
    s.also_columns = grad_cls != nullptr ? p.dim : 0;
  } else if (grad_cls != nullptr) {
    s.columns = p.dim;
    s.out = grad_cls;
  }
  sum(stream, s);
}

template <typename T>
void mean_tokens(Stream& stream, const TokenShape& shape, std::int64_t skip, const T* in, T* out) {
  Sum<T, T> s;
  s.planes = shape.batch;
  s.plane_stride = shape.tokens * shape.dim;
  s.count = shape.tokens - skip;
  s.row_stride = s.columns = shape.dim;
  s.in = in + skip * shape.dim;
  s.factor = acc_t<T>(1) / static_cast<acc_t<T>>(s.count);
  s.out = out;
  sum(stream, s);
}

template <typename T>
void mean_tokens_backward(Stream& stream, const TokenShape& shape, std::int64_t skip,
                          const T* grad_out, T* grad_in) {
  const auto factor = acc_t<T>(1) / static_cast<acc_t<T>>(shape.tokens - skip);
  spread(stream, Spread<T>{shape, skip, shape.tokens, factor, grad_out, grad_in});
}

template <typename T>
void select_token(Stream& stream, const TokenShape& shape, std::int64_t token, const T* in,
                  T* out) {
  copy_rows(stream, shape.batch, shape.tokens * shape.dim, shape.dim, in + token * shape.dim, out);
}

template <typename T>
void select_token_backward(Stream& stream, const TokenShape& shape, std::int64_t token,
                           const T* grad_out, T* grad_in) {
  spread(stream, Spread<T>{shape, token, token + 1, 1, grad_out, grad_in});
}

#define SHERD_INSTANTIATE(T)                                                                     \
  template void assemble_tokens<T>(Stream&, const AssembleTokens<T>&);                           \
  template void assemble_tokens_backward<T>(Stream&, const AssembleTokensBackward<T>&);          \
  template void mean_tokens<T>(Stream&, const TokenShape&, std::int64_t, const T*, T*);          \
  template void mean_tokens_backward<T>(Stream&, const TokenShape&, std::int64_t, const T*, T*); \
  template void select_token<T>(Stream&, const TokenShape&, std::int64_t, const T*, T*);         \
  template void select_token_backward<T>(Stream&, const TokenShape&, std::int64_t, const T*, T*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cuda
