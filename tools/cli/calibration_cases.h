// SPDX-License-Identifier: Apache-2.0
// The kernels of a training step at sizes from small to those of ViT-H, for `sherd bench
// calibrate`. Together they are all that a step asks for; a test holds the list against steps.
#pragma once

#include <sherd/runtime/context.h>

#include <functional>
#include <vector>

namespace sherd::cli {

struct CalibrationCase {
  // Makes the operands there; what it returns calls the kernel.
  std::function<std::function<void()>(Context&)> make;
};

// quick: of every kernel a small size or two. scale: so many times the rows, for a GPU.
std::vector<CalibrationCase> calibration_cases(DType dtype, bool quick, std::int64_t scale);

}  // namespace sherd::cli
