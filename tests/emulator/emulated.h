// SPDX-License-Identifier: Apache-2.0
// Shared by the emulator's tests: device arrays, orders, what a wrong kernel reports.
#pragma once

#include <cuda_runtime.h>
#include <doctest/doctest.h>
#include <emulator/device.h>
#include <emulator/emulator.h>

#include <string>
#include <utility>
#include <vector>

namespace emulated {

inline void expect(cudaError_t error) {
  REQUIRE_EQ(cudaGetErrorName(error), cudaGetErrorName(cudaSuccess));
}

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t size) : size_(size) {
    expect(cudaMalloc(&data_, size * sizeof(T)));
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    expect(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~DeviceArray() {
    if (data_ != nullptr) cudaFree(data_);
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* data() const { return data_; }
  std::vector<T> host() const {
    std::vector<T> values(size_);
    expect(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

// In each order of threads and blocks; the default afterwards.
template <class F>
void in_all_orders(F f) {
  emulator::set_order(emulator::Order::forward);
  f();
  emulator::set_order(emulator::Order::reverse);
  f();
  for (const unsigned seed : {1u, 2u, 3u}) {
    emulator::set_order(emulator::Order::random, seed);
    f();
  }
  emulator::set_order(emulator::Order::forward);
}

// What the emulator reports of f, "" if nothing.
template <class F>
std::string mistake(F f) {
  emulator::throw_errors(true);
  std::string message;
  try {
    f();
  } catch (const emulator::Error& error) {
    message = error.what();
  }
  emulator::throw_errors(false);
  return message;
}

inline bool contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  MESSAGE("expected: ", part, "\nin: ", text);
  return false;
}

// "file:line" as in messages.
inline std::string at_line(const char* file, int line) {
  return std::string(file) + ":" + std::to_string(line);
}

template <class... P, class... A>
void run(void (*kernel)(P...), dim3 grid, dim3 block, A&&... arguments) {
  expect(emulator::launch(kernel, grid, block, 0, nullptr, std::forward<A>(arguments)...));
}

}  // namespace emulated
