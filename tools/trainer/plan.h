// SPDX-License-Identifier: Apache-2.0
// What a training step will hold, before it is run: the unchanged step on the meta device. And what
// to change where that is more than there is.
#pragma once

#include <sherd/runtime/out_of_memory.h>
#include <sherd/tools/trainer/checkpoints.h>
#include <sherd/tools/trainer/setup.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sherd {

// Throws where the settings cannot be those of a step on so many ranks.
SHERD_API void check_step(const TrainSettings& settings, int ranks);

// An image of the shape, and with the classes, of those of the settings.
SHERD_API std::shared_ptr<const ImageDataset> one_image(const TrainSettings& settings);

// Of the steps of a Rehearsal.
SHERD_API LrSchedule rehearsal_schedule(const TrainSettings& settings);

// All that a training step needs, with images that are noise: to be run again and again. All ranks
// make one together.
struct SHERD_API Rehearsal {
  Rehearsal(const TrainSettings& settings, Context& context, Communicator& world);
  Rehearsal(const TrainSettings& settings, std::shared_ptr<const ImageDataset> image,
            Context& context, Communicator& world);

  std::shared_ptr<const ImageDataset> image;
  VisionTransformer model;
  ShardingEngine engine;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<TrainingStep> step;
  std::unique_ptr<CheckpointSaver> saver;  // where it has memory of its own
  std::unique_ptr<InputBuffers> inputs;
  std::shared_ptr<void> ring;  // what a loader of batches takes of the context's memory
};

struct MemoryPlan {
  std::int64_t peak_bytes = 0;
  MemoryBreakdown at_peak{}, peaks{};  // see Ledger
};

// What a ledger has seen.
SHERD_API MemoryPlan memory_plan(const Ledger& ledger);

// Of one rank.
struct StepPlan {
  MemoryPlan device, host;
  std::int64_t parameters = 0;                   // of the whole model
  std::int64_t flops = 0;                        // of products, a step
  std::int64_t collectives = 0, sent_bytes = 0;  // a step
};

// The peaks hold from the start of the program through two steps: the first allocates what stays.
SHERD_API StepPlan plan_step(const TrainSettings& settings, int ranks, int rank = 0);

// What the engine gathers as one.
struct PlannedUnit {
  std::string name;
  std::int64_t parameters = 0, padded = 0, shard = 0;  // elements; with padding; of one rank
};

// plan_step(), and how its second step, which is like all that follow, comes about.
struct RecordedStep {
  StepPlan plan;
  Schedule schedule;  // begins with what is live in each category
  std::vector<PlannedUnit> units;
  std::vector<ShardingEvent> events;
  std::int64_t samples = 0;     // of this rank
  std::int64_t batch_size = 0;  // of all
  double model_flops = 0.0;     // of the whole batch: forward times three, whatever is run again
  DType dtype = DType::f32;     // that is computed in
  int threads = 0;              // of a rank, on the cpu
  Device device = Device::cpu;  // that it is planned for
};
SHERD_API std::unique_ptr<RecordedStep> record_step(const TrainSettings& settings, int ranks,
                                                    int rank = 0);

// Whether a step of this peak surely runs under the limit. What an allocator reserves beyond what
// is live is a part of a page for each free piece: see Note [Near the limit] in allocator.h.
constexpr bool fits(std::int64_t peak_bytes, std::size_t limit) {
  return static_cast<std::size_t>(peak_bytes + peak_bytes / 100 + (std::int64_t{2} << 20)) <= limit;
}

struct PlanOption {
  std::string change;  // "--micro-batch 8 --shard zero3"
  StepPlan plan;
};

// At most four changes of the settings, or pairs of changes, whose step fits; the cheapest first.
SHERD_API std::vector<PlanOption> options_that_fit(const TrainSettings& settings, int ranks,
                                                   std::size_t limit);

// --recompute auto: the name of the least recomputation whose step fits --memory-limit, or of the
// most there is; not none where activations are offloaded. Otherwise what the settings say.
SHERD_API std::string chosen_recompute(const TrainSettings& settings, int ranks);

// Throws an AgreedError with the planned peak, what it is made of and what would fit, where
// --memory-limit is too little for any step. Every rank comes to the same.
SHERD_API void check_memory_limit(const TrainSettings& settings, int ranks);

// Calls work; to the OutOfMemory that it throws adds what would fit.
SHERD_API void with_memory_advice(const TrainSettings& settings, int ranks,
                                  const std::function<void()>& work);
// What it adds: a sentence with a space before it.
SHERD_API std::string memory_advice(const TrainSettings& settings, int ranks,
                                    const OutOfMemory& error);

}  // namespace sherd
