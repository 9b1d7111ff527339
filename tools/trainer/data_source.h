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

// For batches that this context will copy: where it is of a GPU, or stands for one, in the host's
// pinned memory (MemoryCategory::inputs), and with room for a batch that is copied ahead.
SHERD_API void place_batches(BatchLoaderOptions& options, Context& context);

// Device memory for one forward pass, allocated once and used for every batch.
//
// Note [Copies of batches to a GPU]
// Samples come to a second buffer, on a stream of their own, while the device computes on the first
// one. When that is done they move from one to the other, in the order of the compute stream, which
// takes little of the time that they need to come; computation, and graphs of it, always find them
// at one place.
//   coming    waits until those before have moved (taken_)
//   moving    waits until these have come (arrived_)
// The host waits for neither, so the memory of a batch must not change before. prefetch() keeps the
// batch until it is staged, or others are in its stead and what came of it does not matter. stage()
// does not: its caller keeps it until he has read a result of what was computed after.
class SHERD_API InputBuffers {
 public:
  InputBuffers(Context& context, const ImageDataset& dataset, std::int64_t capacity, DType dtype);

  // Copies samples [begin, begin + count) of the batch (fp32, or fp64 when dtype is) and makes
  // images() and labels() views of exactly these.
  void stage(const BatchPtr& batch, std::int64_t begin, std::int64_t count);
  // Of what the next call of stage() will ask for; then that has little to do, otherwise it copies
  // as if there had been none. Only where copies_ahead(), which is on a GPU; else does nothing.
  void prefetch(const BatchPtr& batch, std::int64_t begin, std::int64_t count);
  bool copies_ahead() const { return stream_ != nullptr; }
  // The same for `count` samples with no values: on meta, and for timing.
  void stage_shape(std::int64_t count);
  // One black image with label 0, for a rank that takes part without a sample.
  void stage_blank();

  std::int64_t capacity() const { return all_labels_.dim(0); }
  const Tensor& images() const { return images_; }  // [count, C, H, W]
  const Tensor& labels() const { return labels_; }  // i64 [count]

 private:
  struct Samples {
    BatchPtr batch;
    std::int64_t begin = 0, count = 0;
    bool operator==(const Samples&) const = default;
  };

  void check_fits(std::int64_t count) const;

  Tensor all_images_, all_labels_, images_, labels_;
  Tensor next_images_, next_labels_;  // where copies_ahead()
  Samples ahead_;                     // what these hold, if not yet moved
  Event arrived_, taken_;
  std::unique_ptr<Stream> stream_;  // the last: it ends before its memory does
};

}  // namespace sherd
