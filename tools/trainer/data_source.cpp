// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/data_source.h>

#include <sherd/kernels/elementwise.h>
#include <sherd/runtime/data/idx.h>
#include <sherd/runtime/data/synthetic.h>
#include <sherd/runtime/suggest.h>

#include <algorithm>
#include <array>
#include <cstdio>

namespace sherd {
namespace {

std::array<std::int64_t, 3> parse_image_size(const std::string& text) {
  std::array<long long, 3> size{};
  char rest = 0;
  const int read =
      std::sscanf(text.c_str(), "%lldx%lldx%lld%c", &size[0], &size[1], &size[2], &rest);
  SHERD_CHECK(read == 3 && size[0] > 0 && size[1] > 0 && size[2] > 0,
              "--image-size: expected channels x height x width, such as 3x224x224, got '{}'",
              text);
  return {size[0], size[1], size[2]};
}

DataSource open_synthetic(const TrainSettings& settings) {
  const auto [channels, height, width] = parse_image_size(settings.image_size);
  check_range("--images", settings.images, 1, std::int64_t{1} << 40);
  check_range("--classes", settings.classes, 1, 1 << 24);
  SyntheticOptions options;
  options.size = settings.images;
  options.channels = channels;
  options.height = height;
  options.width = width;
  options.classes = settings.classes;
  options.seed = static_cast<std::uint64_t>(settings.seed);
  DataSource source;
  source.train = make_synthetic_dataset(options);
  // The test images continue the sequence: same classes, other noise.
  options.size = settings.images + std::max<std::int64_t>(1, settings.images / 8);
  struct Tail final : ImageDataset {
    Tail(std::unique_ptr<ImageDataset> all, std::int64_t begin)
        : ImageDataset({all->name() + "/test", all->size() - begin, all->channels(), all->height(),
                        all->width(), all->classes()}),
          all_(std::move(all)),
          begin_(begin) {}
    void get(std::int64_t index, std::uint8_t* out) const override {
      check_index(index);
      all_->get(begin_ + index, out);
    }
    std::int64_t label(std::int64_t index) const override {
      check_index(index);
      return all_->label(begin_ + index);
    }
    std::unique_ptr<ImageDataset> all_;
    std::int64_t begin_;
  };
  source.test = std::make_shared<Tail>(make_synthetic_dataset(options), settings.images);
  source.mean = {0.5};
  source.stddev = {0.5};
  return source;
}

// One value serves all channels.
std::vector<double> per_channel(const char* what, std::vector<double> values,
                                std::int64_t channels) {
  if (values.size() == 1) values.resize(static_cast<std::size_t>(channels), values.front());
  SHERD_CHECK(static_cast<std::int64_t>(values.size()) == channels,
              "--{}: expected one value, or one for each of the {} channels, got {} values", what,
              channels, values.size());
  return values;
}

}  // namespace

DataSource open_data(const TrainSettings& settings, DataParts parts) {
  DataSource source;
  if (settings.dataset == "synthetic") {
    source = open_synthetic(settings);
  } else if (settings.dataset == "fashion-mnist" || settings.dataset == "mnist") {
    if (parts == DataParts::train_and_test) {
      source.train = load_mnist_like(settings.data_dir, settings.dataset, "train");
    }
    source.test = load_mnist_like(settings.data_dir, settings.dataset, "test");
    const bool fashion = settings.dataset == "fashion-mnist";
    source.mean = {fashion ? 0.286 : 0.1307};
    source.stddev = {fashion ? 0.353 : 0.3081};
  } else {
    fail("unknown data set '{}'{}", settings.dataset,
         did_you_mean(settings.dataset, {"fashion-mnist", "mnist", "synthetic"}));
  }
  if (source.train != nullptr) {
    const ImageDataset &a = *source.train, &b = *source.test;
    SHERD_CHECK(a.channels() == b.channels() && a.height() == b.height() && a.width() == b.width(),
                "the training images ({}) are {} x {} x {}, the test images ({}) {} x {} x {}",
                a.name(), a.channels(), a.height(), a.width(), b.name(), b.channels(), b.height(),
                b.width());
  }
  const std::int64_t channels = source.test->channels();
  source.mean = per_channel("mean", settings.mean.empty() ? source.mean : settings.mean, channels);
  source.stddev =
      per_channel("stddev", settings.stddev.empty() ? source.stddev : settings.stddev, channels);
  return source;
}

BatchLoaderOptions loader_options(const TrainSettings& settings, const DataSource& data,
                                  std::int64_t batch_size, bool shuffle, int rank, int ranks) {
  check_range("--workers", settings.workers, 0, 64);
  BatchLoaderOptions options;
  options.batch_size = batch_size;
  options.shuffle = shuffle;
  options.seed = static_cast<std::uint64_t>(settings.seed);
  options.workers = static_cast<int>(settings.workers);
  options.prefetch = options.workers + 2;
  options.mean = data.mean;
  options.stddev = data.stddev;
  options.f64 = dtype_from_name(settings.precision) == DType::f64;
  options.rank = rank;
  options.ranks = ranks;
  return options;
}

InputBuffers::InputBuffers(Context& context, const ImageDataset& dataset, std::int64_t capacity,
                           DType dtype)
    : all_images_(Tensor::empty(context,
                                {capacity, dataset.channels(), dataset.height(), dataset.width()},
                                dtype, MemoryCategory::inputs)),
      all_labels_(Tensor::empty(context, {capacity}, DType::i64, MemoryCategory::inputs)) {}

void InputBuffers::stage_shape(std::int64_t count) {
  SHERD_CHECK(count > 0 && count <= capacity(), "a batch of {} does not fit the input buffer of {}",
              count, capacity());
  images_ = all_images_.slice(0, 0, count);
  labels_ = all_labels_.slice(0, 0, count);
}

void InputBuffers::stage_blank() {
  stage_shape(1);
  fill(images_, 0.0);
  const std::int64_t label = 0;
  if (!labels_.context().is_meta()) labels_.copy_from_host(&label, sizeof label);
}

void InputBuffers::stage(const Batch& batch, std::int64_t begin, std::int64_t count) {
  stage_shape(count);
  const auto pixels = static_cast<std::size_t>(images_.numel() / count);
  const auto copy = [&](const auto& values, std::size_t per_sample, const Tensor& to) {
    const auto part = values.subspan(static_cast<std::size_t>(begin) * per_sample,
                                     static_cast<std::size_t>(count) * per_sample);
    to.copy_from_host(part.data(), part.size_bytes());
  };
  if (images_.dtype() == DType::f64) {
    copy(batch.images_f64, pixels, images_);
  } else {
    copy(batch.images, pixels, images_);
  }
  copy(batch.labels, 1, labels_);
}

}  // namespace sherd
