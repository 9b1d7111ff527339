// SPDX-License-Identifier: Apache-2.0
// XXH3 (64 bits) of a block that comes in parts: while a part is in a cache, so that the bytes come
// from memory once for the checksum and for whatever else is done with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace sherd {

class BlockChecksum {
 public:
  static constexpr std::size_t kPart = std::size_t{1} << 20;  // divides the size of a block

  BlockChecksum();
  ~BlockChecksum();
  void add(std::span<const std::uint8_t> part);
  std::uint64_t bytes() const { return bytes_; }  // since the last take()
  std::uint64_t take();

  static std::uint64_t of(std::span<const std::uint8_t> bytes);

 private:
  struct State;
  std::unique_ptr<State> state_;
  std::uint64_t bytes_ = 0;
};

}  // namespace sherd
