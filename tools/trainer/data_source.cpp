// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/data_source.h>

#include <sherd/kernels/elementwise.h>
#include <sherd/runtime/cuda/device.h>
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
  options.prefetch = options.workers > 0 ? options.workers + 2 : 1;
  options.mean = data.mean;
  options.stddev = data.stddev;
  options.f64 = dtype_from_name(settings.precision) == DType::f64;
  options.rank = rank;
  options.ranks = ranks;
  return options;
}

void place_batches(BatchLoaderOptions& options, Context& context) {
  if (context.target() != Device::cuda) return;
  options.prefetch = std::max(options.prefetch, 2);
  options.memory = [&context](std::size_t bytes) {
    const auto storage =
        Storage::allocate(context, bytes, MemoryCategory::inputs, MemoryPool::host);
    return std::shared_ptr<void>(storage, context.is_meta() ? nullptr : storage->data());
  };
}

InputBuffers::InputBuffers(Context& context, const ImageDataset& dataset, std::int64_t capacity,
                           DType dtype) {
  const auto images = [&] {
    return Tensor::empty(context, {capacity, dataset.channels(), dataset.height(), dataset.width()},
                         dtype, MemoryCategory::inputs);
  };
  const auto labels = [&] {
    return Tensor::empty(context, {capacity}, DType::i64, MemoryCategory::inputs);
  };
  all_images_ = images();
  all_labels_ = labels();
  if (context.target() != Device::cuda) return;
  next_images_ = images();
  next_labels_ = labels();
  stream_ = context.make_stream("inputs");
  taken_ = context.compute_stream().record();  // in whose order memory is handed out
}

void InputBuffers::check_fits(std::int64_t count) const {
  SHERD_CHECK(count > 0 && count <= capacity(), "a batch of {} does not fit the input buffer of {}",
              count, capacity());
}

void InputBuffers::stage_shape(std::int64_t count) {
  check_fits(count);
  images_ = all_images_.slice(0, 0, count);
  labels_ = all_labels_.slice(0, 0, count);
}

void InputBuffers::stage_blank() {
  stage_shape(1);
  fill(images_, 0.0);
  const std::int64_t label = 0;
  if (!labels_.context().is_meta()) labels_.copy_from_host(&label, sizeof label);
}

namespace {

// The samples' images and labels as bytes, each with the tensor that they are for.
void for_each_part(const Batch& batch, std::int64_t begin, const Tensor& images,
                   const Tensor& labels,
                   const std::function<void(const Tensor&, std::span<const std::byte>)>& copy) {
  const auto part = [&](const auto& values, const Tensor& to) {
    const auto size = static_cast<std::size_t>(to.numel());
    const auto first = static_cast<std::size_t>(begin * (to.numel() / to.dim(0)));
    copy(to, std::as_bytes(values.subspan(first, size)));
  };
  if (images.dtype() == DType::f64) {
    part(batch.images_f64, images);
  } else {
    part(batch.images, images);
  }
  part(batch.labels, labels);
}

}  // namespace

void InputBuffers::stage(const BatchPtr& batch, std::int64_t begin, std::int64_t count) {
  stage_shape(count);
  if (!copies_ahead()) {
    for_each_part(*batch, begin, images_, labels_,
                  [](const Tensor& to, std::span<const std::byte> values) {
                    to.copy_from_host(values.data(), values.size());
                  });
    return;
  }
  if (ahead_ != Samples{batch, begin, count}) prefetch(batch, begin, count);
  ahead_ = {};
  Stream& compute = images_.context().compute_stream();
  compute.wait(arrived_);
  copy(images_, next_images_.slice(0, 0, count));
  copy(labels_, next_labels_.slice(0, 0, count));
  taken_ = compute.record();
}

void InputBuffers::prefetch(const BatchPtr& batch, std::int64_t begin, std::int64_t count) {
  if (!copies_ahead()) return;
  check_fits(count);
  stream_->wait(taken_);
  for_each_part(*batch, begin, next_images_.slice(0, 0, count), next_labels_.slice(0, 0, count),
                [&](const Tensor& to, std::span<const std::byte> values) {
                  // Meta's stream does not run it.
                  stream_->enqueue([&] {
                    cuda::copy(*stream_, to.raw_address(), values.data(), values.size());
                  });
                });
  arrived_ = stream_->record();
  ahead_ = {batch, begin, count};
}

}  // namespace sherd
