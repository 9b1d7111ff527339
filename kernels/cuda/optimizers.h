// SPDX-License-Identifier: Apache-2.0
// The functions of kernels/cpu/optimizers.h on a GPU, with the same bits.
#pragma once

#include <sherd/kernels/arguments/optimizers.h>

namespace sherd {

class Stream;

namespace cuda {

using arguments::AdamWArgs;
using arguments::AdamWScalars;
using arguments::SgdArgs;

template <typename T>
void adamw(Stream& stream, std::int64_t n, const AdamWArgs<T>& args);

template <typename T>
void sgd(Stream& stream, std::int64_t n, const SgdArgs<T>& args);

}  // namespace cuda
}  // namespace sherd
