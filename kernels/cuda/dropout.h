// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sherd/kernels/arguments/dropout.h>

namespace sherd {

class RandomStream;
class Stream;

namespace cuda {

// out[i] = in[i] / keep_probability where word (first_index + i) of the stream is below
// keep_probability * 2^32, else 0. '='; out may be in. keep_probability in [0, 1].
template <typename T>
void dropout(Stream& stream, std::int64_t n, const T* in, T* out, double keep_probability,
             const RandomStream& random, std::uint64_t first_index);

}  // namespace cuda
}  // namespace sherd
