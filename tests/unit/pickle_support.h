// SPDX-License-Identifier: Apache-2.0
// A writer of pickles for tests, operation by operation; hostile ones too.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sherd::test {

class Pickle {
 public:
  explicit Pickle(int protocol = 2) { op("\x80").number(static_cast<std::uint64_t>(protocol), 1); }

  Pickle& op(std::string_view bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  Pickle& number(std::uint64_t value, int width) {
    for (int i = 0; i < width; ++i) bytes_.push_back(static_cast<std::uint8_t>(value >> (8 * i)));
    return *this;
  }
  Pickle& str(std::string_view text) { return op("X").number(text.size(), 4).op(text); }
  Pickle& integer(std::int64_t value) {
    return op("\x8a").number(8, 1).number(static_cast<std::uint64_t>(value), 8);
  }
  Pickle& global(std::string_view module, std::string_view name) {
    return op("c").op(module).op("\n").op(name).op("\n");
  }
  Pickle& put(std::uint64_t index) { return op("r").number(index, 4); }
  Pickle& get(std::uint64_t index) { return op("j").number(index, 4); }
  Pickle& integers(const std::vector<std::int64_t>& values) {
    op("(");
    for (const std::int64_t value : values) integer(value);
    return op("t");
  }
  Pickle& storage(std::string_view key, std::int64_t numel,
                  std::string_view type = "FloatStorage") {
    op("(").str("storage").global("torch", type).str(key).str("cpu").integer(numel);
    return op("tQ");
  }
  // A float32 tensor in a storage of `numel` elements.
  Pickle& tensor(std::string_view key, std::int64_t numel, std::int64_t offset,
                 const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides,
                 std::string_view type = "FloatStorage") {
    global("torch._utils", "_rebuild_tensor_v2").op("(").storage(key, numel, type);
    integer(offset).integers(shape).integers(strides);
    return op("\x89)tR");
  }
  std::vector<std::uint8_t> done() {
    op(".");
    return bytes_;
  }

 private:
  std::vector<std::uint8_t> bytes_;
};

}  // namespace sherd::test
