// SPDX-License-Identifier: Apache-2.0
// BatchLoader: turns a dataset into normalised batches, prepared ahead by worker threads.
//
// An epoch is the dataset in the order epoch_order(seed, epoch, size) (or in its own order), cut
// into global batches of batch_size samples. Batches come in that order and bit for bit the same
// whatever the number of workers. A rank takes a contiguous slice of every global batch, so the
// order does not depend on the number of ranks either.
//
// A pixel x of channel c becomes (x/255 - mean[c]) / stddev[c], computed in double and, for fp32,
// rounded once. Being a byte, it has 256 possible results: they are tabulated.
#pragma once

#include <sherd/runtime/api.h>
#include <sherd/runtime/data/dataset.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace sherd {

// A permutation of 0 .. size - 1 (Fisher-Yates), a function of its arguments alone.
SHERD_API std::vector<std::int64_t> epoch_order(std::uint64_t seed, std::int64_t epoch,
                                                std::int64_t size);

struct BatchLoaderOptions {
  std::int64_t batch_size = 1;  // samples of a global batch, over all ranks
  bool shuffle = true;
  std::uint64_t seed = 0;
  bool drop_last = false;           // leave out a last batch that is not full
  int workers = 0;                  // threads; 0 prepares each batch inside next()
  int prefetch = 2;                 // batches in the ring, those in use included
  std::vector<double> mean = {};    // one a channel, of pixels in [0, 1]; empty: 0
  std::vector<double> stddev = {};  // empty: 1
  bool f64 = false;                 // images as doubles instead of floats
  // This loader delivers rank_slice() of every global batch.
  int rank = 0, ranks = 1;
  // Where images and labels lie: that many bytes, for as long as the handle lives. Called once, by
  // the constructor. Empty: the process's memory.
  std::function<std::shared_ptr<void>(std::size_t bytes)> memory = {};
};

// What a loader of these options asks `memory` for, where the dataset fills a batch.
SHERD_API std::size_t ring_bytes(const BatchLoaderOptions& options, std::int64_t pixels);

// A contiguous part of a global batch.
struct SampleRange {
  std::int64_t begin = 0, size = 0;
};
// What a rank takes of `total` samples: in the order of ranks, the sizes differ by at most one, the
// larger ones first; with fewer samples than ranks the last ones get none.
SHERD_API SampleRange rank_slice(std::int64_t total, int rank, int ranks);

// This loader's slice of one global batch.
struct Batch {
  std::span<const float> images;          // [size, C, H, W], or empty with f64
  std::span<const double> images_f64;     // [size, C, H, W], or empty without f64
  std::span<const std::int64_t> labels;   // [size]
  std::span<const std::int64_t> samples;  // [size], indices into the dataset
  std::int64_t size = 0;                  // samples here; 0 where the batch has fewer than ranks
  std::int64_t begin = 0;                 // place of the first of them in the global batch
  std::int64_t global_size = 0;           // samples of the global batch
  std::int64_t epoch = 0;
  std::int64_t index = 0;     // of the global batch within its epoch
  std::int64_t position = 0;  // of the global batch's first sample within the epoch
};

// The batch keeps its place in the ring until the last copy of its handle is gone, also after the
// loader is.
using BatchPtr = std::shared_ptr<const Batch>;

// One thread calls it. The dataset is read by the workers concurrently.
class SHERD_API BatchLoader {
 public:
  // Throws if an option does not fit the dataset. Starts the workers; call start_epoch() next.
  BatchLoader(std::shared_ptr<const ImageDataset> dataset, const BatchLoaderOptions& options);
  ~BatchLoader();  // stops the workers; waits at most for the sample each is reading
  BatchLoader(const BatchLoader&) = delete;
  BatchLoader& operator=(const BatchLoader&) = delete;

  // Begins an epoch, leaving the current one wherever it is. To resume, give the position that the
  // first batch shall have: the samples before it are skipped.
  void start_epoch(std::int64_t epoch, std::int64_t position = 0);

  // The next batch, or nullptr at the end of the epoch. An exception thrown by the dataset is
  // rethrown here, at its batch's turn, and again on further calls until start_epoch(). Throws
  // where all of the ring is in use.
  BatchPtr next();

  std::int64_t batches_per_epoch() const;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;  // shared with the batches
};

}  // namespace sherd
