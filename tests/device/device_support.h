// SPDX-License-Identifier: Apache-2.0
// For tests of CUDA kernels: arrays on the device, and the comparison with fp64.
#pragma once

#include <doctest/doctest.h>
#include <sherd/runtime/context.h>
#include <sherd/runtime/cuda/device.h>
#include <sherd/runtime/dtype.h>
#include <sherd/runtime/philox.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <vector>

namespace sherd::test {

// The device's compute stream and its memory; one for all cases of the program.
inline Context& device_context() {
  static Context context({.device = Device::cuda});
  return context;
}

// An array in the device's memory. Guards around it, checked at the end, catch kernels that write
// beyond it.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count) {
    block_ = device_context().allocator().allocate(bytes() + 2 * kGuard, MemoryCategory::workspace);
    std::vector<unsigned char> poison(bytes() + 2 * kGuard, 0xff);  // NaN in every type
    cuda::copy(stream(), block_.data, poison.data(), poison.size());
    stream().synchronize();
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    cuda::copy(stream(), data(), values.data(), bytes());
    stream().synchronize();
  }
  ~DeviceArray() {
    std::vector<unsigned char> all(bytes() + 2 * kGuard);
    cuda::copy(stream(), all.data(), block_.data, all.size());
    stream().synchronize();
    const auto intact = [](std::span<const unsigned char> guard) {
      return std::ranges::all_of(guard, [](unsigned char byte) { return byte == 0xff; });
    };
    CHECK_MESSAGE(intact(std::span(all).first(kGuard)), "a kernel wrote before an array");
    CHECK_MESSAGE(intact(std::span(all).last(kGuard)), "a kernel wrote behind an array");
    device_context().allocator().release(block_, MemoryCategory::workspace, {});
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const {
    return reinterpret_cast<T*>(static_cast<unsigned char*>(block_.data) + kGuard);
  }
  std::size_t size() const { return count_; }
  std::vector<T> values() const {
    std::vector<T> host(count_);
    cuda::copy(stream(), host.data(), data(), bytes());
    stream().synchronize();
    return host;
  }
  static Stream& stream() { return device_context().compute_stream(); }

 private:
  static constexpr std::size_t kGuard = 256;
  std::size_t bytes() const { return count_ * sizeof(T); }

  std::size_t count_;
  MemoryBlock block_;
};

// Normal numbers, the same in every run.
template <typename T>
std::vector<T> random_values(std::size_t count, const char* name, double scale = 1.0,
                             double shift = 0.0) {
  const RandomStream stream(7, "test", name);
  std::vector<T> values(count);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = T(static_cast<float>(shift + scale * stream.normal(i)));
  return values;
}

template <typename T>
std::vector<double> as_doubles(const std::vector<T>& values) {
  std::vector<double> wide(values.size());
  std::ranges::transform(values, wide.begin(), [](T value) {
    if constexpr (sizeof(T) == 2) {
      return static_cast<double>(static_cast<float>(value));
    } else {
      return static_cast<double>(value);
    }
  });
  return wide;
}

// The largest error, in units of the largest magnitude of the reference.
inline double error_of(const std::vector<double>& values, const std::vector<double>& reference) {
  REQUIRE(values.size() == reference.size());
  double largest = 0.0, error = 0.0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    largest = std::max(largest, std::abs(reference[i]));
    const double difference = std::abs(values[i] - reference[i]);
    error = std::isnan(difference) ? INFINITY : std::max(error, difference);
  }
  return largest == 0.0 ? error : error / largest;
}

// Runs the body once on a GPU; in the emulator with threads and blocks in their order, in reverse
// and in a random order, which finds kernels that rely on one.
void in_all_orders(const std::function<void()>& body);

// In the emulator: streams made in the body lag behind the host, so that who does not wait for them
// reads too early.
void with_late_streams(const std::function<void()>& body);

}  // namespace sherd::test
