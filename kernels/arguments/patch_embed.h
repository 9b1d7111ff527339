// SPDX-License-Identifier: Apache-2.0
// Patch embedding: a linear layer over the patches of images (patchify.h), which are read where
// they lie in the images.
//
//   P = the matrix of patches, rows = batch * count, columns = elements of a patch
#pragma once

#include <sherd/kernels/arguments/patchify.h>
#include <sherd/kernels/arguments/types.h>

namespace sherd::arguments {

// out [rows, dim] = P weight [dim, columns]ᵀ + bias [dim]; all gapless.
template <typename T>
struct PatchEmbedForward {
  PatchShape shape;
  std::int64_t dim = 0;
  const T* images = nullptr;
  const T* weight = nullptr;
  const T* bias = nullptr;  // may be null
  T* out = nullptr;
};

// grad_weight [dim, columns] '=' grad_output [rows, dim]ᵀ P
template <typename T>
struct PatchEmbedBackwardWeight {
  PatchShape shape;
  std::int64_t dim = 0;
  const T* grad_output = nullptr;
  const T* images = nullptr;
  acc_t<T>* grad_weight = nullptr;
  acc_t<T>* workspace = nullptr;
};

}  // namespace sherd::arguments
