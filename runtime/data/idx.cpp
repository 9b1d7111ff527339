// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/data/idx.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/file.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <vector>

namespace sherd {
namespace {

constexpr std::uint32_t kImagesMagic = 0x803;
constexpr std::uint32_t kLabelsMagic = 0x801;
constexpr std::uint64_t kMaxFile = std::uint64_t{2}
                                   << 30;  // EMNIST, the largest known, has 0.64 GB
constexpr const char* kDebianPackage = "dataset-fashion-mnist";
constexpr const char* kDebianDirectory = "/usr/share/datasets/fashion-mnist";

std::uint32_t big_endian(const std::vector<std::uint8_t>& bytes, std::size_t offset) {
  std::uint32_t word = 0;
  for (std::size_t i = 0; i < 4; ++i) word = word << 8 | bytes[offset + i];
  return word;
}

struct IdxFile {
  std::vector<std::uint8_t> bytes;
  std::vector<std::int64_t> dims;
  std::size_t data = 0;  // where the elements begin
};

IdxFile read_idx(const std::string& path, std::uint32_t magic, const char* content) {
  IdxFile file;
  file.bytes = read_maybe_gzip(path, kMaxFile);
  SHERD_CHECK(file.bytes.size() >= 4, "IDX file '{}' is truncated: {} bytes, no magic number", path,
              file.bytes.size());
  const std::uint32_t got = big_endian(file.bytes, 0);
  const bool other = got == kImagesMagic || got == kLabelsMagic;
  SHERD_CHECK(got == magic, "IDX file '{}' has magic number 0x{:08x}, expected 0x{:08x} ({}){}",
              path, got, magic, content, other ? ": are images and labels swapped?" : "");
  const std::size_t rank = magic & 0xffu;
  file.data = 4 + 4 * rank;
  SHERD_CHECK(file.bytes.size() >= file.data,
              "IDX file '{}' is truncated: {} bytes, its header alone has {}", path,
              file.bytes.size(), file.data);
  std::uint64_t expected = 1;
  bool overflow = false;
  for (std::size_t i = 0; i < rank; ++i) {
    const std::uint32_t dim = big_endian(file.bytes, 4 + 4 * i);
    file.dims.push_back(dim);
    overflow = __builtin_mul_overflow(expected, dim, &expected) || overflow;
  }
  SHERD_CHECK(
      !overflow && expected > 0 && expected <= kMaxFile,
      "IDX file '{}' claims dimensions [{}]: expected at least 1 and at most {} bytes of {}", path,
      fmt::join(file.dims, ", "), kMaxFile, content);
  const std::uint64_t have = file.bytes.size() - file.data;
  SHERD_CHECK(have >= expected,
              "IDX file '{}' is truncated: dimensions [{}] need {} bytes after the header, got {}",
              path, fmt::join(file.dims, ", "), expected, have);
  SHERD_CHECK(
      have == expected,
      "IDX file '{}' has {} trailing bytes: dimensions [{}] need {} bytes after the header, "
      "got {}",
      path, have - expected, fmt::join(file.dims, ", "), expected, have);
  return file;
}

class IdxDataset : public ImageDataset {
 public:
  IdxDataset(ImageDatasetInfo info, IdxFile images, IdxFile labels)
      : ImageDataset(std::move(info)), images_(std::move(images)), labels_(std::move(labels)) {}

  void get(std::int64_t index, std::uint8_t* out) const override {
    check_index(index);
    std::copy_n(images_.bytes.data() + images_.data + index * pixels(), pixels(), out);
  }

  std::int64_t label(std::int64_t index) const override {
    check_index(index);
    return labels_.bytes[labels_.data + static_cast<std::size_t>(index)];
  }

 private:
  IdxFile images_;
  IdxFile labels_;
};

// The plain file before the compressed one: it needs no inflating. Empty if neither is there.
std::string plain_or_gzip(const std::string& directory, const std::string& file) {
  for (const char* suffix : {"", ".gz"}) {
    const std::string path = (std::filesystem::path(directory) / (file + suffix)).string();
    std::error_code ignored;
    if (std::filesystem::is_regular_file(path, ignored)) return path;
  }
  return "";
}

}  // namespace

std::unique_ptr<ImageDataset> load_idx_dataset(const std::string& images_path,
                                               const std::string& labels_path, std::int64_t classes,
                                               const std::string& name) {
  SHERD_CHECK(classes >= 1 && classes <= 256,
              "IDX labels are bytes: expected 1 to 256 classes, got {}", classes);
  IdxFile images = read_idx(images_path, kImagesMagic, "images");
  IdxFile labels = read_idx(labels_path, kLabelsMagic, "labels");
  const std::int64_t count = images.dims[0];
  SHERD_CHECK(count == labels.dims[0],
              "IDX files do not belong together: '{}' has {} images, '{}' has {} labels",
              images_path, count, labels_path, labels.dims[0]);
  const auto first = labels.bytes.begin() + static_cast<std::ptrdiff_t>(labels.data);
  const auto wrong = std::find_if(first, labels.bytes.end(), [&](int v) { return v >= classes; });
  SHERD_CHECK(wrong == labels.bytes.end(),
              "IDX file '{}': label {} of sample {} is out of range: expected 0 to {}", labels_path,
              int{*wrong}, wrong - first, classes - 1);
  ImageDatasetInfo info{.name = name,
                        .size = count,
                        .channels = 1,
                        .height = images.dims[1],
                        .width = images.dims[2],
                        .classes = classes};
  if (name.empty()) info.name = std::filesystem::path(images_path).filename().string();
  return std::make_unique<IdxDataset>(std::move(info), std::move(images), std::move(labels));
}

IdxPaths find_mnist_like(const std::string& directory, const std::string& which,
                         const std::string& split) {
  const bool fashion = which == "fashion-mnist";
  SHERD_CHECK(fashion || which == "mnist",
              "unknown dataset '{}': expected 'mnist' or 'fashion-mnist'", which);
  SHERD_CHECK(split == "train" || split == "test",
              "unknown split '{}' of {}: expected 'train' or 'test'", split, which);
  const std::string prefix = split == "train" ? "train" : "t10k";
  const std::string images = prefix + "-images-idx3-ubyte";
  const std::string labels = prefix + "-labels-idx1-ubyte";
  const std::string help =
      fashion ? fmt::format(
                    "install Debian's package {} (apt-get install {}) or give the "
                    "directory that holds the files",
                    kDebianPackage, kDebianPackage)
              : std::string(
                    "get MNIST's four files (yann.lecun.com/exdb/mnist and its mirrors) and give "
                    "their directory");
  SHERD_CHECK(fashion || !directory.empty(),
              "no directory given for {} ({}): looked for nothing; {}", which, split, help);
  const std::string where = directory.empty() ? kDebianDirectory : directory;
  IdxPaths paths{plain_or_gzip(where, images), plain_or_gzip(where, labels)};
  const std::string missing = paths.images.empty() && paths.labels.empty()
                                  ? images + "[.gz] and " + labels + "[.gz]"
                              : paths.images.empty() ? images + "[.gz]"
                                                     : labels + "[.gz]";
  SHERD_CHECK(!paths.images.empty() && !paths.labels.empty(),
              "{} ({}) not found: looked for {} in '{}'{}; {}", which, split, missing, where,
              directory.empty() ? " (no directory was given)" : "", help);
  return paths;
}

std::unique_ptr<ImageDataset> load_mnist_like(const std::string& directory,
                                              const std::string& which, const std::string& split) {
  const IdxPaths paths = find_mnist_like(directory, which, split);
  return load_idx_dataset(paths.images, paths.labels, 10, which + "/" + split);
}

}  // namespace sherd
