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

// quick: of every kernel a small size or two.
std::vector<CalibrationCase> calibration_cases(DType dtype, bool quick);

}  // namespace sherd::cli
