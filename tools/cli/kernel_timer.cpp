// SPDX-License-Identifier: Apache-2.0
#include "kernel_timer.h"

#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/reduce.h>
#include <sherd/runtime/cuda/device.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

namespace sherd::cli {
namespace {

using Clock = std::chrono::steady_clock;

std::int64_t flops_of(Context& context) {
  return context.work().matmul_flops + context.work().attention_flops;
}

}  // namespace

KernelTimer::KernelTimer(Context& context, std::size_t buffer, int repeat,
                         std::function<void()> ready)
    : context_(context),
      buffer_(full(context, {static_cast<std::int64_t>(buffer / 4)}, DType::f32, 0.0)),
      repeat_(repeat),
      ready_(std::move(ready)) {}

double KernelTimer::time_once(const std::function<void()>& call) {
  Stream& stream = context_.compute_stream();
  sum(buffer_);
  if (ready_) ready_();
  if (context_.device() == Device::cuda) {
    const Event start = cuda::record_time(stream);
    call();
    return cuda::seconds_between(start, cuda::record_time(stream));
  }
  const auto start = Clock::now();
  call();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

CallTimes KernelTimer::measure(const std::function<void()>& call) {
  CallTimes times;
  const std::int64_t before = flops_of(context_);
  call();  // warms up: libraries choose algorithms, the allocator reserves
  times.flops = flops_of(context_) - before;
  context_.compute_stream().synchronize();
  const double first = time_once(call);
  times.calls = repeat_;
  if (repeat_ == 0) {
    constexpr double kBudget = 0.1;  // seconds
    times.calls = static_cast<int>(std::clamp(kBudget / std::max(first, 1e-9), 3.0, 200.0));
  }
  std::vector<double> seconds;
  for (int i = 0; i < times.calls; ++i) seconds.push_back(time_once(call));
  std::ranges::sort(seconds);
  times.median = seconds[seconds.size() / 2];
  times.fastest = seconds.front();
  times.quartile = seconds[seconds.size() / 4];
  return times;
}

}  // namespace sherd::cli
