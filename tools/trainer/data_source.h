// SPDX-License-Identifier: Apache-2.0
// The images of a run: which data set, how pixels are normalised, and the device buffers that
// batches are copied into.
#pragma once

#include <sherd/runtime/data/batch_loader.h>
#include <sherd/runtime/tensor.h>
#include <sherd/tools/trainer/settings.h>

#include <memory>
#include <string>
#include <vector>

namespace sherd {

struct DataSource {
  std::shared_ptr<const ImageDataset> train, test;  // null where not asked for
  std::vector<double> mean, stddev;                 // one per channel
};

enum class DataParts : std::uint8_t { train_and_test, test };

// Opens the data set of the settings. Synthetic test images are other ones than the training
// images.
SHERD_API DataSource open_data(const TrainSettings& settings,
                               DataParts parts = DataParts::train_and_test);

// The loader options shared by training and evaluation, for one rank; batch_size is that of all.
SHERD_API BatchLoaderOptions loader_options(const TrainSettings& settings, const DataSource& data,
                                            std::int64_t batch_size, bool shuffle, int rank = 0,
                                            int ranks = 1);

// Device memory for one forward pass, allocated once and used for every batch.
class SHERD_API InputBuffers {
 public:
  InputBuffers(Context& context, const ImageDataset& dataset, std::int64_t capacity, DType dtype);

  // Copies samples [begin, begin + count) of the batch (fp32, or fp64 when dtype is) and makes
  // images() and labels() views of exactly these.
  void stage(const Batch& batch, std::int64_t begin, std::int64_t count);
  // The same for `count` samples with no values: on meta, and for timing.
  void stage_shape(std::int64_t count);
  // One black image with label 0, for a rank that takes part without a sample.
  void stage_blank();

  std::int64_t capacity() const { return all_labels_.dim(0); }
  const Tensor& images() const { return images_; }  // [count, C, H, W]
  const Tensor& labels() const { return labels_; }  // i64 [count]

 private:
  Tensor all_images_, all_labels_, images_, labels_;
};

}  // namespace sherd
