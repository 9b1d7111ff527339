// SPDX-License-Identifier: Apache-2.0
// The bytes of a contiguous tensor, for the host to read: in place where they lie in its memory, a
// copy where they lie on a GPU.
#pragma once

#include <sherd/runtime/tensor.h>

#include <cstdint>
#include <span>
#include <vector>

namespace sherd {

class HostBytes {
 public:
  explicit HostBytes(const Tensor& tensor) : tensor_(tensor) {
    const std::size_t size = static_cast<std::size_t>(tensor.numel()) * size_of(tensor.dtype());
    if (tensor.device() == Device::cuda) {
      copy_.resize(size);
      tensor.copy_to_host(copy_.data(), size);
      bytes_ = copy_;
    } else {
      SHERD_CHECK(tensor.is_contiguous(), "{} is not contiguous", tensor.describe());
      bytes_ = {static_cast<const std::uint8_t*>(tensor.raw_data()), size};
    }
  }
  HostBytes(const HostBytes&) = delete;
  HostBytes& operator=(const HostBytes&) = delete;

  std::span<const std::uint8_t> get() const { return bytes_; }

 private:
  Tensor tensor_;  // keeps the bytes
  std::vector<std::uint8_t> copy_;
  std::span<const std::uint8_t> bytes_;
};

}  // namespace sherd
