// SPDX-License-Identifier: Apache-2.0
// Synthetic images of any shape, for tests, benchmarks and runs without data.
//
// Image and label are pure functions of (seed, index), made on the fly: a dataset of a million
// images takes no memory. Each class has its own coarse pattern (a grid of at most 8x8 grey values
// per channel) to which every image adds fine noise, so a model can learn the classes.
#pragma once

#include <sherd/runtime/api.h>
#include <sherd/runtime/data/dataset.h>

#include <cstdint>
#include <memory>

namespace sherd {

struct SyntheticOptions {
  std::int64_t size = 1024;  // images
  std::int64_t channels = 3;
  std::int64_t height = 224;
  std::int64_t width = 224;
  std::int64_t classes = 10;
  std::uint64_t seed = 0;
};

// Throws on a dimension below 1 and where an image would exceed 2^31 - 1 bytes.
SHERD_API std::unique_ptr<ImageDataset> make_synthetic_dataset(const SyntheticOptions& options);

}  // namespace sherd
