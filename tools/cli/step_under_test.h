// SPDX-License-Identifier: Apache-2.0
// What the settings need to run a training step again and again, on images that are noise.
#pragma once

#include <sherd/tools/trainer/train.h>

#include <memory>

namespace sherd::cli {

// All ranks make one together.
struct StepUnderTest {
  StepUnderTest(const TrainSettings& settings, Context& context, Communicator& world);

  std::shared_ptr<ImageDataset> dataset;  // one image, for its shape
  VisionTransformer model;
  ShardingEngine engine;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<TrainingStep> step;
  std::unique_ptr<InputBuffers> inputs;
};

}  // namespace sherd::cli
