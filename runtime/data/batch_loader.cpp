// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/data/batch_loader.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/philox.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <numeric>
#include <system_error>
#include <thread>
#include <utility>

namespace sherd {
namespace {

// Normalised values of every channel and byte: table[256 * channel + byte].
template <typename T>
std::vector<T> normalisation_table(std::int64_t channels, const BatchLoaderOptions& options) {
  std::vector<T> table;
  table.reserve(static_cast<std::size_t>(256 * channels));
  for (std::size_t channel = 0; channel < static_cast<std::size_t>(channels); ++channel) {
    const double mean = options.mean.empty() ? 0.0 : options.mean[channel];
    const double stddev = options.stddev.empty() ? 1.0 : options.stddev[channel];
    for (int byte = 0; byte < 256; ++byte) {
      table.push_back(static_cast<T>((byte / 255.0 - mean) / stddev));
    }
  }
  return table;
}

template <typename T>
void normalise(const std::uint8_t* pixels, std::int64_t channels, std::int64_t plane,
               const std::vector<T>& table, T* out) {
  for (std::int64_t channel = 0; channel < channels; ++channel) {
    const T* values = table.data() + 256 * channel;
    for (std::int64_t i = 0; i < plane; ++i) out[i] = values[pixels[i]];
    pixels += plane;
    out += plane;
  }
}

void check_options(const ImageDataset& dataset, const BatchLoaderOptions& options) {
  SHERD_CHECK(options.batch_size >= 1, "batch loader: batch_size is {}, expected at least 1",
              options.batch_size);
  SHERD_CHECK(dataset.size() >= 1, "batch loader: dataset '{}' has no samples", dataset.name());
  SHERD_CHECK(!options.drop_last || dataset.size() >= options.batch_size,
              "batch loader: dataset '{}' has {} samples, less than one batch of {}, and drop_last "
              "leaves none: use a smaller batch size or keep the last batch",
              dataset.name(), dataset.size(), options.batch_size);
  SHERD_CHECK(options.workers >= 0 && options.workers <= 1024,
              "batch loader: workers is {}, expected 0 to 1024", options.workers);
  SHERD_CHECK(options.prefetch >= 1, "batch loader: prefetch is {}, expected at least 1",
              options.prefetch);
  for (const auto& [values, name] :
       {std::pair(&options.mean, "mean"), std::pair(&options.stddev, "stddev")}) {
    SHERD_CHECK(values->empty() || std::cmp_equal(values->size(), dataset.channels()),
                "batch loader: {} has {} values, but the images of dataset '{}' have {} channels",
                name, values->size(), dataset.name(), dataset.channels());
    const bool finite = std::ranges::all_of(*values, [](double v) { return std::isfinite(v); });
    SHERD_CHECK(finite, "batch loader: {} = [{}] is not finite", name, fmt::join(*values, ", "));
  }
  SHERD_CHECK(std::ranges::all_of(options.stddev, [](double v) { return v > 0; }),
              "batch loader: stddev = [{}] must be above 0", fmt::join(options.stddev, ", "));
  SHERD_CHECK(options.ranks >= 1 && options.rank >= 0 && options.rank < options.ranks,
              "batch loader: rank {} of {} ranks", options.rank, options.ranks);
}

// Where the parts of the ring lie, by slot: images, then labels. Each starts on a cache line of its
// own: neighbours are written by different threads.
struct RingLayout {
  static constexpr std::size_t kLine = 64;

  RingLayout(const BatchLoaderOptions& options, std::int64_t pixels)
      : samples(static_cast<std::size_t>(
            rank_slice(options.batch_size, options.rank, options.ranks).size)),
        values(samples * static_cast<std::size_t>(pixels)),
        labels_at(lines(values * (options.f64 ? sizeof(double) : sizeof(float)))),
        slot(labels_at + lines(samples * sizeof(std::int64_t))),
        slots(static_cast<std::size_t>(options.prefetch)) {}

  static std::size_t lines(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }
  std::size_t bytes() const { return slots * slot; }

  std::size_t samples, values;  // of a slot
  std::size_t labels_at, slot;  // bytes
  std::size_t slots;
};

std::shared_ptr<void> process_memory(std::size_t bytes) {
  constexpr std::align_val_t kAlignment{RingLayout::kLine};
  return {::operator new(bytes, kAlignment),
          [](void* data) { ::operator delete(data, kAlignment); }};
}

}  // namespace

std::size_t ring_bytes(const BatchLoaderOptions& options, std::int64_t pixels) {
  return RingLayout(options, pixels).bytes();
}

SampleRange rank_slice(std::int64_t total, int rank, int ranks) {
  const std::int64_t each = total / ranks, more = total % ranks;
  return {rank * each + std::min<std::int64_t>(rank, more), each + (rank < more ? 1 : 0)};
}

std::vector<std::int64_t> epoch_order(std::uint64_t seed, std::int64_t epoch, std::int64_t size) {
  SHERD_CHECK(size >= 0, "epoch_order: size is {}, expected at least 0", size);
  std::vector<std::int64_t> order(static_cast<std::size_t>(size));
  std::iota(order.begin(), order.end(), 0);
  const RandomStream stream(seed, "order", "samples", static_cast<std::uint64_t>(epoch));
  for (std::size_t i = order.size(); i-- > 1;) {
    std::swap(order[i], order[stream.below(i, i + 1)]);
  }
  return order;
}

// Note [Ring of batches]
// Batches are numbered from the loader's start, those of the epoch first_ .. end_; batch k lives in
// slot k % slots. A worker claims the next number once its slot is free, fills the slot without the
// lock and marks it ready; next() waits for slot delivered_ and hands it out, and the handle's end
// makes it free. A slot belongs to one thread at a time: its worker while it is filled, then the
// caller. A new epoch takes back what was claimed and not delivered, while no worker is inside a
// slot (filling_ == 0); what the caller still has stays his.
class BatchLoader::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(std::shared_ptr<const ImageDataset> dataset, const BatchLoaderOptions& options)
      : dataset_(std::move(dataset)), options_(options) {
    SHERD_CHECK(dataset_ != nullptr, "batch loader: no dataset");
    check_options(*dataset_, options_);
    if (options_.f64) {
      table_f64_ = normalisation_table<double>(dataset_->channels(), options_);
    } else {
      table_ = normalisation_table<float>(dataset_->channels(), options_);
    }
    make_slots();
    // One image for each thread that fills batches: the workers, or else the caller.
    pixels_.resize(static_cast<std::size_t>(std::max(options_.workers, 1)));
    for (auto& image : pixels_) image.resize(static_cast<std::size_t>(dataset_->pixels()));
    start_workers();
  }

  void start_epoch(std::int64_t epoch, std::int64_t position) {
    SHERD_CHECK(epoch >= 0 && position >= 0 && position <= dataset_->size(),
                "batch loader: cannot start epoch {} at sample {} of {}", epoch, position,
                dataset_->size());
    std::vector<std::int64_t> order;
    if (options_.shuffle) order = epoch_order(options_.seed, epoch, dataset_->size());
    std::unique_lock lock(mutex_);
    end_ = claimed_;  // nothing more to claim
    changed_.wait(lock, [&] { return filling_ == 0; });
    for (Slot& slot : slots_) {
      if (slot.state == Slot::State::ready) slot.state = Slot::State::free;
      slot.error = nullptr;
    }
    order_ = std::move(order);
    epoch_ = epoch;
    start_ = position;
    const std::int64_t left = dataset_->size() - position;
    first_ = claimed_ = delivered_;
    end_ = first_ + left / options_.batch_size;
    if (!options_.drop_last && left % options_.batch_size != 0) ++end_;
    started_ = true;
    changed_.notify_all();
  }

  BatchPtr next() {
    std::unique_lock lock(mutex_);
    SHERD_CHECK(started_, "batch loader: call start_epoch() before next()");
    if (delivered_ == end_) return nullptr;
    Slot& slot = slot_of(delivered_);
    SHERD_CHECK(slot.state != Slot::State::in_use,
                "batch loader: the next batch has no place, the ring of {} is in use; let go of "
                "earlier batches, or use a larger prefetch",
                slots_.size());
    if (options_.workers == 0) {
      fill(slot, delivered_, pixels_[0].data());
    } else {
      changed_.wait(lock, [&] { return slot.state == Slot::State::ready; });
      if (slot.error) std::rethrow_exception(slot.error);
    }
    ++delivered_;
    slot.state = Slot::State::in_use;
    lock.unlock();  // release() may be called at once, where there is no memory for the handle
    return {&slot.batch, [self = shared_from_this(), &slot](const Batch*) { self->release(slot); }};
  }

  std::int64_t batches_per_epoch() const {
    const std::int64_t full = dataset_->size() / options_.batch_size;
    const bool partial = dataset_->size() % options_.batch_size != 0 && !options_.drop_last;
    return full + (partial ? 1 : 0);
  }

  void stop_workers() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  struct Slot {
    enum class State : std::uint8_t { free, filling, ready, in_use };

    void* images = nullptr;  // floats or doubles
    std::int64_t* labels = nullptr;
    std::vector<std::int64_t> samples;
    Batch batch;
    State state = State::free;
    std::exception_ptr error;
  };

  void make_slots() {
    BatchLoaderOptions largest = options_;
    largest.batch_size = std::min(options_.batch_size, dataset_->size());
    const RingLayout layout(largest, dataset_->pixels());
    memory_ = options_.memory ? options_.memory(layout.bytes()) : process_memory(layout.bytes());
    slots_.resize(layout.slots);
    auto* at = static_cast<std::byte*>(memory_.get());
    for (Slot& slot : slots_) {
      slot.images = at;
      slot.labels = reinterpret_cast<std::int64_t*>(at + layout.labels_at);
      slot.samples.resize(layout.samples);
      at += layout.slot;
    }
  }

  void release(Slot& slot) {
    {
      const std::lock_guard lock(mutex_);
      slot.state = Slot::State::free;
    }
    changed_.notify_all();
  }

  Slot& slot_of(std::int64_t number) {
    return slots_[static_cast<std::size_t>(number) % slots_.size()];
  }

  // pixels: room for one image.
  void fill(Slot& slot, std::int64_t number, std::uint8_t* pixels) const {
    Batch& batch = slot.batch;
    batch.epoch = epoch_;
    batch.position = start_ + (number - first_) * options_.batch_size;
    batch.index = batch.position / options_.batch_size;
    batch.global_size = std::min(options_.batch_size, dataset_->size() - batch.position);
    const SampleRange slice = rank_slice(batch.global_size, options_.rank, options_.ranks);
    batch.begin = slice.begin;
    batch.size = slice.size;
    const std::int64_t channels = dataset_->channels();
    const std::int64_t plane = dataset_->height() * dataset_->width();
    for (std::int64_t i = 0; i < batch.size; ++i) {
      if (stop_.load(std::memory_order_relaxed)) return;  // nobody will look at this batch
      const std::int64_t at = batch.position + batch.begin + i;
      const std::int64_t sample = options_.shuffle ? order_[static_cast<std::size_t>(at)] : at;
      const std::int64_t label = dataset_->label(sample);
      SHERD_CHECK(label >= 0 && label < dataset_->classes(),
                  "dataset '{}': label {} of sample {} is out of range: expected 0 to {}",
                  dataset_->name(), label, sample, dataset_->classes() - 1);
      slot.samples[static_cast<std::size_t>(i)] = sample;
      slot.labels[i] = label;
      dataset_->get(sample, pixels);
      const std::int64_t offset = i * dataset_->pixels();
      if (options_.f64) {
        normalise(pixels, channels, plane, table_f64_, static_cast<double*>(slot.images) + offset);
      } else {
        normalise(pixels, channels, plane, table_, static_cast<float*>(slot.images) + offset);
      }
    }
    const auto size = static_cast<std::size_t>(batch.size);
    const std::size_t values = size * static_cast<std::size_t>(dataset_->pixels());
    if (options_.f64) {
      batch.images_f64 = {static_cast<const double*>(slot.images), values};
    } else {
      batch.images = {static_cast<const float*>(slot.images), values};
    }
    batch.labels = {slot.labels, size};
    batch.samples = std::span(slot.samples).first(size);
  }

  void work(std::uint8_t* pixels) {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] {
        return stop_ || (claimed_ < end_ && slot_of(claimed_).state == Slot::State::free);
      });
      if (stop_) return;
      const std::int64_t number = claimed_++;
      ++filling_;
      Slot& slot = slot_of(number);
      slot.state = Slot::State::filling;
      lock.unlock();
      std::exception_ptr error;
      try {
        fill(slot, number, pixels);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      slot.error = std::move(error);
      slot.state = Slot::State::ready;
      --filling_;
      changed_.notify_all();
    }
  }

  void start_workers() {
    try {
      for (int i = 0; i < options_.workers; ++i) {
        threads_.emplace_back(
            [this, pixels = pixels_[static_cast<std::size_t>(i)].data()] { work(pixels); });
      }
    } catch (const std::system_error& error) {
      const std::size_t started = threads_.size();
      stop_workers();
      fail("batch loader: cannot start worker {} of {}: {}; use fewer workers", started + 1,
           options_.workers, error.what());
    }
  }

  std::shared_ptr<const ImageDataset> dataset_;
  BatchLoaderOptions options_;
  std::vector<float> table_;
  std::vector<double> table_f64_;
  std::vector<std::vector<std::uint8_t>> pixels_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<void> memory_;
  std::vector<Slot> slots_;
  std::vector<std::int64_t> order_;
  std::int64_t epoch_ = 0;
  std::int64_t start_ = 0;  // position of batch 0
  std::int64_t first_ = 0;
  std::int64_t end_ = 0;
  std::int64_t delivered_ = 0;
  std::int64_t claimed_ = 0;
  int filling_ = 0;
  bool started_ = false;
  std::atomic<bool> stop_ = false;  // read within a batch too
  std::vector<std::thread> threads_;
};

BatchLoader::BatchLoader(std::shared_ptr<const ImageDataset> dataset,
                         const BatchLoaderOptions& options)
    : impl_(std::make_shared<Impl>(std::move(dataset), options)) {}

BatchLoader::~BatchLoader() {
  impl_->stop_workers();
}

void BatchLoader::start_epoch(std::int64_t epoch, std::int64_t position) {
  impl_->start_epoch(epoch, position);
}

BatchPtr BatchLoader::next() {
  return impl_->next();
}

std::int64_t BatchLoader::batches_per_epoch() const {
  return impl_->batches_per_epoch();
}

}  // namespace sherd
