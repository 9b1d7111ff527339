// SPDX-License-Identifier: Apache-2.0
// What a step of `bench step` starts from, in files that other programs read: so that their losses
// can be compared with ours.
#pragma once

#include <sherd/tools/trainer/plan.h>

#include <string>

namespace sherd::cli {

// Writes, into a directory that is made where it is missing, `weights.safetensors` with the initial
// weights by timm's names, and `inputs.safetensors`: "images" [batch, C, H, W] and "labels" [batch]
// of the global batch, "learning_rates" [steps] in f64, and what the shapes do not tell of the
// model and the optimizer as metadata. For one rank.
void write_bench_inputs(const std::string& directory, const TrainSettings& settings,
                        Rehearsal& test, std::int64_t steps);

}  // namespace sherd::cli
