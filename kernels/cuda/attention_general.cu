// SPDX-License-Identifier: Apache-2.0
// Note [Attention without tensor cores]
// For fp32, fp64, and what the tensor-core kernels do not take. A block has kTile rows of a head
// (queries; in the backward of keys and values: keys) and goes over the other side in tiles of
// kTile rows. 8 x 16 threads: a thread has kTile / 8 rows, 8 apart, and of these kTile / 16 scores
// and kColumns columns, 16 apart. All arithmetic is acc_t<T>, nothing is rounded to T before it is
// stored.
#include <sherd/kernels/cuda/attention_general.h>
#include <sherd/kernels/cuda/device.h>

#include <cmath>
#include <limits>
#include <type_traits>

namespace sherd::cuda::attention {
namespace {

constexpr int kGroups = 8;  // of threads: one works on a row
constexpr int kLanes = 16;  // of a group

__device__ __forceinline__ float exponential(float x) {
  return expf(x);
}
__device__ __forceinline__ double exponential(double x) {
  return exp(x);
}
__device__ __forceinline__ float logarithm(float x) {
  return logf(x);
}
__device__ __forceinline__ double logarithm(double x) {
  return log(x);
}
__device__ __forceinline__ float multiply_add(float a, float b, float c) {
  return fmaf(a, b, c);
}
__device__ __forceinline__ double multiply_add(double a, double b, double c) {
  return fma(a, b, c);
}

// The sum and the maximum over a group's 16 lanes, which are half a warp.
template <typename A>
__device__ __forceinline__ A group_sum(A value) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}
template <typename A>
__device__ __forceinline__ A group_max(A value) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    const A other = __shfl_xor_sync(0xffffffffu, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

// Tiles of a block in shared memory; columns is how many a thread has of a row of head_dim.
template <typename T, int columns>
struct Tile {
  using A = acc_t<T>;
  static constexpr int kColumns = columns;
  static constexpr int kTile = columns <= 8 ? 32 : 16;  // rows
  static constexpr int kRows = kTile / kGroups;         // of a thread
  static constexpr int kScores = kTile / kLanes;        // of a thread, in each row
  static constexpr int kPitch = columns * kLanes + 1;   // odd: rows start in different banks
  static constexpr int kElements = kTile * kPitch;
  static constexpr int kScorePitch = kTile + 1;
  static constexpr int kScoreElements = kTile * kScorePitch;

  int group = static_cast<int>(threadIdx.x) / kLanes;
  int lane = static_cast<int>(threadIdx.x) % kLanes;

  __device__ __forceinline__ int row(int r) const { return group + r * kGroups; }
  __device__ __forceinline__ int score(int s) const { return lane + s * kLanes; }
  __device__ __forceinline__ int column(int c) const { return lane + c * kLanes; }

  // Rows from `first` on, converted; what lies beyond rows and columns is 0.
  __device__ void load(A* tile, const T* head, std::int64_t stride, int first, int count,
                       int head_dim) const {
    for (int r = 0; r < kRows; ++r) {
      const bool inside = first + row(r) < count;
      const T* from = head + (inside ? first + row(r) : 0) * stride;
      for (int c = 0; c < kColumns; ++c) {
        tile[row(r) * kPitch + column(c)] =
            inside && column(c) < head_dim ? to_acc(from[column(c)]) : A(0);
      }
    }
  }
  // result[r][s] = own row r of the thread times other row s of the thread
  __device__ void multiply_transposed(A (&result)[kRows][kScores], const A* own, const A* other,
                                      int head_dim) const {
    for (int r = 0; r < kRows; ++r) {
      for (int s = 0; s < kScores; ++s) result[r][s] = A(0);
    }
    for (int d = 0; d < head_dim; ++d) {
      A right[kScores];
#pragma unroll
      for (int s = 0; s < kScores; ++s) right[s] = other[score(s) * kPitch + d];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const A left = own[row(r) * kPitch + d];
#pragma unroll
        for (int s = 0; s < kScores; ++s) result[r][s] = multiply_add(left, right[s], result[r][s]);
      }
    }
  }
  // sums[r][c] += weights of row r times the first `count` rows of the other side
  __device__ void add_product(A (&sums)[kRows][kColumns], const A* weights, const A* other,
                              int count) const {
    for (int j = 0; j < count; ++j) {
      A right[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) right[c] = other[j * kPitch + column(c)];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const A left = weights[row(r) * kScorePitch + j];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sums[r][c] = multiply_add(left, right[c], sums[r][c]);
      }
    }
  }
  __device__ void store(const A (&sums)[kRows][kColumns], const A (&factors)[kRows], T* head,
                        std::int64_t stride, int first, int count, int head_dim) const {
    for (int r = 0; r < kRows; ++r) {
      if (first + row(r) >= count) continue;
      T* to = head + (first + row(r)) * stride;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (column(c) < head_dim) to[column(c)] = from_acc<T>(sums[r][c] * factors[r]);
      }
    }
  }
};

template <typename T>
__device__ __forceinline__ T* head_of(const AttentionView<T>& view, int b, int h) {
  return view.data + b * view.batch_stride + h * view.head_stride;
}

template <typename T>
struct Sizes {
  explicit Sizes(const AttentionShape& shape)
      : heads(static_cast<int>(shape.heads)),
        queries(static_cast<int>(shape.queries)),
        keys(static_cast<int>(shape.keys)),
        head_dim(static_cast<int>(shape.head_dim)),
        scale(static_cast<acc_t<T>>(shape.scale)) {}
  int heads, queries, keys, head_dim;
  acc_t<T> scale;
};

template <typename T>
struct BackwardViews {
  AttentionView<const T> grad_output, q, k, v, output;
  AttentionView<T> grad_q, grad_k, grad_v;
};

template <typename T, int columns>
__global__ void __launch_bounds__(kGroups* kLanes, 2)
    forward_kernel(Sizes<T> p, int blocks, AttentionView<const T> q, AttentionView<const T> k,
                   AttentionView<const T> v, AttentionView<T> output, acc_t<T>* lse) {
  using A = acc_t<T>;
  using Tile = attention::Tile<T, columns>;
  SHERD_DYNAMIC_SHARED(A, shared);
  A* const q_tile = shared;
  A* const other = shared + Tile::kElements;  // keys, then values
  A* const weights = shared + 2 * Tile::kElements;
  const Tile t;
  const int head = static_cast<int>(blockIdx.x) / blocks, b = head / p.heads, h = head % p.heads;
  const int first = static_cast<int>(blockIdx.x) % blocks * Tile::kTile;
  const A minus_infinity = -std::numeric_limits<A>::infinity();

  A sums[Tile::kRows][Tile::kColumns] = {}, largest[Tile::kRows], total[Tile::kRows] = {};
  for (int r = 0; r < Tile::kRows; ++r) largest[r] = minus_infinity;
  t.load(q_tile, head_of(q, b, h), q.token_stride, first, p.queries, p.head_dim);
  for (int start = 0; start < p.keys; start += Tile::kTile) {
    const int count = p.keys - start < Tile::kTile ? p.keys - start : Tile::kTile;
    __syncthreads();  // the values before are used up
    t.load(other, head_of(k, b, h), k.token_stride, start, p.keys, p.head_dim);
    __syncthreads();
    A scores[Tile::kRows][Tile::kScores];
    t.multiply_transposed(scores, q_tile, other, p.head_dim);
    for (int r = 0; r < Tile::kRows; ++r) {
      A most = largest[r];
      for (int s = 0; s < Tile::kScores; ++s) {
        scores[r][s] = t.score(s) < count ? scores[r][s] * p.scale : minus_infinity;
        most = scores[r][s] > most ? scores[r][s] : most;
      }
      most = group_max(most);
      const A correction = exponential(largest[r] - most);
      largest[r] = most;
      A sum = A(0);
      for (int s = 0; s < Tile::kScores; ++s) {
        const A weight = exponential(scores[r][s] - most);
        sum += weight;
        weights[t.row(r) * Tile::kScorePitch + t.score(s)] = weight;
      }
      total[r] = multiply_add(total[r], correction, group_sum(sum));
#pragma unroll
      for (int c = 0; c < Tile::kColumns; ++c) sums[r][c] *= correction;
    }
    __syncthreads();  // the keys are used up, the weights there
    t.load(other, head_of(v, b, h), v.token_stride, start, p.keys, p.head_dim);
    __syncthreads();
    t.add_product(sums, weights, other, count);
  }
  A factors[Tile::kRows];
  for (int r = 0; r < Tile::kRows; ++r) {
    factors[r] = A(1) / total[r];
    const int query = first + t.row(r);
    if (t.lane == 0 && query < p.queries)
      lse[static_cast<std::int64_t>(head) * p.queries + query] = largest[r] + logarithm(total[r]);
  }
  t.store(sums, factors, head_of(output, b, h), output.token_stride, first, p.queries, p.head_dim);
}

// As the two kernels of Note [Attention on tensor cores, backward]: own rows are queries, or keys.
template <typename T, int columns, bool kOfKeys>
__global__ void __launch_bounds__(kGroups* kLanes, 2)
    backward_kernel(Sizes<T> p, int blocks, BackwardViews<T> views, const acc_t<T>* lse,
                    acc_t<T>* delta) {
  using A = acc_t<T>;
  using Tile = attention::Tile<T, columns>;
  SHERD_DYNAMIC_SHARED(A, shared);
  A* const own[2] = {shared, shared + Tile::kElements};
  A* const other[2] = {shared + 2 * Tile::kElements, shared + 3 * Tile::kElements};
  A* const weights[2] = {shared + 4 * Tile::kElements,
                         shared + 4 * Tile::kElements + Tile::kScoreElements};
  const Tile t;
  const int head = static_cast<int>(blockIdx.x) / blocks, b = head / p.heads, h = head % p.heads;
  const int first = static_cast<int>(blockIdx.x) % blocks * Tile::kTile;
  const int own_count = kOfKeys ? p.keys : p.queries;
  const int other_count = kOfKeys ? p.queries : p.keys;
  const AttentionView<const T> own_views[2] = {kOfKeys ? views.k : views.q,
                                               kOfKeys ? views.v : views.grad_output};
  const AttentionView<const T> other_views[2] = {kOfKeys ? views.q : views.k,
                                                 kOfKeys ? views.grad_output : views.v};
  lse += static_cast<std::int64_t>(head) * p.queries;
  delta += static_cast<std::int64_t>(head) * p.queries;

  for (int i = 0; i < 2; ++i) {
    t.load(own[i], head_of(own_views[i], b, h), own_views[i].token_stride, first, own_count,
           p.head_dim);
  }
  A row_lse[Tile::kRows] = {}, row_delta[Tile::kRows] = {};  // of own queries
  if constexpr (!kOfKeys) {
    for (int r = 0; r < Tile::kRows; ++r) {
      const int query = first + t.row(r);
      const bool inside = query < p.queries;
      const T* output =
          head_of(views.output, b, h) + (inside ? query : 0) * views.output.token_stride;
      A sum = A(0);
      for (int c = 0; c < Tile::kColumns; ++c) {
        if (inside && t.column(c) < p.head_dim) {
          // This thread has written the element of the tile.
          sum = multiply_add(own[1][t.row(r) * Tile::kPitch + t.column(c)],
                             to_acc(output[t.column(c)]), sum);
        }
      }
      row_delta[r] = group_sum(sum);
      row_lse[r] = inside ? lse[query] : A(0);
      if (t.lane == 0 && inside) delta[query] = row_delta[r];
    }
  }
  A sums0[Tile::kRows][Tile::kColumns] = {}, sums1[Tile::kRows][Tile::kColumns] = {};
  for (int start = 0; start < other_count; start += Tile::kTile) {
    const int count = other_count - start < Tile::kTile ? other_count - start : Tile::kTile;
    __syncthreads();  // the tiles before are used up
    for (int i = 0; i < 2; ++i) {
      t.load(other[i], head_of(other_views[i], b, h), other_views[i].token_stride, start,
             other_count, p.head_dim);
    }
    __syncthreads();
    A scores[Tile::kRows][Tile::kScores], grads[Tile::kRows][Tile::kScores];
    t.multiply_transposed(scores, own[0], other[0], p.head_dim);
    t.multiply_transposed(grads, own[1], other[1], p.head_dim);
    for (int r = 0; r < Tile::kRows; ++r) {
      for (int s = 0; s < Tile::kScores; ++s) {
        // Only the first `count` columns enter the sums; the others need any number.
        const int query = t.score(s) < count ? start + t.score(s) : 0;
        const A score_lse = kOfKeys ? lse[query] : row_lse[r];
        const A score_delta = kOfKeys ? delta[query] : row_delta[r];
        const A weight = exponential(multiply_add(scores[r][s], p.scale, -score_lse));
        const int at = t.row(r) * Tile::kScorePitch + t.score(s);
        weights[0][at] = weight * (grads[r][s] - score_delta);
        if (kOfKeys) weights[1][at] = weight;
      }
    }
    __syncthreads();
    t.add_product(sums0, weights[0], other[0], count);
    if constexpr (kOfKeys) t.add_product(sums1, weights[1], other[1], count);
  }
  A scales[Tile::kRows], ones[Tile::kRows];
  for (int r = 0; r < Tile::kRows; ++r) {
    scales[r] = p.scale;
    ones[r] = A(1);
  }
  const AttentionView<T> grad0 = kOfKeys ? views.grad_k : views.grad_q;
  t.store(sums0, scales, head_of(grad0, b, h), grad0.token_stride, first, own_count, p.head_dim);
  if constexpr (kOfKeys) {
    t.store(sums1, ones, head_of(views.grad_v, b, h), views.grad_v.token_stride, first, own_count,
            p.head_dim);
  }
}

// Calls body with the number of columns of a thread.
template <typename Body>
void with_columns(std::int64_t head_dim, const Body& body) {
  if (head_dim <= 64) return body(std::integral_constant<int, 4>{});
  if (head_dim <= 128) return body(std::integral_constant<int, 8>{});
  if (head_dim <= 256) return body(std::integral_constant<int, 16>{});
  fail_head_dim(head_dim);
}

}  // namespace

template <typename T>
void general_forward(Stream& stream, const AttentionShape& shape, AttentionView<const T> q,
                     AttentionView<const T> k, AttentionView<const T> v, AttentionView<T> output,
                     acc_t<T>* lse) {
  with_columns(shape.head_dim, [&](auto columns) {
    using Tile = attention::Tile<T, decltype(columns)::value>;
    const std::int64_t blocks = ceil_div(shape.queries, Tile::kTile);
    const unsigned grid = grid_blocks(shape, blocks);
    constexpr std::size_t kShared = (2 * Tile::kElements + Tile::kScoreElements) * sizeof(acc_t<T>);
    launch(forward_kernel<T, Tile::kColumns>, dim3(grid), dim3(kGroups * kLanes), kShared,
           native(stream), Sizes<T>(shape), static_cast<int>(blocks), q, k, v, output, lse);
  });
}

template <typename T>
void general_backward(Stream& stream, const AttentionShape& shape,
                      AttentionView<const T> grad_output, AttentionView<const T> q,
                      AttentionView<const T> k, AttentionView<const T> v,
                      AttentionView<const T> output, const acc_t<T>* lse, AttentionView<T> grad_q,
                      AttentionView<T> grad_k, AttentionView<T> grad_v, acc_t<T>* delta) {
  const BackwardViews<T> views{grad_output, q, k, v, output, grad_q, grad_k, grad_v};
  with_columns(shape.head_dim, [&](auto columns) {
    using Tile = attention::Tile<T, decltype(columns)::value>;
    constexpr std::size_t kShared =
        (4 * Tile::kElements + 2 * Tile::kScoreElements) * sizeof(acc_t<T>);
    const auto run = [&](auto of_keys) {
      constexpr bool kOfKeys = decltype(of_keys)::value;
      const std::int64_t blocks = ceil_div(kOfKeys ? shape.keys : shape.queries, Tile::kTile);
      launch(backward_kernel<T, Tile::kColumns, kOfKeys>, dim3(grid_blocks(shape, blocks)),
             dim3(kGroups * kLanes), kShared, native(stream), Sizes<T>(shape),
             static_cast<int>(blocks), views, lse, delta);
    };
    run(std::false_type{});  // writes delta
    run(std::true_type{});
  });
}

#define SHERD_INSTANTIATE(T)                                                                   \
  template void general_forward<T>(Stream&, const AttentionShape&, AttentionView<const T>,     \
                                   AttentionView<const T>, AttentionView<const T>,             \
                                   AttentionView<T>, acc_t<T>*);                               \
  template void general_backward<T>(                                                           \
      Stream&, const AttentionShape&, AttentionView<const T>, AttentionView<const T>,          \
      AttentionView<const T>, AttentionView<const T>, AttentionView<const T>, const acc_t<T>*, \
      AttentionView<T>, AttentionView<T>, AttentionView<T>, acc_t<T>*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cuda::attention
