// SPDX-License-Identifier: Apache-2.0
// IDX files, the format of MNIST and its relatives (http://yann.lecun.com/exdb/mnist): big-endian
// 32-bit words, magic 0x00000803 with count, rows, columns before the images' bytes, or magic
// 0x00000801 with count before the labels' bytes. Plain or gzip.
//
// A dataset is read whole into memory (47 MB for MNIST's training images) and checked whole; the
// errors name the file.
#pragma once

#include <sherd/runtime/api.h>
#include <sherd/runtime/data/dataset.h>

#include <cstdint>
#include <memory>
#include <string>

namespace sherd {

// Images have one channel. `name` defaults to the images' file name.
SHERD_API std::unique_ptr<ImageDataset> load_idx_dataset(const std::string& images_path,
                                                         const std::string& labels_path,
                                                         std::int64_t classes = 10,
                                                         const std::string& name = "");

struct IdxPaths {
  std::string images;
  std::string labels;
};

// Finds the standard file names, {train,t10k}-{images-idx3,labels-idx1}-ubyte with or without .gz,
// of "mnist" or "fashion-mnist", split "train" or "test" (t10k), in `directory`. With an empty
// directory, Fashion-MNIST is looked for where Debian's package dataset-fashion-mnist puts it.
SHERD_API IdxPaths find_mnist_like(const std::string& directory, const std::string& which,
                                   const std::string& split);

// Both in one; the dataset's name is "which/split".
SHERD_API std::unique_ptr<ImageDataset> load_mnist_like(const std::string& directory,
                                                        const std::string& which,
                                                        const std::string& split);

}  // namespace sherd
