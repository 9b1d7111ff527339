// SPDX-License-Identifier: Apache-2.0
// Note [Attention on the CPU]
// One task is one head of one sample. It first copies its rows out of the strided views into
// scratch memory, converted to the arithmetic type and in the two layouts the small product wants:
// rows (padded to whole vectors) and transposed panels (kLanes keys wide). From there on everything
// is products of blocks that stay in the core's cache, with elementwise passes in between:
//
//   forward, per block of queries, per block of keys          backward, per block of keys, of
//   queries
//     S = Q K^T             Q already times scale               P  = exp(Q K^T - lse)
//     P = exp(S - row maximum so far)                           dV += P^T dO
//     O = O * exp(old maximum - new maximum) + P V              dS = P * (dO V^T - delta)
//   output = O / row sum                                        dK += dS^T Q,  dQ += dS K
//
// with delta = the row sums of dO * O. Up to kMostKeys keys make one block, which is every usual
// ViT.
#include <sherd/kernels/cpu/attention.h>
#include <sherd/kernels/cpu/gemm_small.h>
#include <sherd/kernels/cpu/math.h>
#include <sherd/kernels/cpu/parallel.h>
#include <sherd/kernels/cpu/vector_loop.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace sherd::cpu {
namespace {

constexpr std::int64_t kMostQueries = 96;
constexpr std::int64_t kMostKeys = 384;
constexpr std::size_t kAlignment = 64;

constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Size of the blocks that cut `count` into as few as `most` allows, about evenly.
std::int64_t block_size(std::int64_t count, std::int64_t most, std::int64_t multiple) {
  const std::int64_t blocks = (count + most - 1) / most;
  return round_up((count + blocks - 1) / blocks, multiple);
}

// Sizes in elements; rows of scratch matrices are padded to whole vectors.
template <typename A>
struct Sizes {
  explicit Sizes(const AttentionShape& shape)
      : dim(shape.head_dim),
        padded_dim(round_up(dim, kLanes<A>)),
        query_block(block_size(shape.queries, kMostQueries, 12)),  // 12: whole register tiles
        key_block(block_size(shape.keys, kMostKeys, kLanes<A>)),
        // One vector more, so that rows do not all fall into the same cache sets.
        score_stride(key_block + kLanes<A>) {}

  std::int64_t dim_vectors() const { return padded_dim / kLanes<A>; }

  std::int64_t dim, padded_dim, query_block, key_block, score_stride;
};

// Hands out consecutive aligned arrays of a worker's slice; with a null start it only counts.
template <typename A>
class Scratch {
 public:
  explicit Scratch(A* start) : start_(start) {}
  A* take(std::int64_t count) {
    A* array = start_ == nullptr ? nullptr : start_ + used_;
    used_ += round_up(count, kAlignment / sizeof(A));
    return array;
  }
  std::int64_t used() const { return used_; }

 private:
  A* start_;
  std::int64_t used_ = 0;
};

template <typename A>
struct ForwardScratch {
  ForwardScratch(const AttentionShape& shape, const Sizes<A>& sizes, Scratch<A> scratch)
      : k_panels(scratch.take(round_up(shape.keys, kLanes<A>) * sizes.dim)),
        v(scratch.take(shape.keys * sizes.padded_dim)),
        q(scratch.take(sizes.query_block * sizes.padded_dim)),
        output(scratch.take(sizes.query_block * sizes.padded_dim)),
        scores(scratch.take(sizes.query_block * sizes.score_stride)),
        row_max(scratch.take(sizes.query_block)),
        row_sum(scratch.take(sizes.query_block)),
        size(scratch.used()) {}

  A *k_panels, *v, *q, *output, *scores, *row_max, *row_sum;
  std::int64_t size;
};

template <typename A>
struct BackwardScratch {
  BackwardScratch(const AttentionShape& shape, const Sizes<A>& sizes, Scratch<A> scratch)
      : q(scratch.take(shape.queries * sizes.padded_dim)),
        grad_output(scratch.take(shape.queries * sizes.padded_dim)),
        grad_q(scratch.take(shape.queries * sizes.padded_dim)),
        delta(scratch.take(shape.queries)),
        k_panels(scratch.take(sizes.key_block * sizes.dim)),
        v_panels(scratch.take(sizes.key_block * sizes.dim)),
        k(scratch.take(sizes.key_block * sizes.padded_dim)),
        grad_k(scratch.take(sizes.key_block * sizes.padded_dim)),
        grad_v(scratch.take(sizes.key_block * sizes.padded_dim)),
        scores(scratch.take(sizes.query_block * sizes.score_stride)),
        grad_scores(scratch.take(sizes.query_block * sizes.score_stride)),
        size(scratch.used()) {}

  A *q, *grad_output, *grad_q, *delta, *k_panels, *v_panels, *k, *grad_k, *grad_v, *scores,
      *grad_scores;
  std::int64_t size;
};

template <typename A>
A* worker_slice(void* workspace, int worker, std::int64_t size) {
  const auto address = reinterpret_cast<std::uintptr_t>(workspace);
  const std::uintptr_t aligned = (address + kAlignment - 1) / kAlignment * kAlignment;
  return reinterpret_cast<A*>(aligned) + worker * size;
}

// The matrix of one head of one sample: row n at data + n * stride.
template <typename T>
struct Rows {
  Rows(const AttentionView<T>& view, std::int64_t b, std::int64_t h)
      : data(view.data + b * view.batch_stride + h * view.head_stride), stride(view.token_stride) {}
  T* data;
  std::int64_t stride;
};

// to[n][d] = factor * from[begin + n][d]
template <typename T>
void pack_rows(Rows<const T> from, std::int64_t begin, std::int64_t count, std::int64_t dim,
               acc_t<T> factor, acc_t<T>* to, std::int64_t to_stride) {
  for (std::int64_t n = 0; n < count; ++n) {
    const T* row = from.data + (begin + n) * from.stride;
    for_each_vector<T>(dim, [&](std::int64_t d, int lanes) {
      store<acc_t<T>>(to + n * to_stride + d, load<T>(row + d, lanes) * factor);
    });
  }
}

// to[begin + n][d] = factor * from[n][d]
template <typename T>
void unpack_rows(const acc_t<T>* from, std::int64_t from_stride, std::int64_t begin,
                 std::int64_t count, std::int64_t dim, acc_t<T> factor, Rows<T> to) {
  for (std::int64_t n = 0; n < count; ++n) {
    T* row = to.data + (begin + n) * to.stride;
    for_each_vector<T>(dim, [&](std::int64_t d, int lanes) {
      store<T>(row + d, load<acc_t<T>>(from + n * from_stride + d) * factor, lanes);
    });
  }
}

template <typename V, int... kLane>
SHERD_INLINE void interleave(const V& a, const V& b, V* low, V* high,
                             std::integer_sequence<int, kLane...>) {
  constexpr int n = sizeof...(kLane);
  *low = __builtin_shufflevector(a, b, (kLane / 2 + kLane % 2 * n)...);
  *high = __builtin_shufflevector(a, b, (kLane / 2 + kLane % 2 * n + n / 2)...);
}

// Transposes kLanes vectors. Interleaving row i with row i + kLanes / 2 into rows 2i and 2i + 1
// rotates the bits of (row, lane) by one; as many times as a lane number has bits swaps the two.
template <typename A>
SHERD_INLINE void transpose(Vec<A>* rows) {
  constexpr int n = kLanes<A>;
  for (int stage = 1; stage < n; stage *= 2) {
    Vec<A> next[n];
    for (int i = 0; i < n / 2; ++i) {
      interleave(rows[i], rows[i + n / 2], &next[2 * i], &next[2 * i + 1],
                 std::make_integer_sequence<int, n>{});
    }
    for (int i = 0; i < n; ++i) rows[i] = next[i];
  }
}

// Panels of the transposed matrix: panel p holds keys [p * kLanes, (p + 1) * kLanes) as [dim,
// kLanes]. Keys beyond the last read as zeros.
template <typename T>
void pack_panels(Rows<const T> from, std::int64_t begin, std::int64_t count, std::int64_t dim,
                 acc_t<T>* to) {
  constexpr int n = kLanes<T>;
  for (std::int64_t key = 0; key < count; key += n) {
    for_each_vector<T>(dim, [&](std::int64_t d, int lanes) {
      Vec<T> rows[n];
      for (int i = 0; i < n; ++i) {
        rows[i] = key + i < count ? load<T>(from.data + (begin + key + i) * from.stride + d, lanes)
                                  : Vec<T>{};
      }
      transpose<acc_t<T>>(rows);
      for (int i = 0; i < lanes; ++i) store<acc_t<T>>(to + (d + i) * n, rows[i]);
    });
    to += dim * n;
  }
}

// scores[i][j] becomes exp(scores[i][j] - row_max[i]) for one block of keys; row_max and row_sum
// cover the blocks so far, and what `output` holds from earlier ones is brought to the new maximum.
template <typename A>
void softmax_block(std::int64_t rows, std::int64_t keys, bool first, const Sizes<A>& sizes,
                   ForwardScratch<A>& s) {
  const Vec<A> lowest = broadcast<A>(-std::numeric_limits<A>::infinity());
  for (std::int64_t i = 0; i < rows; ++i) {
    A* row = s.scores + i * sizes.score_stride;
    Vec<A> largest = lowest;
    for_each_vector<A>(keys, [&](std::int64_t j, int lanes) {
      Vec<A> score = load<A>(row + j);
      if (lanes < kLanes<A>) {
        score = select(lanes_below<A>(lanes), score, lowest);
        store<A>(row + j, score);
      }
      largest = vmax(largest, score);
    });
    A row_max = horizontal_max<A>(largest);
    A row_sum = 0;
    if (!first) {
      row_max = std::max(row_max, s.row_max[i]);
      const Vec<A> shrink = vexp(broadcast<A>(s.row_max[i] - row_max));
      row_sum = s.row_sum[i] * shrink[0];
      A* output = s.output + i * sizes.padded_dim;
      for (std::int64_t d = 0; d < sizes.padded_dim; d += kLanes<A>) {
        store<A>(output + d, load<A>(output + d) * shrink);
      }
    }
    Vec<A> sum{};
    for (std::int64_t j = 0; j < keys; j += kLanes<A>) {
      const Vec<A> p = vexp(load<A>(row + j) - row_max);
      sum += p;
      store<A>(row + j, p);
    }
    s.row_max[i] = row_max;
    s.row_sum[i] = row_sum + horizontal_sum<A>(sum);
  }
}

template <typename T>
void forward_head(const AttentionShape& shape, const Sizes<acc_t<T>>& sizes, Rows<const T> q,
                  Rows<const T> k, Rows<const T> v, Rows<T> output, acc_t<T>* lse,
                  ForwardScratch<acc_t<T>>& s) {
  using A = acc_t<T>;
  const std::int64_t dim = sizes.dim, stride = sizes.padded_dim;
  pack_panels<T>(k, 0, shape.keys, dim, s.k_panels);
  pack_rows<T>(v, 0, shape.keys, dim, A(1), s.v, stride);
  for (std::int64_t i = 0; i < shape.queries; i += sizes.query_block) {
    const std::int64_t rows = std::min(sizes.query_block, shape.queries - i);
    pack_rows<T>(q, i, rows, dim, static_cast<A>(shape.scale), s.q, stride);
    for (std::int64_t j = 0; j < shape.keys; j += sizes.key_block) {
      const std::int64_t keys = std::min(sizes.key_block, shape.keys - j);
      const std::int64_t key_vectors = (keys + kLanes<A> - 1) / kLanes<A>;
      multiply_small<A>(rows, key_vectors, dim, {s.q, stride, 1},
                        {s.k_panels + j * dim, kLanes<A>, dim * kLanes<A>}, s.scores,
                        sizes.score_stride, false);
      softmax_block<A>(rows, keys, j == 0, sizes, s);
      multiply_small<A>(rows, sizes.dim_vectors(), keys, {s.scores, sizes.score_stride, 1},
                        {s.v + j * stride, stride, kLanes<A>}, s.output, stride, j > 0);
    }
    for (std::int64_t n = 0; n < rows; ++n) {
      unpack_rows<T>(s.output + n * stride, stride, i + n, 1, dim, 1 / s.row_sum[n], output);
      lse[i + n] = s.row_max[n] + std::log(s.row_sum[n]);
    }
  }
}

// The probabilities and the gradients of the scores, in place of scores and of dO V^T.
template <typename A>
void softmax_backward_block(std::int64_t rows, std::int64_t keys, const A* lse, const A* delta,
                            const Sizes<A>& sizes, BackwardScratch<A>& s) {
  for (std::int64_t i = 0; i < rows; ++i) {
    A* row = s.scores + i * sizes.score_stride;
    A* grad_row = s.grad_scores + i * sizes.score_stride;
    const A row_lse = lse[i], row_delta = delta[i];
    for (std::int64_t j = 0; j < keys; j += kLanes<A>) {
      const Vec<A> p = vexp(load<A>(row + j) - row_lse);
      store<A>(row + j, p);
      store<A>(grad_row + j, p * (load<A>(grad_row + j) - row_delta));
    }
  }
}

template <typename T>
void backward_head(const AttentionShape& shape, const Sizes<acc_t<T>>& sizes,
                   Rows<const T> grad_output, Rows<const T> q, Rows<const T> k, Rows<const T> v,
                   Rows<const T> output, const acc_t<T>* lse, Rows<T> grad_q, Rows<T> grad_k,
                   Rows<T> grad_v, BackwardScratch<acc_t<T>>& s) {
  using A = acc_t<T>;
  const std::int64_t dim = sizes.dim, stride = sizes.padded_dim, score_stride = sizes.score_stride;
  const auto scale = static_cast<A>(shape.scale);
  pack_rows<T>(q, 0, shape.queries, dim, scale, s.q, stride);
  pack_rows<T>(grad_output, 0, shape.queries, dim, A(1), s.grad_output, stride);
  for (std::int64_t i = 0; i < shape.queries; ++i) {
    const T* row = output.data + i * output.stride;
    Vec<A> sum{};
    for_each_vector<T>(dim, [&](std::int64_t d, int lanes) {
      sum = madd(load<T>(row + d, lanes), load<A>(s.grad_output + i * stride + d), sum);
    });
    s.delta[i] = horizontal_sum<A>(sum);
  }
  for (std::int64_t j = 0; j < shape.keys; j += sizes.key_block) {
    const std::int64_t keys = std::min(sizes.key_block, shape.keys - j);
    const std::int64_t key_vectors = (keys + kLanes<A> - 1) / kLanes<A>;
    pack_panels<T>(k, j, keys, dim, s.k_panels);
    pack_panels<T>(v, j, keys, dim, s.v_panels);
    pack_rows<T>(k, j, keys, dim, A(1), s.k, stride);
    const RightOperand<A> k_transposed{s.k_panels, kLanes<A>, dim * kLanes<A>};
    const RightOperand<A> v_transposed{s.v_panels, kLanes<A>, dim * kLanes<A>};
    for (std::int64_t i = 0; i < shape.queries; i += sizes.query_block) {
      const std::int64_t rows = std::min(sizes.query_block, shape.queries - i);
      const A* q_rows = s.q + i * stride;
      const A* grad_rows = s.grad_output + i * stride;
      multiply_small<A>(rows, key_vectors, dim, {q_rows, stride, 1}, k_transposed, s.scores,
                        score_stride, false);
      multiply_small<A>(rows, key_vectors, dim, {grad_rows, stride, 1}, v_transposed, s.grad_scores,
                        score_stride, false);
      softmax_backward_block<A>(rows, keys, lse + i, s.delta + i, sizes, s);
      multiply_small<A>(keys, sizes.dim_vectors(), rows, {s.scores, 1, score_stride},
                        {grad_rows, stride, kLanes<A>}, s.grad_v, stride, i > 0);
      multiply_small<A>(keys, sizes.dim_vectors(), rows, {s.grad_scores, 1, score_stride},
                        {q_rows, stride, kLanes<A>}, s.grad_k, stride, i > 0);
      multiply_small<A>(rows, sizes.dim_vectors(), keys, {s.grad_scores, score_stride, 1},
                        {s.k, stride, kLanes<A>}, s.grad_q + i * stride, stride, j > 0);
    }
    unpack_rows<T>(s.grad_k, stride, j, keys, dim, A(1), grad_k);
    unpack_rows<T>(s.grad_v, stride, j, keys, dim, A(1), grad_v);
  }
  unpack_rows<T>(s.grad_q, stride, 0, shape.queries, dim, scale, grad_q);
}

}  // namespace

template <typename T>
std::size_t attention_workspace_bytes(const AttentionShape& shape, int threads, bool backward) {
  using A = acc_t<T>;
  const Sizes<A> sizes(shape);
  const Scratch<A> counting(nullptr);
  const std::int64_t slice = backward ? BackwardScratch<A>(shape, sizes, counting).size
                                      : ForwardScratch<A>(shape, sizes, counting).size;
  const std::int64_t workers =
      std::min<std::int64_t>(std::max(threads, 1), shape.batch * shape.heads);
  return static_cast<std::size_t>(workers * slice) * sizeof(A) + kAlignment;
}

template <typename T>
void attention_forward(const AttentionShape& shape, AttentionView<const T> q,
                       AttentionView<const T> k, AttentionView<const T> v, AttentionView<T> output,
                       acc_t<T>* lse, void* workspace, int threads) {
  using A = acc_t<T>;
  const Sizes<A> sizes(shape);
  const std::int64_t slice = ForwardScratch<A>(shape, sizes, Scratch<A>(nullptr)).size;
  parallel_workers(threads, shape.batch * shape.heads, [&](int worker, std::int64_t task) {
    const std::int64_t b = task / shape.heads, h = task % shape.heads;
    ForwardScratch<A> scratch(shape, sizes, Scratch<A>(worker_slice<A>(workspace, worker, slice)));
    forward_head<T>(shape, sizes, {q, b, h}, {k, b, h}, {v, b, h}, {output, b, h},
                    lse + task * shape.queries, scratch);
  });
}

template <typename T>
void attention_backward(const AttentionShape& shape, AttentionView<const T> grad_output,
                        AttentionView<const T> q, AttentionView<const T> k,
                        AttentionView<const T> v, AttentionView<const T> output,
                        const acc_t<T>* lse, AttentionView<T> grad_q, AttentionView<T> grad_k,
                        AttentionView<T> grad_v, void* workspace, int threads) {
  using A = acc_t<T>;
  const Sizes<A> sizes(shape);
  const std::int64_t slice = BackwardScratch<A>(shape, sizes, Scratch<A>(nullptr)).size;
  parallel_workers(threads, shape.batch * shape.heads, [&](int worker, std::int64_t task) {
    const std::int64_t b = task / shape.heads, h = task % shape.heads;
    BackwardScratch<A> scratch(shape, sizes, Scratch<A>(worker_slice<A>(workspace, worker, slice)));
    backward_head<T>(shape, sizes, {grad_output, b, h}, {q, b, h}, {k, b, h}, {v, b, h},
                     {output, b, h}, lse + task * shape.queries, {grad_q, b, h}, {grad_k, b, h},
                     {grad_v, b, h}, scratch);
  });
}

#define SHERD_INSTANTIATE(T)                                                                   \
  template std::size_t attention_workspace_bytes<T>(const AttentionShape&, int, bool);         \
  template void attention_forward<T>(const AttentionShape&, AttentionView<const T>,            \
                                     AttentionView<const T>, AttentionView<const T>,           \
                                     AttentionView<T>, acc_t<T>*, void*, int);                 \
  template void attention_backward<T>(                                                         \
      const AttentionShape&, AttentionView<const T>, AttentionView<const T>,                   \
      AttentionView<const T>, AttentionView<const T>, AttentionView<const T>, const acc_t<T>*, \
      AttentionView<T>, AttentionView<T>, AttentionView<T>, void*, int);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cpu
