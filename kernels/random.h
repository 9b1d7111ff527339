// SPDX-License-Identifier: Apache-2.0
// Random kernels. Every element is a pure function of the stream and of its index, see
// runtime/philox.h.
#pragma once

#include <sherd/runtime/philox.h>
#include <sherd/runtime/tensor.h>

namespace sherd {

// In place (=). Element i of `out` takes the number at index first_index + i.
SHERD_API void fill_uniform(const Tensor& out, double low, double high, const RandomStream& stream,
                            std::int64_t first_index = 0);
SHERD_API void fill_normal(const Tensor& out, double mean, double std, const RandomStream& stream,
                           std::int64_t first_index = 0);
// Normal cut at the absolute bounds [low, high], by the inverse distribution function as timm does.
SHERD_API void fill_truncated_normal(const Tensor& out, double mean, double std, double low,
                                     double high, const RandomStream& stream,
                                     std::int64_t first_index = 0);

// Zeroes an element with probability `drop`, scales the others by 1 / (1 - drop). Applying it to a
// gradient with the same arguments is its backward.
SHERD_API Tensor dropout(const Tensor& input, double drop, const RandomStream& stream,
                         std::int64_t first_index);

// The scale of each sample under stochastic depth (Huang et al., 2016): 0 with probability `drop`,
// else 1 / (1 - drop). [rows] of fp32 (fp64 for dtype fp64).
SHERD_API Tensor drop_path_scale(Context& context, std::int64_t rows, DType dtype, double drop,
                                 const RandomStream& stream, std::int64_t first_sample);

}  // namespace sherd
