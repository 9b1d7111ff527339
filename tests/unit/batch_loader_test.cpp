// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/runtime/data/batch_loader.h>
#include <sherd/runtime/data/synthetic.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <numeric>
#include <thread>

#include "io_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

// Image i is filled with the byte i; sample `bad` throws, or has the label `bad_label`.
class TinyDataset : public ImageDataset {
 public:
  explicit TinyDataset(std::int64_t size, std::int64_t bad = -1, std::int64_t bad_label = 0,
                       int delay_ms = 0)
      : ImageDataset({"tiny", size, 2, 1, 3, 256}),
        bad_(bad),
        bad_label_(bad_label),
        delay_ms_(delay_ms) {}

  void get(std::int64_t index, std::uint8_t* out) const override {
    check_index(index);
    if (delay_ms_ > 0) std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms_));
    SHERD_CHECK(index != bad_, "cannot decode sample {}", index);
    std::fill_n(out, pixels(), static_cast<std::uint8_t>(index));
  }
  std::int64_t label(std::int64_t index) const override {
    return index == bad_ && bad_label_ != 0 ? bad_label_ : index % 256;
  }

 private:
  std::int64_t bad_;
  std::int64_t bad_label_;
  int delay_ms_;
};

// A batch with its own memory.
struct Copy {
  Bytes images;
  std::vector<std::int64_t> labels;
  std::vector<std::int64_t> samples;
  std::vector<std::int64_t> numbers;
  bool operator==(const Copy&) const = default;
};

Copy copy_of(const Batch& batch) {
  const auto raw32 = std::as_bytes(batch.images);
  const auto raw64 = std::as_bytes(batch.images_f64);
  Copy copy;
  copy.images.resize(raw32.size() + raw64.size());
  if (!raw32.empty()) std::memcpy(copy.images.data(), raw32.data(), raw32.size());
  if (!raw64.empty()) std::memcpy(copy.images.data(), raw64.data(), raw64.size());
  copy.labels.assign(batch.labels.begin(), batch.labels.end());
  copy.samples.assign(batch.samples.begin(), batch.samples.end());
  copy.numbers = {batch.size, batch.global_size, batch.epoch, batch.index, batch.position};
  return copy;
}

std::vector<Copy> read_epoch(BatchLoader& loader, std::int64_t epoch, std::int64_t position = 0) {
  std::vector<Copy> batches;
  loader.start_epoch(epoch, position);
  while (const BatchPtr batch = loader.next()) batches.push_back(copy_of(*batch));
  CHECK(loader.next() == nullptr);
  return batches;
}

std::shared_ptr<const ImageDataset> small_images() {
  return make_synthetic_dataset({.size = 53, .channels = 3, .height = 5, .width = 7, .seed = 9});
}

BatchLoaderOptions usual_options() {
  BatchLoaderOptions options;
  options.batch_size = 8;
  options.seed = 42;
  options.mean = {0.485, 0.456, 0.406};
  options.stddev = {0.229, 0.224, 0.225};
  return options;
}

}  // namespace

TEST_CASE("epoch_order: a permutation that depends on seed and epoch alone") {
  for (const std::int64_t size : {0, 1, 2, 1000}) {
    std::vector<std::int64_t> order = epoch_order(1, 0, size);
    CHECK(order == epoch_order(1, 0, size));
    if (size == 1000) {
      CHECK(order != epoch_order(1, 1, size));
      CHECK(order != epoch_order(2, 0, size));
    }
    std::ranges::sort(order);
    std::vector<std::int64_t> identity(static_cast<std::size_t>(size));
    std::iota(identity.begin(), identity.end(), 0);
    CHECK(order == identity);
  }
  CHECK(epoch_order(7, 3, 8) == std::vector<std::int64_t>{1, 5, 6, 4, 3, 7, 0, 2});
  check_mentions(error_of([] { epoch_order(0, 0, -1); }), "-1");
}

TEST_CASE("epoch_order: every place is equally likely") {
  std::vector<int> counts(5);
  for (std::uint64_t seed = 0; seed < 5000; ++seed) {
    ++counts[static_cast<std::size_t>(epoch_order(seed, 0, 5)[2])];
  }
  for (const int count : counts) CHECK((count > 880 && count < 1120));
}

TEST_CASE("batch loader: batches follow the order, once each, the last one short") {
  const auto data = std::make_shared<TinyDataset>(10);
  BatchLoader loader(data, {.batch_size = 4, .seed = 5});
  CHECK(loader.batches_per_epoch() == 3);
  const std::vector<std::int64_t> order = epoch_order(5, 2, 10);
  std::vector<std::int64_t> seen;
  loader.start_epoch(2);
  std::int64_t index = 0;
  while (const BatchPtr batch = loader.next()) {
    CHECK(batch->epoch == 2);
    CHECK(batch->index == index);
    CHECK(batch->position == 4 * index);
    CHECK(batch->size == (index < 2 ? 4 : 2));
    CHECK(batch->global_size == batch->size);
    CHECK(batch->images.size() == static_cast<std::size_t>(batch->size) * 6);
    CHECK(batch->images_f64.empty());
    for (std::size_t i = 0; i < batch->samples.size(); ++i) {
      const std::int64_t sample = batch->samples[i];
      CHECK(batch->labels[i] == sample);
      CHECK(batch->images[6 * i + 5] == static_cast<float>(static_cast<double>(sample) / 255.0));
      seen.push_back(sample);
    }
    ++index;
  }
  CHECK(index == 3);
  CHECK(seen == order);
}

TEST_CASE("batch loader: in order without shuffle, and drop_last") {
  const auto data = std::make_shared<TinyDataset>(10);
  BatchLoader loader(data, {.batch_size = 4, .shuffle = false, .drop_last = true, .workers = 1});
  CHECK(loader.batches_per_epoch() == 2);
  const auto batches = read_epoch(loader, 0);
  REQUIRE(batches.size() == 2);
  CHECK(batches[1].samples == std::vector<std::int64_t>{4, 5, 6, 7});
}

TEST_CASE("batch loader: the same bits with any number of workers and any prefetch") {
  for (const bool f64 : {false, true}) {
    BatchLoaderOptions options = usual_options();
    options.f64 = f64;
    BatchLoader plain(small_images(), options);
    const std::vector<Copy> expected[] = {read_epoch(plain, 0), read_epoch(plain, 1)};
    CHECK(expected[0] != expected[1]);
    CHECK(expected[0].size() == 7);
    for (const int workers : {1, 2, 3, 8}) {
      for (const int prefetch : {1, 2, 5}) {
        CAPTURE(workers);
        CAPTURE(prefetch);
        options.workers = workers;
        options.prefetch = prefetch;
        BatchLoader loader(small_images(), options);
        CHECK(read_epoch(loader, 0) == expected[0]);
        CHECK(read_epoch(loader, 1) == expected[1]);
        CHECK(read_epoch(loader, 0) == expected[0]);
      }
    }
  }
}

TEST_CASE("batch loader: pixels are normalised in double and rounded once") {
  const auto data = small_images();
  BatchLoaderOptions options = usual_options();
  BatchLoader single(data, options);
  options.f64 = true;
  BatchLoader twice(data, options);
  single.start_epoch(0);
  twice.start_epoch(0);
  const BatchPtr f32 = single.next(), f64 = twice.next();
  REQUIRE(f32 != nullptr);
  REQUIRE(f64 != nullptr);
  CHECK(f64->images.empty());
  REQUIRE(f64->images_f64.size() == f32->images.size());
  Bytes image(static_cast<std::size_t>(data->pixels()));
  data->get(f32->samples[3], image.data());
  for (std::size_t i = 0; i < image.size(); ++i) {
    const std::size_t channel = i / 35;
    const double expected = (image[i] / 255.0 - options.mean[channel]) / options.stddev[channel];
    CHECK(f64->images_f64[3 * image.size() + i] == expected);
    CHECK(f32->images[3 * image.size() + i] == static_cast<float>(expected));
  }
}

TEST_CASE("batch loader: an epoch resumed from any position goes on as if never left") {
  for (const int workers : {0, 2}) {
    BatchLoaderOptions options = usual_options();
    options.workers = workers;
    BatchLoader loader(small_images(), options);
    const std::vector<Copy> whole = read_epoch(loader, 3);
    for (std::size_t batch = 0; batch <= whole.size(); ++batch) {
      const auto position = static_cast<std::int64_t>(std::min<std::size_t>(8 * batch, 53));
      const std::vector<Copy> rest = read_epoch(loader, 3, position);
      CHECK(rest ==
            std::vector<Copy>(whole.begin() + static_cast<std::ptrdiff_t>(batch), whole.end()));
    }
    // Between two batches of this size, as after a change of the batch size.
    const std::vector<Copy> rest = read_epoch(loader, 3, 50);
    REQUIRE(rest.size() == 1);
    CHECK(rest[0].samples.size() == 3);
    CHECK(rest[0].samples[0] == whole[6].samples[2]);
    check_mentions(error_of([&] { loader.start_epoch(0, 54); }), "sample 54 of 53");
    check_mentions(error_of([&] { loader.start_epoch(-1); }), "epoch -1");
  }
}

TEST_CASE("batch loader: an epoch may be left at any batch") {
  BatchLoaderOptions options = usual_options();
  options.workers = 3;
  options.prefetch = 4;
  BatchLoader loader(small_images(), options);
  BatchLoader fresh(small_images(), options);
  const std::vector<Copy> expected = read_epoch(fresh, 1);
  for (int taken = 0; taken < 7; ++taken) {
    loader.start_epoch(0);
    for (int i = 0; i < taken; ++i) CHECK(loader.next() != nullptr);
    CHECK(read_epoch(loader, 1) == expected);
  }
}

TEST_CASE("batch loader: slices of the ranks make up the global batch") {
  BatchLoaderOptions options = usual_options();
  BatchLoader whole(small_images(), options);
  const std::vector<Copy> expected = read_epoch(whole, 0);
  std::vector<std::vector<Copy>> parts;
  for (int rank = 0; rank < 6; ++rank) {
    options.workers = 1;
    options.rank = rank;
    options.ranks = 6;
    BatchLoader loader(small_images(), options);
    parts.push_back(read_epoch(loader, 0));
    REQUIRE(parts.back().size() == expected.size());
  }
  for (std::size_t batch = 0; batch < expected.size(); ++batch) {
    Copy joined;
    for (const auto& part : parts) {
      const Copy& piece = part[batch];
      joined.images.insert(joined.images.end(), piece.images.begin(), piece.images.end());
      joined.samples.insert(joined.samples.end(), piece.samples.begin(), piece.samples.end());
      CHECK(piece.numbers[1] == expected[batch].numbers[1]);  // the global size
    }
    CHECK(joined.images == expected[batch].images);
    CHECK(joined.samples == expected[batch].samples);
  }
  CHECK(parts[0][0].samples.size() == 2);  // 8 samples: 2 2 1 1 1 1
  CHECK(parts[5][0].samples.size() == 1);
  CHECK(parts[4].back().samples.size() == 1);
  CHECK(parts[5].back().samples.empty());  // the last global batch has 5 samples
}

TEST_CASE("batch loader: a batch stays valid until the next call") {
  BatchLoaderOptions options = usual_options();
  options.workers = 2;
  BatchLoader loader(small_images(), options);
  loader.start_epoch(0);
  while (const BatchPtr batch = loader.next()) {
    const Copy before = copy_of(*batch);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    CHECK(copy_of(*batch) == before);
  }
}

TEST_CASE("batch loader: an error of the dataset comes at its batch's turn") {
  for (const int workers : {0, 1, 4}) {
    CAPTURE(workers);
    const auto data = std::make_shared<TinyDataset>(20, 9);
    BatchLoader loader(data, {.batch_size = 4, .shuffle = false, .workers = workers});
    loader.start_epoch(0);
    CHECK(loader.next() != nullptr);
    CHECK(loader.next() != nullptr);
    for (int i = 0; i < 3; ++i) {
      check_mentions(error_of([&] { loader.next(); }), "cannot decode sample 9");
    }
    loader.start_epoch(1, 12);  // beyond the bad sample: the loader still works
    CHECK(loader.next() != nullptr);
    CHECK(loader.next() != nullptr);
    CHECK(loader.next() == nullptr);

    BatchLoader labels(std::make_shared<TinyDataset>(20, 1, 256),
                       {.batch_size = 4, .shuffle = false, .workers = workers});
    labels.start_epoch(0);
    check_mentions(error_of([&] { labels.next(); }), "'tiny'", "label 256 of sample 1", "0 to 255");
  }
}

TEST_CASE("batch loader: destruction does not wait for what was prefetched") {
  const auto data = std::make_shared<TinyDataset>(1000, -1, 0, 20);
  const auto begin = std::chrono::steady_clock::now();
  for (int round = 0; round < 5; ++round) {
    BatchLoader loader(data, {.batch_size = 500, .workers = 2, .prefetch = 2});
    loader.start_epoch(0);
    if (round % 2 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  // A whole batch would take 10 s.
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
}

TEST_CASE("batch loader: the size of the ring is fixed and known") {
  BatchLoaderOptions options = usual_options();
  // Parts start on lines of 64 bytes.
  CHECK(ring_bytes(options, 105) == 2 * (53 * 64 + 64));
  options.workers = 1;
  options.prefetch = 3;
  options.f64 = true;
  options.ranks = 4;
  CHECK(ring_bytes(options, 105) == 3 * (27 * 64 + 64));
}

TEST_CASE("batch loader: batches lie in the memory that is given, and are the same") {
  for (const bool f64 : {false, true}) {
    BatchLoaderOptions options = usual_options();
    options.f64 = f64;
    options.workers = 2;
    options.prefetch = 3;
    BatchLoader usual(small_images(), options);
    std::shared_ptr<Bytes> given;
    options.memory = [&](std::size_t bytes) {
      CHECK(given == nullptr);
      given = std::make_shared<Bytes>(bytes + 64);
      void* data = given->data();
      std::size_t room = bytes + 64;
      return std::shared_ptr<void>(given, std::align(64, bytes, data, room));
    };
    auto loader = std::make_unique<BatchLoader>(small_images(), options);
    REQUIRE(given != nullptr);
    CHECK(given->size() == ring_bytes(options, 105) + 64);
    CHECK(read_epoch(*loader, 4) == read_epoch(usual, 4));
    const auto inside = [&](const auto& part) {
      const auto* first = reinterpret_cast<const std::byte*>(part.data());
      const auto* begin = reinterpret_cast<const std::byte*>(given->data());
      return first >= begin && first + part.size_bytes() <= begin + given->size();
    };
    loader->start_epoch(0);
    const BatchPtr batch = loader->next();
    if (f64) CHECK(inside(batch->images_f64));
    if (!f64) CHECK(inside(batch->images));
    CHECK(inside(batch->labels));
    // It lives as long as a batch in it.
    const Copy before = copy_of(*batch);
    const std::weak_ptr<Bytes> memory = std::exchange(given, nullptr);
    loader.reset();
    CHECK_FALSE(memory.expired());
    CHECK(copy_of(*batch) == before);
    const_cast<BatchPtr&>(batch).reset();
    CHECK(memory.expired());
  }
}

TEST_CASE("batch loader: a batch keeps its place until it is let go of, in any order") {
  for (const int workers : {0, 1, 3}) {
    CAPTURE(workers);
    BatchLoaderOptions options = usual_options();
    BatchLoader fresh(small_images(), options);
    const std::vector<Copy> expected = read_epoch(fresh, 0), later = read_epoch(fresh, 1);
    options.workers = workers;
    options.prefetch = 3;
    BatchLoader loader(small_images(), options);
    loader.start_epoch(0);
    std::vector<BatchPtr> held;
    for (int i = 0; i < 3; ++i) held.push_back(loader.next());
    check_mentions(error_of([&] { loader.next(); }), "the ring of 3 is in use", "prefetch");
    held[1].reset();  // the next batch's place is not free
    check_mentions(error_of([&] { loader.next(); }), "the ring of 3 is in use");
    held[0].reset();
    held[0] = loader.next();
    held[1] = loader.next();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    CHECK(copy_of(*held[2]) == expected[2]);
    CHECK(copy_of(*held[0]) == expected[3]);
    CHECK(copy_of(*held[1]) == expected[4]);
    // An epoch later too: those of two places are kept, the third serves the new epoch.
    held[2].reset();
    loader.start_epoch(1);
    CHECK(copy_of(*loader.next()) == later[0]);
    check_mentions(error_of([&] { loader.next(); }), "in use");
    CHECK(copy_of(*held[0]) == expected[3]);
    CHECK(copy_of(*held[1]) == expected[4]);
  }
}

TEST_CASE("batch loader: options that do not fit") {
  const auto rejected = [](const auto& change, const auto&... pieces) {
    BatchLoaderOptions options = usual_options();
    change(options);
    check_mentions(error_of([&] { BatchLoader loader(small_images(), options); }), pieces...);
  };
  using Options = BatchLoaderOptions;
  rejected([](Options& o) { o.batch_size = 0; }, "batch_size is 0");
  rejected([](Options& o) { o.workers = -1; }, "workers is -1");
  rejected([](Options& o) { o.prefetch = 0; }, "prefetch is 0");
  rejected([](Options& o) { o.mean = {0.5}; }, "mean has 1 values", "3 channels");
  rejected([](Options& o) { o.stddev = {1, 0, 1}; }, "stddev = [1, 0, 1]", "above 0");
  rejected([](Options& o) { o.mean[1] = std::numeric_limits<double>::quiet_NaN(); }, "not finite");
  rejected([](Options& o) { o.rank = 1; }, "rank 1 of 1 ranks");
  rejected([](Options& o) { o.ranks = 0; }, "rank 0 of 0 ranks");
  rejected([](Options& o) { o.batch_size = 54, o.drop_last = true; }, "53 samples", "54",
           "drop_last");
  check_mentions(error_of([] { BatchLoader loader(nullptr, {}); }), "no dataset");
  check_mentions(
      error_of([] { BatchLoader loader(std::make_shared<TinyDataset>(0), {.batch_size = 1}); }),
      "'tiny' has no samples");
  BatchLoader loader(small_images(), usual_options());
  check_mentions(error_of([&] { loader.next(); }), "start_epoch");
}
