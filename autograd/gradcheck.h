// SPDX-License-Identifier: Apache-2.0
// gradcheck: compares a differentiable function's gradients with central differences in fp64.
#pragma once

#include <sherd/autograd/variable.h>

#include <functional>
#include <span>
#include <string>
#include <vector>

namespace sherd {

struct GradcheckOptions {
  double step = 1e-6;  // of the central difference
  double absolute = 1e-5, relative = 1e-3;
  std::uint64_t seed = 1;           // of the random output gradient
  std::int64_t max_elements = 200;  // checked of each input; larger ones are sampled evenly
};

// Checks f at `inputs` (fp64; strided views welcome; they are perturbed in place and restored) with
// a random output gradient. Throws an Error that names the input, the element and both derivatives
// on the first disagreement.
SHERD_API void gradcheck(const std::string& name,
                         const std::function<Variable(std::span<const Variable>)>& f,
                         std::span<const Tensor> inputs, const GradcheckOptions& options = {});

}  // namespace sherd
