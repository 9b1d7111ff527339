// SPDX-License-Identifier: Apache-2.0
// Whole kernels against float64, and attention with one thing wrong at a time: each mistake shows
// as a wrong result, a NaN or a report, in some order of threads.
#include <cmath>
#include <random>

#include "emulated.h"
#include "example_kernels.h"

using namespace emulated;
using namespace examples;

namespace {

std::mt19937 generator(5);
std::vector<bf16> random_bf16(std::size_t n) {
  std::normal_distribution<float> normal;
  std::vector<bf16> values(n);
  for (bf16& v : values) v = to_bf16(normal(generator));
  return values;
}

double relative_error(const std::vector<double>& expected, const std::vector<bf16>& got) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double d = to_float(got[i]) - expected[i];
    error += d * d;
    size += expected[i] * expected[i];
  }
  return std::isfinite(error) ? std::sqrt(error / size) : INFINITY;
}

struct Attention {
  int heads, n, d;
  std::vector<bf16> q, k, v;
  std::vector<double> expected;
  Attention(int heads_, int n_, int d_) : heads(heads_), n(n_), d(d_) {
    const auto size = static_cast<std::size_t>(heads) * n * d;
    q = random_bf16(size);
    k = random_bf16(size);
    v = random_bf16(size);
    for (int head = 0; head < heads; ++head) {
      for (int i = 0; i < n; ++i)
        row(static_cast<std::size_t>(head) * n, static_cast<std::size_t>(i));
    }
  }
  void row(std::size_t first, std::size_t i) {
    const auto width = static_cast<std::size_t>(d), count = static_cast<std::size_t>(n);
    std::vector<double> weight(count), sum(width + 1);
    for (std::size_t j = 0; j < count; ++j) {
      double s = 0;
      for (std::size_t c = 0; c < width; ++c) {
        s += static_cast<double>(to_float(q[(first + i) * width + c])) *
             to_float(k[(first + j) * width + c]);
      }
      weight[j] = std::exp(s / std::sqrt(d));
      sum[width] += weight[j];
      for (std::size_t c = 0; c < width; ++c)
        sum[c] += weight[j] * to_float(v[(first + j) * width + c]);
    }
    for (std::size_t c = 0; c < width; ++c) expected.push_back(sum[c] / sum[width]);
  }
  // The relative error of the kernel, infinite for NaN or a report.
  template <int D, Bug kBug = Bug::none>
  double error() const {
    const DeviceArray<bf16> dq(q), dk(k), dv(v);
    bf16* out;
    std::vector<bf16> got(q.size());
    expect(cudaMalloc(&out, got.size() * sizeof(bf16)));
    const std::string report = mistake([&] {
      expect(launch_attention<D, kBug>(dq.data(), dk.data(), dv.data(), out, heads, n));
      expect(cudaMemcpy(got.data(), out, got.size() * sizeof(bf16), cudaMemcpyDeviceToHost));
      expect(cudaFree(out));
    });
    return report.empty() ? relative_error(expected, got) : INFINITY;
  }
};

constexpr double kTolerance = 4e-3;  // of bf16 results

template <Bug kBug>
bool found() {
  // Two tiles of keys, where one key more weighs, and four, where buffers are used again.
  const Attention small(1, 70, 64), large(1, 200, 64);
  bool any = false;
  in_all_orders([&] {
    any = any || small.error<64, kBug>() > kTolerance || large.error<64, kBug>() > kTolerance;
  });
  return any;
}

}  // namespace

TEST_CASE("emulator: LayerNorm and attention are right in all orders") {
  std::normal_distribution<float> normal(3, 2);
  for (const int width : {1, 31, 256, 1000}) {
    std::vector<float> x(static_cast<std::size_t>(width) * 3);
    for (float& value : x) value = normal(generator);
    std::vector<double> expected;
    for (std::size_t row = 0; row < 3; ++row) {
      const float* first = &x[row * static_cast<std::size_t>(width)];
      double mean = 0, variance = 0;
      for (int i = 0; i < width; ++i) mean += first[i] / width;
      for (int i = 0; i < width; ++i) variance += (first[i] - mean) * (first[i] - mean) / width;
      for (int i = 0; i < width; ++i)
        expected.push_back((first[i] - mean) / std::sqrt(variance + 1e-6));
    }
    const DeviceArray<float> device_x(x);
    in_all_orders([&] {
      const DeviceArray<bf16> y(x.size());
      run(layer_norm<256>, 3, 256, device_x.data(), y.data(), width);
      if (width > 1) CHECK(relative_error(expected, y.host()) < kTolerance);
      if (width == 1) CHECK(to_float(y.host()[0]) == 0);
    });
  }
  const Attention small(2, 100, 64), middle(1, 130, 80), wide(1, 64, 128);
  in_all_orders([&] {
    CHECK(small.error<64>() < kTolerance);
    CHECK(middle.error<80>() < kTolerance);
    CHECK(wide.error<128>() < kTolerance);
  });
}

#if !EMULATOR_TSAN && !EMULATOR_ASAN  // they report these, and some end the process
TEST_CASE("emulator: every planted mistake of an attention kernel shows") {
  CHECK(found<Bug::no_barrier_after_wait>());
  CHECK(found<Bug::no_barrier_at_loop_end>());
  CHECK(found<Bug::waits_for_one_group_less>());
  CHECK(found<Bug::wrong_column_of_k>());
  CHECK(found<Bug::mask_one_too_far>());
  CHECK(found<Bug::sum_not_rescaled>());
  CHECK(found<Bug::maximum_of_half_the_quad>());
  CHECK(found<Bug::no_row_guard>());
  CHECK_FALSE(found<Bug::none>());
}
#endif
