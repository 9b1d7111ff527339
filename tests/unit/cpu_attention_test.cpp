// SPDX-License-Identifier: Apache-2.0
// kernels/cpu/attention.h against the definition, written out in fp64. The same code with every
// intermediate result rounded to T is "the plain computation" that low precision is measured by.
#include <doctest/doctest.h>
#include <sherd/kernels/cpu/attention.h>
#include <sherd/kernels/cpu/gemm_small.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace {

using namespace sherd;
using namespace sherd::cpu;

double to_double(double x) {
  return x;
}
double to_double(float x) {
  return x;
}
double to_double(bf16 x) {
  return static_cast<float>(x);
}
double to_double(f16 x) {
  return static_cast<float>(x);
}

template <typename T>
T from_double(double x) {
  return T(static_cast<acc_t<T>>(x));
}

// Deterministic numbers in [-1, 1).
struct Numbers {
  std::uint32_t state;
  double next() {
    state = state * 1664525u + 1013904223u;
    return static_cast<double>(state >> 8) / 8388608.0 - 1.0;
  }
};

// One of q, k, v, output or a gradient as [batch, tokens, heads, dim] with strides, in memory that
// has other things before, between and after its elements.
template <typename T>
struct Strided {
  static constexpr std::int64_t kGuard = 37;

  // `copies` as in a packed [batch, tokens, copies, heads, dim], of which this is number `copy`.
  Strided(const AttentionShape& s, std::int64_t token_count, int copies = 1, int copy = 0)
      : shape(s), tokens(token_count) {
    view.head_stride = s.head_dim;
    view.token_stride = copies * s.heads * s.head_dim;
    view.batch_stride = tokens * view.token_stride;
    memory.assign(static_cast<std::size_t>(s.batch * view.batch_stride + 2 * kGuard), guard());
    view.data = memory.data() + kGuard + copy * s.heads * s.head_dim;
  }
  Strided(const Strided&) = delete;

  static T guard() { return from_double<T>(-7.5); }

  T& at(std::int64_t b, std::int64_t n, std::int64_t h, std::int64_t d) {
    return view.data[b * view.batch_stride + n * view.token_stride + h * view.head_stride + d];
  }
  void each(const std::function<void(T&)>& visit) {
    for (std::int64_t b = 0; b < shape.batch; ++b) {
      for (std::int64_t n = 0; n < tokens; ++n) {
        for (std::int64_t h = 0; h < shape.heads; ++h) {
          for (std::int64_t d = 0; d < shape.head_dim; ++d) visit(at(b, n, h, d));
        }
      }
    }
  }
  void fill(std::uint32_t seed, double size = 1) {
    Numbers numbers{seed};
    each([&](T& x) { x = from_double<T>(size * numbers.next()); });
  }
  AttentionView<const T> input() const {
    return {view.data, view.batch_stride, view.token_stride, view.head_stride};
  }
  // In the order of each().
  std::vector<double> values() {
    std::vector<double> list;
    each([&](T& x) { list.push_back(to_double(x)); });
    return list;
  }
  // True if nothing but the elements was written. Overwrites the elements.
  bool only_elements_written() {
    each([](T& x) { x = guard(); });
    const T expected = guard();
    return std::all_of(memory.begin(), memory.end(),
                       [&](const T& x) { return std::memcmp(&x, &expected, sizeof x) == 0; });
  }

  AttentionShape shape;
  std::int64_t tokens;
  std::vector<T> memory;
  AttentionView<T> view;
};

// Memory for the workspace, of exactly the size asked for (the address sanitizer watches its end).
template <typename T>
std::vector<char> workspace(const AttentionShape& shape, int threads, bool backward) {
  std::vector<char> bytes(attention_workspace_bytes<T>(shape, threads, backward));
  std::memset(bytes.data(), 0xff, bytes.size());  // NaNs: scratch must be written before it is read
  return bytes;
}

// Inputs and results of one shape.
template <typename T>
struct Case {
  explicit Case(const AttentionShape& s, double size = 1)
      : shape(s),
        q(s, s.queries, s.queries == s.keys ? 3 : 1, 0),
        k(s, s.keys, s.queries == s.keys ? 3 : 2, s.queries == s.keys ? 1 : 0),
        v(s, s.keys, s.queries == s.keys ? 3 : 2, s.queries == s.keys ? 2 : 1),
        output(s, s.queries),
        grad_output(s, s.queries),
        grad_q(s, s.queries, 3, 0),
        grad_k(s, s.keys, 3, 1),
        grad_v(s, s.keys, 3, 2),
        lse(static_cast<std::size_t>(s.batch * s.heads * s.queries)) {
    q.fill(1, size);
    k.fill(2, size);
    v.fill(3);
    grad_output.fill(4);
  }
  void run(int threads) {
    auto scratch = workspace<T>(shape, threads, false);
    attention_forward<T>(shape, q.input(), k.input(), v.input(), output.view, lse.data(),
                         scratch.data(), threads);
    scratch = workspace<T>(shape, threads, true);
    attention_backward<T>(shape, grad_output.input(), q.input(), k.input(), v.input(),
                          output.input(), lse.data(), grad_q.view, grad_k.view, grad_v.view,
                          scratch.data(), threads);
  }

  AttentionShape shape;
  Strided<T> q, k, v, output, grad_output, grad_q, grad_k, grad_v;
  std::vector<acc_t<T>> lse;
};

// The definition. `round` is applied to every stored intermediate result.
struct Reference {
  template <typename T, typename Round>
  Reference(Case<T>& c, const Round& round) {
    const AttentionShape& s = c.shape;
    Strided<double> o(s, s.queries), gq(s, s.queries), gk(s, s.keys), gv(s, s.keys);
    for (auto* grad : {&o, &gq, &gk, &gv}) grad->each([](double& x) { x = 0; });
    std::vector<double> p(static_cast<std::size_t>(s.keys)), gp(p.size());
    const auto at = [](Strided<T>& x, auto... index) { return to_double(x.at(index...)); };
    for (std::int64_t b = 0; b < s.batch; ++b) {
      for (std::int64_t h = 0; h < s.heads; ++h) {
        for (std::int64_t i = 0; i < s.queries; ++i) {
          double largest = -std::numeric_limits<double>::infinity(), sum = 0, dot = 0;
          for (std::int64_t j = 0; j < s.keys; ++j) {
            double score = 0, grad = 0;
            for (std::int64_t d = 0; d < s.head_dim; ++d) {
              score += at(c.q, b, i, h, d) * at(c.k, b, j, h, d);
              grad += at(c.grad_output, b, i, h, d) * at(c.v, b, j, h, d);
            }
            p[static_cast<std::size_t>(j)] = round(round(score) * s.scale);
            gp[static_cast<std::size_t>(j)] = round(grad);
            largest = std::max(largest, p[static_cast<std::size_t>(j)]);
          }
          for (double& x : p) sum += std::exp(x - largest);
          lse.push_back(largest + std::log(sum));
          for (double& x : p) x = round(std::exp(x - largest) / sum);
          for (std::size_t j = 0; j < p.size(); ++j) dot += p[j] * gp[j];
          for (std::int64_t j = 0; j < s.keys; ++j) {
            const double pj = p[static_cast<std::size_t>(j)];
            const double gs = round(round(pj * (gp[static_cast<std::size_t>(j)] - dot)) * s.scale);
            for (std::int64_t d = 0; d < s.head_dim; ++d) {
              o.at(b, i, h, d) += pj * at(c.v, b, j, h, d);
              gv.at(b, j, h, d) += pj * at(c.grad_output, b, i, h, d);
              gk.at(b, j, h, d) += gs * at(c.q, b, i, h, d);
              gq.at(b, i, h, d) += gs * at(c.k, b, j, h, d);
            }
          }
        }
      }
    }
    for (auto* result : {&o, &gq, &gk, &gv}) result->each([&](double& x) { x = round(x); });
    output = o.values();
    grad_q = gq.values();
    grad_k = gk.values();
    grad_v = gv.values();
  }
  std::vector<double> output, lse, grad_q, grad_k, grad_v;
};

double largest_of(const std::vector<double>& x) {
  double largest = 0;
  for (const double value : x) largest = std::max(largest, std::fabs(value));
  return largest;
}
double largest_error(const std::vector<double>& got, const std::vector<double>& want) {
  REQUIRE(got.size() == want.size());
  double largest = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = std::fabs(got[i] - want[i]);
    if (!(error <= largest)) largest = error;  // a NaN stays
  }
  return largest;
}

const std::vector<AttentionShape> kShapes = {
    // batch, heads, queries, keys, head_dim, scale
    {1, 1, 1, 1, 1, 1.0},       {2, 2, 7, 9, 1, 0.7},      {2, 3, 17, 17, 16, 0.25},
    {3, 2, 5, 33, 20, 0.22},    {1, 2, 50, 50, 64, 0.125}, {1, 1, 197, 197, 64, 0.125},
    {1, 2, 65, 65, 128, 0.088}, {1, 2, 40, 1, 32, 0.18},   {2, 1, 1, 197, 96, 0.1},
    {1, 1, 257, 257, 80, 0.11}, {1, 2, 3, 900, 24, 0.2},   {1, 1, 200, 500, 8, -0.35},
};

template <typename T>
void check_exact(double tolerance) {
  for (const AttentionShape& shape : kShapes) {
    CAPTURE(shape.queries);
    CAPTURE(shape.keys);
    CAPTURE(shape.head_dim);
    Case<T> c(shape);
    const Reference want(c, [](double x) { return x; });
    c.run(1);
    const auto near = [&](const std::vector<double>& got, const std::vector<double>& exact) {
      return largest_error(got, exact) <= tolerance * std::max(0.1, largest_of(exact));
    };
    CHECK(near(c.output.values(), want.output));
    CHECK(near({c.lse.begin(), c.lse.end()}, want.lse));
    CHECK(near(c.grad_q.values(), want.grad_q));
    CHECK(near(c.grad_k.values(), want.grad_k));
    CHECK(near(c.grad_v.values(), want.grad_v));
    for (Strided<T>* written : {&c.output, &c.grad_q, &c.grad_k, &c.grad_v}) {
      CHECK(written->only_elements_written());
    }
  }
}

template <typename T>
void check_low_precision() {
  for (const AttentionShape& shape : kShapes) {
    CAPTURE(shape.queries);
    CAPTURE(shape.keys);
    CAPTURE(shape.head_dim);
    Case<T> c(shape, 2);
    const Reference exact(c, [](double x) { return x; });
    const Reference plain(c, [](double x) { return to_double(from_double<T>(x)); });
    c.run(2);
    const auto good = [](double factor, const std::vector<double>& got,
                         const std::vector<double>& simple, const std::vector<double>& truth) {
      return largest_error(got, truth) <= factor * largest_error(simple, truth) + 1e-6;
    };
    CHECK(good(2, c.output.values(), plain.output, exact.output));
    CHECK(good(3, c.grad_q.values(), plain.grad_q, exact.grad_q));
    CHECK(good(3, c.grad_k.values(), plain.grad_k, exact.grad_k));
    CHECK(good(3, c.grad_v.values(), plain.grad_v, exact.grad_v));
    for (Strided<T>* written : {&c.output, &c.grad_q, &c.grad_k, &c.grad_v}) {
      CHECK(written->only_elements_written());
    }
  }
}

template <typename T>
void check_threads() {
  const AttentionShape shape{3, 5, 29, 29, 20, 0.3};
  Case<T> one(shape);
  one.run(1);
  for (const int threads : {2, 3, 4, 64}) {
    Case<T> many(shape);
    many.run(threads);
    CHECK(std::memcmp(many.lse.data(), one.lse.data(), one.lse.size() * sizeof one.lse[0]) == 0);
    const auto same = [](const Strided<T>& a, const Strided<T>& b) {
      return std::memcmp(a.memory.data(), b.memory.data(), a.memory.size() * sizeof(T)) == 0;
    };
    CHECK(same(many.output, one.output));
    CHECK(same(many.grad_q, one.grad_q));
    CHECK(same(many.grad_k, one.grad_k));
    CHECK(same(many.grad_v, one.grad_v));
  }
}

}  // namespace

TEST_CASE("attention: fp64 and fp32 against the definition") {
  check_exact<double>(2e-14);
  check_exact<float>(4e-6);
}

TEST_CASE("attention: bf16 and f16 err no more than the plain computation") {
  check_low_precision<bf16>();
  check_low_precision<f16>();
}

TEST_CASE("attention: the same bits on any number of threads") {
  check_threads<double>();
  check_threads<float>();
  check_threads<bf16>();
}

TEST_CASE("attention: large scores neither overflow nor vanish") {
  for (const std::int64_t keys : {40, 800}) {  // one block of keys, several
    const AttentionShape shape{1, 1, 20, keys, 16, 1.0};
    Case<float> c(shape, 20);  // scores up to about +-3000
    const Reference want(c, [](double x) { return x; });
    c.run(1);
    CHECK(largest_of(want.lse) > 500);
    CHECK(largest_error({c.lse.begin(), c.lse.end()}, want.lse) < 2e-3);
    CHECK(largest_error(c.output.values(), want.output) < 2e-3);
    CHECK(largest_error(c.grad_v.values(), want.grad_v) < 1e-2);
    CHECK(largest_error(c.grad_q.values(), want.grad_q) < 1e-1);
  }
}

TEST_CASE("attention: a NaN reaches the rows that see it and no others") {
  const AttentionShape shape{1, 2, 30, 30, 16, 0.25};
  Case<float> c(shape);
  c.q.at(0, 11, 1, 3) = std::numeric_limits<float>::quiet_NaN();
  c.run(1);
  for (std::int64_t h = 0; h < 2; ++h) {
    for (std::int64_t n = 0; n < 30; ++n) {
      CHECK(std::isnan(c.output.at(0, n, h, 5)) == (h == 1 && n == 11));
      CHECK(std::isnan(c.grad_q.at(0, n, h, 5)) == (h == 1 && n == 11));
      CHECK(std::isnan(c.grad_k.at(0, n, h, 5)) == (h == 1));
    }
  }
}

TEST_CASE("attention: gradients may overwrite the inputs") {
  for (const std::int64_t tokens : {21, 450}) {
    const AttentionShape shape{2, 2, tokens, tokens, 20, 0.3};
    Case<float> c(shape);
    c.run(1);
    auto scratch = workspace<float>(shape, 1, true);
    attention_backward<float>(shape, c.grad_output.input(), c.q.input(), c.k.input(), c.v.input(),
                              c.output.input(), c.lse.data(), c.q.view, c.k.view, c.v.view,
                              scratch.data(), 1);
    CHECK(c.q.values() == c.grad_q.values());
    CHECK(c.k.values() == c.grad_k.values());
    CHECK(c.v.values() == c.grad_v.values());
  }
}

TEST_CASE("attention: workspace grows with tokens, not with their square") {
  AttentionShape shape{8, 12, 1000, 1000, 64, 0.125};
  const auto bytes = [&](int threads) {
    return attention_workspace_bytes<float>(shape, threads, true);
  };
  const std::size_t once = bytes(1);
  CHECK(bytes(4) <= 4 * once);
  CHECK(bytes(1000) == bytes(96));  // no more workers than heads
  shape.queries = shape.keys = 4000;
  CHECK(bytes(1) < 4 * once + (std::size_t{1} << 20));
}

TEST_CASE("small product: every tile shape, transposed or not, bit for bit one chain per element") {
  constexpr std::int64_t kDepth = 19;
  for (std::int64_t rows = 1; rows <= 30; ++rows) {
    for (std::int64_t vectors = 1; vectors <= 9; ++vectors) {
      const std::int64_t columns = vectors * kLanes<float>, c_stride = columns + kLanes<float>;
      std::vector<float> a(static_cast<std::size_t>(rows * kDepth));
      std::vector<float> b(static_cast<std::size_t>(kDepth * columns));
      Numbers numbers{static_cast<std::uint32_t>(rows * 100 + vectors)};
      for (float& x : a) x = static_cast<float>(numbers.next());
      for (float& x : b) x = static_cast<float>(numbers.next());
      bool same = true;
      for (const bool transposed : {false, true}) {
        const LeftOperand<float> left{a.data(), transposed ? 1 : kDepth, transposed ? rows : 1};
        std::vector<float> c(static_cast<std::size_t>(rows * c_stride), -7.5f);
        for (const bool accumulate : {false, true}) {
          std::vector<float> want = c;
          multiply_small<float>(rows, vectors, kDepth, left, {b.data(), columns, kLanes<float>},
                                c.data(), c_stride, accumulate);
          for (std::int64_t i = 0; i < rows; ++i) {
            for (std::int64_t v = 0; v < vectors; ++v) {
              float* at = want.data() + i * c_stride + v * kLanes<float>;
              Vec<float> sum = accumulate ? load<float>(at) : Vec<float>{};
              for (std::int64_t k = 0; k < kDepth; ++k) {
                const float element = left.data[i * left.row_stride + k * left.column_stride];
                sum = madd(broadcast<float>(element),
                           load<float>(b.data() + k * columns + v * kLanes<float>), sum);
              }
              store<float>(at, sum);
            }
          }
          same = same && c == want;
        }
      }
      CHECK(same);
    }
  }
}
