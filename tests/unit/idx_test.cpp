// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/runtime/data/idx.h>

#include <algorithm>
#include <filesystem>
#include <numeric>

#include "io_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

Bytes idx(std::initializer_list<std::uint32_t> header, const Bytes& data) {
  Bytes bytes;
  for (const std::uint32_t word : header) {
    for (int shift = 24; shift >= 0; shift -= 8) {
      bytes.push_back(static_cast<std::uint8_t>(word >> shift));
    }
  }
  bytes.insert(bytes.end(), data.begin(), data.end());
  return bytes;
}

Bytes counting(std::size_t size) {
  Bytes bytes(size);
  std::iota(bytes.begin(), bytes.end(), std::uint8_t{0});
  return bytes;
}

// Three images of 2x4 with labels 0, 9, 5.
struct Files {
  TempDirectory directory;
  std::string images = directory.path("images");
  std::string labels = directory.path("labels");
  Files() {
    put_file(images, idx({0x803, 3, 2, 4}, counting(24)));
    put_file(labels, idx({0x801, 3}, {0, 9, 5}));
  }
  std::string error(std::int64_t classes = 10) const {
    return error_of([&] { load_idx_dataset(images, labels, classes); });
  }
};

}  // namespace

TEST_CASE("idx: plain and gzip files give the same dataset") {
  const Files files;
  put_file(files.directory.path("i.gz"), gzip(idx({0x803, 3, 2, 4}, counting(24))));
  put_file(files.directory.path("l.gz"), gzip(idx({0x801, 3}, {0, 9, 5})));
  const auto plain = load_idx_dataset(files.images, files.labels);
  const auto packed =
      load_idx_dataset(files.directory.path("i.gz"), files.directory.path("l.gz"), 10, "named");
  CHECK(plain->name() == "images");
  CHECK(packed->name() == "named");
  for (const auto* data : {plain.get(), packed.get()}) {
    CHECK(data->size() == 3);
    CHECK(data->channels() == 1);
    CHECK(data->height() == 2);
    CHECK(data->width() == 4);
    CHECK(data->pixels() == 8);
    CHECK(data->classes() == 10);
    CHECK(data->label(0) == 0);
    CHECK(data->label(1) == 9);
    CHECK(data->label(2) == 5);
    Bytes image(8);
    data->get(2, image.data());
    CHECK(image == Bytes{16, 17, 18, 19, 20, 21, 22, 23});
    check_mentions(error_of([&] { data->get(3, image.data()); }), "sample 3 of 3");
    check_mentions(error_of([&] { (void)data->label(-1); }), "sample -1 of 3");
  }
}

TEST_CASE("idx: magic numbers") {
  Files files;
  put_file(files.images, idx({0xd03, 3, 2, 4}, counting(24)));
  check_mentions(files.error(), files.images, "0x00000d03", "expected 0x00000803", "images");
  std::swap(files.images, files.labels);
  check_mentions(files.error(), files.images, "0x00000801", "expected 0x00000803", "swapped");
}

TEST_CASE("idx: a file cut at any byte is called truncated") {
  const Files files;
  const Bytes images = idx({0x803, 3, 2, 4}, counting(24));
  for (std::size_t size = 0; size < images.size(); ++size) {
    put_file(files.images,
             Bytes(images.begin(), images.begin() + static_cast<std::ptrdiff_t>(size)));
    check_mentions(files.error(), files.images, "truncated",
                   std::to_string(size < 16 ? size : size - 16));
  }
  put_file(files.images, idx({0x803, 3, 2, 4}, counting(23)));
  check_mentions(files.error(), "[3, 2, 4]", "need 24 bytes", "got 23");
}

TEST_CASE("idx: trailing bytes") {
  const Files files;
  put_file(files.labels, idx({0x801, 3}, {0, 9, 5, 1, 1}));
  check_mentions(files.error(), files.labels, "2 trailing bytes", "need 3", "got 5");
}

TEST_CASE("idx: absurd dimensions") {
  const Files files;
  for (const auto& dims : {idx({0x803, 0, 2, 4}, {}), idx({0x803, 3, 0, 4}, {}),
                           idx({0x803, 0xffffffff, 0xffffffff, 0xffffffff}, counting(24)),
                           idx({0x803, 0x80000000, 0x80000000, 4}, counting(24))}) {
    put_file(files.images, dims);
    check_mentions(files.error(), files.images, "claims dimensions");
  }
  check_mentions(files.error(), "[2147483648, 2147483648, 4]");
}

TEST_CASE("idx: images and labels that do not belong together") {
  const Files files;
  put_file(files.labels, idx({0x801, 4}, {0, 9, 5, 1}));
  check_mentions(files.error(), files.images, "3 images", files.labels, "4 labels");
}

TEST_CASE("idx: labels out of range") {
  const Files files;
  check_mentions(files.error(9), files.labels, "label 9 of sample 1", "0 to 8");
  check_mentions(files.error(0), "1 to 256 classes, got 0");
  check_mentions(files.error(257), "got 257");
}

TEST_CASE("idx: absent and damaged files are named") {
  const Files files;
  put_file(files.labels, {0x1f, 0x8b, 8, 0, 0});
  check_mentions(files.error(), files.labels, "truncated");
  std::filesystem::remove(files.images);
  check_mentions(files.error(), files.images, "No such file");
}

TEST_CASE("idx: the standard names are found, plain before gzip") {
  const TempDirectory directory;
  const Bytes images = idx({0x803, 1, 1, 1}, {5});
  const Bytes labels = idx({0x801, 1}, {3});
  put_file(directory.path("t10k-images-idx3-ubyte.gz"), gzip(images));
  put_file(directory.path("t10k-labels-idx1-ubyte.gz"), gzip(labels));
  put_file(directory.path("t10k-labels-idx1-ubyte"), labels);
  const IdxPaths paths = find_mnist_like(directory.path(), "mnist", "test");
  CHECK(paths.images == directory.path("t10k-images-idx3-ubyte.gz"));
  CHECK(paths.labels == directory.path("t10k-labels-idx1-ubyte"));
  const auto data = load_mnist_like(directory.path(), "mnist", "test");
  CHECK(data->name() == "mnist/test");
  CHECK(data->label(0) == 3);

  const auto rejected = [&](const char* where, const char* which, const char* split,
                            const auto&... pieces) {
    check_mentions(error_of([&] { find_mnist_like(where, which, split); }), pieces...);
  };
  const std::string where = directory.path();
  rejected(where.c_str(), "fashion-mnist", "train", "fashion-mnist (train) not found",
           "train-images-idx3-ubyte[.gz] and train-labels-idx1-ubyte[.gz]", where,
           "apt-get install dataset-fashion-mnist");
  std::filesystem::remove(directory.path("t10k-images-idx3-ubyte.gz"));
  rejected(where.c_str(), "mnist", "test", "looked for t10k-images-idx3-ubyte[.gz] in", where,
           "MNIST's four files");
  rejected("", "mnist", "test", "no directory given", "MNIST's four files");
  rejected(where.c_str(), "cifar", "test", "'cifar'", "'mnist' or 'fashion-mnist'");
  rejected(where.c_str(), "mnist", "val", "'val'", "'train' or 'test'");
}

TEST_CASE("idx: Fashion-MNIST from Debian's package, where it is installed") {
  if (!std::filesystem::exists("/usr/share/datasets/fashion-mnist")) {
    MESSAGE("skipped: the package dataset-fashion-mnist is not installed");
    check_mentions(error_of([] { find_mnist_like("", "fashion-mnist", "test"); }),
                   "/usr/share/datasets/fashion-mnist", "no directory was given",
                   "apt-get install dataset-fashion-mnist");
    return;
  }
  const auto test = load_mnist_like("", "fashion-mnist", "test");
  CHECK(test->size() == 10000);
  CHECK(test->height() == 28);
  CHECK(test->width() == 28);
  std::vector<int> counts(10);
  for (std::int64_t i = 0; i < test->size(); ++i) {
    ++counts[static_cast<std::size_t>(test->label(i))];
  }
  CHECK(counts == std::vector<int>(10, 1000));
}
