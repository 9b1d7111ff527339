// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/data/synthetic.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/philox.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

namespace sherd {
namespace {

constexpr std::int64_t kGrid = 8;  // cells of a pattern along each side

// Bytes of a stream: 16 a block, the words in order, each little-endian.
void fill_bytes(const RandomStream& stream, std::span<std::uint8_t> out) {
  const std::size_t whole = out.size() / 16;
  for (std::size_t i = 0; i < whole; ++i) {
    const auto block = stream.block(i);
    std::memcpy(out.data() + 16 * i, block.data(), 16);  // a constant size: one store
  }
  const auto last = stream.block(whole);
  const std::span rest = out.subspan(16 * whole);
  if (!rest.empty()) std::memcpy(rest.data(), last.data(), rest.size());
}

class SyntheticDataset : public ImageDataset {
 public:
  SyntheticDataset(ImageDatasetInfo info, std::uint64_t seed)
      : ImageDataset(std::move(info)), seed_(seed), labels_(seed, "synthetic", "label") {}

  void get(std::int64_t index, std::uint8_t* out) const override {
    const auto cls = static_cast<std::uint64_t>(label(index));
    const RandomStream pattern(seed_, "synthetic", "pattern", cls);
    const RandomStream noise(seed_, "synthetic", "noise", static_cast<std::uint64_t>(index));
    std::vector<std::uint8_t> cells(static_cast<std::size_t>(channels() * kGrid * kGrid));
    fill_bytes(pattern, cells);
    fill_bytes(noise, {out, static_cast<std::size_t>(pixels())});
    for (std::int64_t channel = 0; channel < channels(); ++channel) {
      for (std::int64_t y = 0; y < height(); ++y) {
        const std::uint8_t* row = cells.data() + kGrid * (kGrid * channel + y * kGrid / height());
        for (std::int64_t cell = 0; cell < kGrid; ++cell) {
          // The pixels x with x * kGrid / width == cell.
          const std::int64_t begin = (cell * width() + kGrid - 1) / kGrid;
          const std::int64_t end = ((cell + 1) * width() + kGrid - 1) / kGrid;
          const int base = 32 + row[cell] / 2;  // 32 .. 159, and with the noise at most 222
          for (std::int64_t x = begin; x < end; ++x) {
            out[x] = static_cast<std::uint8_t>(base + out[x] / 4);
          }
        }
        out += width();
      }
    }
  }

  std::int64_t label(std::int64_t index) const override {
    check_index(index);
    return static_cast<std::int64_t>(
        labels_.below(static_cast<std::uint64_t>(index), static_cast<std::uint64_t>(classes())));
  }

 private:
  std::uint64_t seed_;
  RandomStream labels_;
};

}  // namespace

std::unique_ptr<ImageDataset> make_synthetic_dataset(const SyntheticOptions& options) {
  SHERD_CHECK(
      options.size >= 1 && options.channels >= 1 && options.height >= 1 && options.width >= 1 &&
          options.classes >= 1,
      "synthetic dataset: size, channels, height, width and classes must be at least 1, got "
      "{}, {}, {}, {} and {}",
      options.size, options.channels, options.height, options.width, options.classes);
  std::int32_t bytes = 0;
  const bool fits = !__builtin_mul_overflow(options.channels, options.height, &bytes) &&
                    !__builtin_mul_overflow(bytes, options.width, &bytes);
  SHERD_CHECK(fits, "synthetic dataset: an image of {}x{}x{} exceeds 2^31 - 1 bytes",
              options.channels, options.height, options.width);
  ImageDatasetInfo info{.name = "synthetic",
                        .size = options.size,
                        .channels = options.channels,
                        .height = options.height,
                        .width = options.width,
                        .classes = options.classes};
  return std::make_unique<SyntheticDataset>(std::move(info), options.seed);
}

}  // namespace sherd
