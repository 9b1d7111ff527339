// SPDX-License-Identifier: Apache-2.0
// For tests of CUDA kernels that reduce: arrays at any address, and the CPU kernels' own checks.
#pragma once

#include "device_support.h"
#include "unit/cpu_kernel_test.h"

#define ALL_TYPES double, float, bf16, f16

namespace sherd::test {

using cpu::test::check_as_good_as;
using cpu::test::converted;
using cpu::test::same_bits;
using cpu::test::to_double;

// On the device, `shift` elements behind a multiple of 16 bytes.
template <typename T>
class Placed {
 public:
  explicit Placed(std::size_t count, std::size_t shift = 0)
      : shift_(shift), array_(count + shift) {}
  explicit Placed(const std::vector<T>& values, std::size_t shift = 0)
      : shift_(shift), array_([&] {
          std::vector<T> all(shift, T(0.f));
          all.insert(all.end(), values.begin(), values.end());
          return all;
        }()) {}
  T* data() const { return array_.data() + shift_; }
  std::vector<T> values() const {
    const std::vector<T> all = array_.values();
    return {all.begin() + static_cast<std::ptrdiff_t>(shift_), all.end()};
  }

 private:
  std::size_t shift_;
  DeviceArray<T> array_;
};

inline Stream& device_stream() {
  return device_context().compute_stream();
}

// Runs body(context) on cuda and on meta in its place: the same peak, to the byte.
template <typename Body>
void check_planned_peak(const Body& body) {
  Context device({.device = Device::cuda}), meta({.device = Device::meta, .meta_of = Device::cuda});
  body(device);
  body(meta);
  CHECK(device.ledger().peaks() == meta.ledger().peaks());
  CHECK(device.ledger().peak_total() > 0);
}

}  // namespace sherd::test
