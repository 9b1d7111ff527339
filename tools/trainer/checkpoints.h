// SPDX-License-Identifier: Apache-2.0
// Checkpoints of a training run: all that it needs to go on as if it had never stopped.
#pragma once

#include <sherd/comm/checkpoint/reader.h>
#include <sherd/comm/checkpoint/shard_writer.h>
#include <sherd/comm/checkpoint/store.h>
#include <sherd/comm/sharding/engine.h>
#include <sherd/tools/trainer/training_step.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace sherd {

// Where a run is. Random numbers need no more than the step: they are functions of it, the seed and
// names.
struct RunProgress {
  StepState step;
  std::int64_t optimizer_steps = 0;  // those that were not skipped
  std::int64_t epoch = 0;            // the one under way, or the next
  std::int64_t samples = 0;          // of it that were used
  // Of the epoch under way, for its mean: losses times samples, of so many samples.
  double loss_sum = 0.0;
  std::int64_t learnt = 0, epoch_skipped = 0;
  std::int64_t skipped = 0;  // steps of the run
  // Of the evaluations so far, and the step of the checkpoint with it; none: -1.
  double best_accuracy = -1.0;
  std::int64_t best_step = -1;
  // What the numbers depend on, to tell when a run does not go on bit for bit.
  std::int64_t batch_size = 0, micro_batch = 0, seed = 0, ranks = 0, threads = 0;
  std::string dataset, sharding, precision;

  SHERD_API std::string to_json() const;
  // `where` is named in errors.
  SHERD_API static RunProgress from_json(const std::string& text, const std::string& where);
};

// What there is to know before the weights are read: throws where the checkpoint has none of a run.
SHERD_API RunProgress progress_of(const CheckpointReader& checkpoint);

// Throws, naming the first difference, unless the checkpoint has exactly the model's parameters
// and, with an optimizer, its state.
SHERD_API void check_checkpoint(const CheckpointReader& checkpoint, const Module& model,
                                const Optimizer* optimizer);
// Fills the weights this rank keeps. All ranks together.
SHERD_API void load_weights(const CheckpointReader& checkpoint, ShardingEngine& engine);
// And the optimizer's state, after engine.prepare().
SHERD_API void load_state(const CheckpointReader& checkpoint, ShardingEngine& engine,
                          Optimizer& optimizer, const RunProgress& progress);

// Saves checkpoints of an engine and its optimizer, either while training waits or from a copy
// while it goes on.
class SHERD_API CheckpointSaver {
 public:
  // After engine.prepare(optimizer). `async`: makes room for the copy, in the host's memory.
  CheckpointSaver(Context& context, const Module& model, ShardingEngine& engine,
                  const Optimizer& optimizer, bool async);
  ~CheckpointSaver();  // waits for the file that is being written

  std::int64_t bytes() const { return bytes_; }  // that this rank writes
  bool pending() const { return pending_; }      // save() without finish()
  bool writing() const;                          // the file is not done

  // All ranks together, from here on. save(): with async, returns once everything is copied.
  void save(CheckpointStore& store, std::int64_t step, const CheckpointStore::Content& content);
  // Waits for the file, and lets the checkpoint appear. Returns its path.
  std::string finish(CheckpointStore& store);

 private:
  void write_from_engine(const std::string& directory);
  void write_from_copy(const std::string& directory);

  Context& context_;
  ShardingEngine& engine_;
  std::vector<CheckpointItem> items_;
  std::vector<std::int64_t> offsets_;  // of items_ in copy_
  std::int64_t bytes_ = 0;
  Tensor copy_;
  bool async_, pending_ = false;
  CheckpointStore::Content content_;
  std::map<std::string, std::string> metadata_;
  std::string table_, failure_;  // the writer's result
  std::thread writer_;
  std::atomic<bool> writing_ = false;
};

}  // namespace sherd
