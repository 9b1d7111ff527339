// SPDX-License-Identifier: Apache-2.0
// ImageDataset: images of one shape with one class label each, addressed by index.
//
// Pixels are bytes in CHW order: channel by channel, each row-major. An implementation must allow
// get() and label() from several threads at once, and must give the same answer for an index every
// time: BatchLoader relies on both.
#pragma once

#include <sherd/runtime/api.h>
#include <sherd/runtime/error.h>

#include <cstdint>
#include <string>
#include <utility>

namespace sherd {

struct ImageDatasetInfo {
  std::string name;       // for messages and logs: "fashion-mnist/train"
  std::int64_t size = 0;  // images
  std::int64_t channels = 0;
  std::int64_t height = 0;
  std::int64_t width = 0;
  std::int64_t classes = 0;  // labels are 0 .. classes - 1
};

class SHERD_API ImageDataset {
 public:
  explicit ImageDataset(ImageDatasetInfo info) : info_(std::move(info)) {}
  virtual ~ImageDataset() = default;
  ImageDataset(const ImageDataset&) = delete;
  ImageDataset& operator=(const ImageDataset&) = delete;

  const std::string& name() const { return info_.name; }
  std::int64_t size() const { return info_.size; }
  std::int64_t channels() const { return info_.channels; }
  std::int64_t height() const { return info_.height; }
  std::int64_t width() const { return info_.width; }
  std::int64_t classes() const { return info_.classes; }
  std::int64_t pixels() const { return info_.channels * info_.height * info_.width; }  // an image

  // Writes pixels() bytes.
  virtual void get(std::int64_t index, std::uint8_t* out) const = 0;
  virtual std::int64_t label(std::int64_t index) const = 0;

 protected:
  void check_index(std::int64_t index) const {
    SHERD_CHECK(index >= 0 && index < size(), "dataset '{}': sample {} of {}", name(), index,
                size());
  }

 private:
  ImageDatasetInfo info_;
};

}  // namespace sherd
