// SPDX-License-Identifier: Apache-2.0
// OffloadedTensor: a copy of a tensor that waits in the host's memory (MemoryPool::host) until the
// tensor is needed again. Copies run on a stream of the context's own beside the computation; both
// ledgers count in the order of the calls, on meta too.
//
//   OffloadedTensor away(x);       // the copy out starts
//   x = {};                        // with the last handle the device's bytes are given back
//   away.fetch();                  // the copy back starts, if it has not
//   const Tensor& x = away.get();  // waits for it
#pragma once

#include <sherd/runtime/tensor.h>

#include <cstdint>
#include <memory>

namespace sherd {

class SHERD_API OffloadedTensor {
 public:
  // Only an activation of the device's memory moves: anything else (images, parameters, bytes of
  // somebody else) is there anyway.
  static bool can_move(const Tensor& tensor);

  // Copies all bytes of the storage, so that what comes back is the same view. Holds no handle.
  explicit OffloadedTensor(const Tensor& tensor);

  // Where somebody still holds the original, that is what comes back. From here on the host's bytes
  // are free again.
  void fetch();
  const Tensor& get();

  // Of the original, even if it is gone: differs from what it was when the original was written.
  std::uint64_t version() const { return *version_; }

 private:
  std::weak_ptr<Storage> original_;
  std::shared_ptr<const std::uint64_t> version_;
  Tensor host_;    // until fetch()
  Tensor tensor_;  // from then on
  Event arrival_;
};

}  // namespace sherd
