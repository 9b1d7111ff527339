// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/tokens.h>
#include <sherd/kernels/cpu/vector_loop.h>

namespace sherd::cpu {
namespace {

// Calls body(row) for every row; rows of one task are neighbours.
template <typename Body>
SHERD_INLINE void parallel_rows(int threads, std::int64_t rows, std::int64_t cols,
                                const Body& body) {
  parallel_blocks(threads, rows, rows_per_task(cols), [body](std::int64_t begin, std::int64_t end) {
    const Body local = body;
    for (std::int64_t row = begin; row < end; ++row) local(row);
  });
}

// out = the sum of `count` rows of `in` that lie `stride` elements apart, times factor; in the type
// of `out`. Columns go four vectors at a time so that the sums stay in registers.
template <typename T, typename Out>
void sum_strided_rows(std::int64_t count, std::int64_t stride, std::int64_t dim, const T* in,
                      acc_t<T> factor, Out* out) {
  constexpr int n = kLanes<T>;
  std::int64_t d = 0;
  for (; d + 4 * n <= dim; d += 4 * n) {
    Vec<T> sum[4] = {};
    for (std::int64_t i = 0; i < count; ++i) {
      for (int k = 0; k < 4; ++k) sum[k] += load<T>(in + i * stride + d + k * n);
    }
    for (int k = 0; k < 4; ++k) store<Out>(out + d + k * n, sum[k] * factor);
  }
  for (; d < dim; d += n) {
    const auto lanes = static_cast<int>(std::min<std::int64_t>(n, dim - d));
    Vec<T> sum = {};
    for (std::int64_t i = 0; i < count; ++i) sum += load<T>(in + i * stride + d, lanes);
    store<Out>(out + d, sum * factor, lanes);
  }
}

}  // namespace

template <typename T>
void assemble_tokens(int threads, const AssembleTokens<T>& p) {
  const std::int64_t first = p.cls != nullptr ? 1 : 0;
  const std::int64_t tokens = p.patch_tokens + first;
  const std::int64_t dim = p.dim;
  parallel_rows(threads, p.batch * tokens, dim, [=](std::int64_t row) {
    const std::int64_t sample = row / tokens, token = row % tokens;
    const T* const from =
        token < first ? p.cls : p.patches + (sample * p.patch_tokens + token - first) * dim;
    T* const to = p.out + row * dim;
    if (p.pos == nullptr) {
      std::copy(from, from + dim, to);
      return;
    }
    const T* const pos = p.pos + token * dim;
    for_each_vector<T>(
        dim, [=](std::int64_t d, int count) __attribute__((always_inline)) {
          store<T>(to + d, load<T>(from + d, count) + load<T>(pos + d, count), count);
        });
  });
}

template <typename T>
void assemble_tokens_backward(int threads, const AssembleTokensBackward<T>& p) {
  const std::int64_t first = p.has_cls ? 1 : 0;
  const std::int64_t tokens = p.patch_tokens + first;
  const std::int64_t dim = p.dim;
  if (p.grad_patches != nullptr) {
    parallel_rows(threads, p.batch, p.patch_tokens * dim, [=](std::int64_t sample) {
      const T* const from = p.grad_out + (sample * tokens + first) * dim;
      std::copy(from, from + p.patch_tokens * dim, p.grad_patches + sample * p.patch_tokens * dim);
    });
  }
  if (p.grad_pos != nullptr) {
    parallel_rows(threads, tokens, p.batch * dim, [=](std::int64_t token) {
      sum_strided_rows<T>(p.batch, tokens * dim, dim, p.grad_out + token * dim, 1,
                          p.grad_pos + token * dim);
    });
  }
  if (p.grad_cls != nullptr && p.has_cls) {
    sum_strided_rows<T>(p.batch, tokens * dim, dim, p.grad_out, 1, p.grad_cls);
  }
}

template <typename T>
void mean_tokens(int threads, const TokenShape& s, std::int64_t skip, const T* in, T* out) {
  const auto factor = acc_t<T>(1) / static_cast<acc_t<T>>(s.tokens - skip);
  parallel_rows(threads, s.batch, s.tokens * s.dim, [=](std::int64_t sample) {
    sum_strided_rows<T>(s.tokens - skip, s.dim, s.dim, in + (sample * s.tokens + skip) * s.dim,
                        factor, out + sample * s.dim);
  });
}

template <typename T>
void mean_tokens_backward(int threads, const TokenShape& s, std::int64_t skip, const T* grad_out,
                          T* grad_in) {
  const auto factor = acc_t<T>(1) / static_cast<acc_t<T>>(s.tokens - skip);
  parallel_rows(threads, s.batch * s.tokens, s.dim, [=](std::int64_t row) {
    const T* const grad = grad_out + row / s.tokens * s.dim;
    T* const to = grad_in + row * s.dim;
    if (row % s.tokens < skip) {
      std::fill(to, to + s.dim, T());
      return;
    }
    for_each_vector<T>(
        s.dim, [=](std::int64_t d, int count) __attribute__((always_inline)) {
          store<T>(to + d, load<T>(grad + d, count) * factor, count);
        });
  });
}

template <typename T>
void select_token(int threads, const TokenShape& s, std::int64_t token, const T* in, T* out) {
  parallel_rows(threads, s.batch, s.dim, [=](std::int64_t sample) {
    const T* const from = in + (sample * s.tokens + token) * s.dim;
    std::copy(from, from + s.dim, out + sample * s.dim);
  });
}

template <typename T>
void select_token_backward(int threads, const TokenShape& s, std::int64_t token, const T* grad_out,
                           T* grad_in) {
  parallel_rows(threads, s.batch * s.tokens, s.dim, [=](std::int64_t row) {
    T* const to = grad_in + row * s.dim;
    if (row % s.tokens != token) {
      std::fill(to, to + s.dim, T());
      return;
    }
    const T* const from = grad_out + row / s.tokens * s.dim;
    std::copy(from, from + s.dim, to);
  });
}

#define SHERD_INSTANTIATE(T)                                                                 \
  template void assemble_tokens<T>(int, const AssembleTokens<T>&);                           \
  template void assemble_tokens_backward<T>(int, const AssembleTokensBackward<T>&);          \
  template void mean_tokens<T>(int, const TokenShape&, std::int64_t, const T*, T*);          \
  template void mean_tokens_backward<T>(int, const TokenShape&, std::int64_t, const T*, T*); \
  template void select_token<T>(int, const TokenShape&, std::int64_t, const T*, T*);         \
  template void select_token_backward<T>(int, const TokenShape&, std::int64_t, const T*, T*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cpu
