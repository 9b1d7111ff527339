// SPDX-License-Identifier: Apache-2.0
// Layer normalisation over the last dimension (Ba, Kiros, Hinton, 2016), statistics in fp32 (fp64
// for fp64): y = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(var + eps), var without
// correction.
#pragma once

#include <sherd/runtime/tensor.h>

namespace sherd {

struct LayerNormOutput {
  Tensor output;
  Tensor mean, rstd;  // one per row
  Tensor sum;         // with a residual: input + residual, rounded, which is what is normalised
};

// input [..., D], weight [D], bias [D]; residual like input, or undefined
SHERD_API LayerNormOutput layer_norm_forward(const Tensor& input, const Tensor& weight,
                                             const Tensor& bias, double eps,
                                             const Tensor& residual = {});

struct LayerNormGradients {
  Tensor input;         // undefined where not wanted
  Tensor weight, bias;  // of fp32 (fp64 for fp64); undefined where not wanted
};

// `accumulated`: when defined, the gradient of the input is added to it (+=) and it is what
// LayerNormGradients::input returns; else a new tensor is written (=).
SHERD_API LayerNormGradients layer_norm_backward(const Tensor& grad_output, const Tensor& input,
                                                 const Tensor& mean, const Tensor& rstd,
                                                 const Tensor& weight, bool want_input,
                                                 bool want_weight, const Tensor& accumulated = {});

}  // namespace sherd
