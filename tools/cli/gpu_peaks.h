// SPDX-License-Identifier: Apache-2.0
// What a GPU's maker says it can do.
#pragma once

#include <string_view>

namespace sherd::cli {

// Dense bf16 (and fp16) FLOP/s with fp32 accumulation of the GPU whose name CUDA gives, from
// NVIDIA's data sheets, where figures with sparsity are twice these. 0 for a GPU not in the table.
double peak_bf16_flops(std::string_view gpu_name);

}  // namespace sherd::cli
