// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/runtime/data/synthetic.h>

#include <algorithm>
#include <set>

#include "io_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

Bytes image_of(const ImageDataset& data, std::int64_t index) {
  Bytes image(static_cast<std::size_t>(data.pixels()));
  data.get(index, image.data());
  return image;
}

double squared_distance(const Bytes& image, const std::vector<double>& center) {
  double sum = 0;
  for (std::size_t i = 0; i < image.size(); ++i) {
    sum += (image[i] - center[i]) * (image[i] - center[i]);
  }
  return sum;
}

}  // namespace

TEST_CASE("synthetic: an image is a function of seed and index") {
  SyntheticOptions options{.size = 100, .channels = 3, .height = 17, .width = 5, .seed = 4};
  const auto one = make_synthetic_dataset(options);
  const auto two = make_synthetic_dataset(options);
  options.size = 1'000'000'000'000;  // costs nothing, changes nothing
  const auto huge = make_synthetic_dataset(options);
  options.seed = 5;
  const auto other = make_synthetic_dataset(options);
  std::set<Bytes> seen;
  for (std::int64_t i = 99; i >= 0; --i) {
    const Bytes image = image_of(*one, i);
    CHECK(image == image_of(*two, i));
    CHECK(image == image_of(*huge, i));
    CHECK(image != image_of(*other, i));
    CHECK(one->label(i) == huge->label(i));
    seen.insert(image);
  }
  CHECK(seen.size() == 100);
  CHECK(image_of(*huge, 999'999'999'999).size() == 3 * 17 * 5);
  check_mentions(error_of([&] { image_of(*one, 100); }), "synthetic", "sample 100 of 100");
}

TEST_CASE("synthetic: known values, the same on every machine") {
  const auto data = make_synthetic_dataset(
      {.size = 4, .channels = 1, .height = 2, .width = 3, .classes = 10, .seed = 1});
  CHECK(data->label(0) == 0);
  CHECK(image_of(*data, 0) == Bytes{137, 99, 189, 85, 122, 179});
}

TEST_CASE("synthetic: labels cover the classes evenly") {
  const auto data = make_synthetic_dataset({.size = 10000, .classes = 10});
  std::vector<int> counts(10);
  for (std::int64_t i = 0; i < data->size(); ++i) {
    ++counts[static_cast<std::size_t>(data->label(i))];
  }
  for (const int count : counts) CHECK((count > 850 && count < 1150));
}

TEST_CASE("synthetic: the nearest class mean recognises every image") {
  const auto data = make_synthetic_dataset(
      {.size = 400, .channels = 1, .height = 16, .width = 16, .classes = 10, .seed = 3});
  std::vector<std::vector<double>> centers(10, std::vector<double>(256));
  std::vector<int> counts(10);
  for (std::int64_t i = 0; i < 200; ++i) {
    const auto label = static_cast<std::size_t>(data->label(i));
    const Bytes image = image_of(*data, i);
    ++counts[label];
    for (std::size_t j = 0; j < 256; ++j) centers[label][j] += image[j];
  }
  for (std::size_t label = 0; label < 10; ++label) {
    REQUIRE(counts[label] > 0);
    for (double& value : centers[label]) value /= counts[label];
  }
  for (std::int64_t i = 200; i < 400; ++i) {
    const Bytes image = image_of(*data, i);
    const auto nearest = std::ranges::min_element(
        centers, {}, [&](const auto& center) { return squared_distance(image, center); });
    CHECK(nearest - centers.begin() == data->label(i));
  }
}

TEST_CASE("synthetic: shapes smaller than the pattern's grid, and impossible ones") {
  const auto dot = make_synthetic_dataset({.channels = 13, .height = 1, .width = 1});
  CHECK(image_of(*dot, 7).size() == 13);
  check_mentions(error_of([] { make_synthetic_dataset({.size = 0}); }), "at least 1", "got 0, 3");
  check_mentions(error_of([] { make_synthetic_dataset({.classes = 0}); }), "at least 1");
  check_mentions(error_of([] { make_synthetic_dataset({.height = 65536, .width = 65536}); }),
                 "3x65536x65536", "2^31");
}
