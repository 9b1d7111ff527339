// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sherd/kernels/arguments/optimizers.h>
#include <sherd/kernels/cpu/simd.h>

namespace sherd::cpu {

using arguments::AdamWArgs;
using arguments::AdamWScalars;
using arguments::SgdArgs;

template <typename T>
void adamw(int threads, std::int64_t n, const AdamWArgs<T>& args);

template <typename T>
void sgd(int threads, std::int64_t n, const SgdArgs<T>& args);

}  // namespace sherd::cpu
