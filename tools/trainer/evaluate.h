// SPDX-License-Identifier: Apache-2.0
// Evaluation: top-1 accuracy and mean loss over a data set, in file order.
#pragma once

#include <sherd/comm/communicator.h>
#include <sherd/models/module.h>
#include <sherd/tools/trainer/data_source.h>

#include <functional>

namespace sherd {

struct EvaluationResult {
  std::int64_t samples = 0, correct = 0;
  double loss = 0.0;  // mean cross-entropy without smoothing, from an exact sum
  double accuracy() const {
    return samples > 0 ? static_cast<double>(correct) / static_cast<double>(samples) : 0.0;
  }
};

// `progress(done)` is called after each batch; returning false, on any rank, stops early. With
// several ranks each takes the part of every batch that `options` name, which must fit `inputs`,
// all call this together, and all get the result of all samples.
SHERD_API EvaluationResult evaluate(Context& context, Module& model, InputBuffers& inputs,
                                    const std::shared_ptr<const ImageDataset>& dataset,
                                    BatchLoaderOptions options,
                                    const std::function<bool(std::int64_t)>& progress = {},
                                    Communicator* world = nullptr);

}  // namespace sherd
