// SPDX-License-Identifier: Apache-2.0
// What settings make: an optimizer, weights in their shards, a file of them at the end.
#pragma once

#include <sherd/comm/sharding/engine.h>
#include <sherd/models/vit.h>
#include <sherd/optim/optimizer.h>
#include <sherd/tools/trainer/settings.h>
#include <sherd/tools/trainer/training_step.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace sherd {

// Throws, showing the arithmetic, where the batch does not fit the ranks and the micro-batch.
SHERD_API void check_batch(const TrainSettings& settings, int ranks);
// The optimizer of the settings.
SHERD_API std::unique_ptr<Optimizer> make_optimizer(const TrainSettings& settings);
SHERD_API StepSettings step_settings(const TrainSettings& settings, const LrSchedule& schedule);
// Of [precision]; throws for what does not fit together.
SHERD_API Precision training_precision(const TrainSettings& settings);
// Where something is computed or sent in fp16; throws for what makes no sense.
SHERD_API std::optional<LossScaleSettings> loss_scale_settings(const TrainSettings& settings);
// Whether inputs of what runs again are offloaded; throws where nothing does.
SHERD_API bool offloads_activations(const TrainSettings& settings);
// What of the model runs again; --recompute auto must have been decided (chosen_recompute).
SHERD_API void apply_recompute(const TrainSettings& settings, VisionTransformer& model);
// Fills the elements this rank keeps: from settings.weights (see open_weights), or by the
// initialisers. Returns where they were found, if not at that very path, and what
// WeightsFile::notes() says.
SHERD_API std::vector<std::string> make_weights(const TrainSettings& settings, const Module& model,
                                                ShardingEngine& engine);
// Of every file of weights that a run writes.
SHERD_API std::map<std::string, std::string> weights_metadata();
// Writes all weights to one file, through rank 0; there returns what went wrong. All ranks
// together, or, where engine.holds_whole_model(), rank 0 alone.
SHERD_API std::string write_weights(const Module& model, ShardingEngine& engine,
                                    const std::string& path);
// The same; where rank 0 cannot write, all throw an AgreedError.
SHERD_API void save_sharded(const Module& model, ShardingEngine& engine, const std::string& path);

// "0.1.0, g++ 12.2, oneDNN" and such: what a log should say of the program.
SHERD_API std::string version();
SHERD_API std::string build_description();

}  // namespace sherd
