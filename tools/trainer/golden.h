// SPDX-License-Identifier: Apache-2.0
// Golden runs: a folder with golden.json (model, data, loss, optimizer, schedule, and the loss and
// gradient norm of every step as another program computed them), initial.safetensors, and
// optionally final_float64.safetensors. Repeating one checks the whole training step at once.
#pragma once

#include <sherd/models/module.h>
#include <sherd/runtime/data/batch_loader.h>
#include <sherd/runtime/dtype.h>
#include <sherd/tools/trainer/settings.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace sherd {

struct GoldenOptions {
  std::string directory;
  std::string data_dir;  // of the data set's IDX files; empty: where Debian's package puts them
  DType dtype = DType::f64;
  double tolerance = 0.0;  // relative, of losses and gradient norms; 0: 1e-9 in fp64, 1e-4 in fp32
  // Largest absolute difference of a final weight. Negative: 1e-8 in fp64, not checked in fp32
  // (where AdamW turns the rounding noise of gradients that are zero in theory into updates).
  double weight_tolerance = -1.0;
  TrainSettings ranks;  // its [sharding] and threads are used
};

struct GoldenStep {
  std::int64_t step = 0;
  double lr = 0.0, given_lr = 0.0;
  double loss = 0.0, given_loss = 0.0;
  double grad_norm = 0.0, given_grad_norm = 0.0;
  double error = 0.0;  // the largest relative error of the three
};

struct GoldenResult {
  std::int64_t steps = 0;
  double tolerance = 0.0, worst_error = 0.0;  // over all steps
  bool weights_compared = false;              // was there a final_float64.safetensors?
  double worst_weight_error = 0.0;
  std::string worst_weight;
  double weight_tolerance = 0.0;  // negative: not checked
  bool passed = false;
};

// Runs all steps on the ranks of the settings or of the launcher, calling on_step after each, on
// rank 0 alone; under a launcher only the first process gets a result. Throws on a folder that
// cannot be used; a field of golden.json that it does not know is an error too, since it might
// change the result.
SHERD_API GoldenResult run_golden(const GoldenOptions& options,
                                  const std::function<void(const GoldenStep&)>& on_step);

struct LogitsResult {
  std::int64_t images = 0;
  double worst_error = 0.0;  // largest absolute difference
};

// Compares the model's logits of the first images of a data set with those in a JSON file: an
// object whose "logits" is a list of one list of numbers per image.
SHERD_API LogitsResult compare_logits(Context& context, Module& model,
                                      const std::shared_ptr<const ImageDataset>& dataset,
                                      BatchLoaderOptions options, const std::string& path);

}  // namespace sherd
