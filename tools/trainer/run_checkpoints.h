// SPDX-License-Identifier: Apache-2.0
// The checkpoints that a run writes, and the one that it goes on from.
#pragma once

#include <sherd/tools/trainer/checkpoints.h>
#include <sherd/tools/trainer/settings.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace sherd {

// Where --resume leads.
struct ResumePoint {
  std::string checkpoint;  // its directory; empty: the run starts anew
  std::string out;         // of the run
  bool same_run = false;   // `out` is that of the run that wrote it, or was to: its files go on
};
// For the settings --resume and --out as they were given. None without --resume. Throws where there
// is no such checkpoint, or the run has later ones, which going on would mix up.
SHERD_API std::optional<ResumePoint> find_resume_point(const std::string& resume,
                                                       const std::string& out);

// In what a run differs from the one that it goes on from, so that it is not the same bit for bit;
// one sentence each.
SHERD_API std::vector<std::string> differences(const RunProgress& then, const RunProgress& now);

class SHERD_API RunCheckpoints {
 public:
  // After engine.prepare(optimizer).
  RunCheckpoints(const TrainSettings& settings, Context& context, const Module& model,
                 ShardingEngine& engine, const Optimizer& optimizer);

  std::int64_t bytes() const { return saver_.bytes(); }  // that this rank writes, each time

  struct Saved {
    std::string path;
    std::int64_t step = 0;
    double seconds = 0.0;  // that training has waited
    bool best = false;
  };
  // All ranks together. Makes OUT/checkpoints this run's, which is at `progress`; `config` goes
  // into each.
  void open(Communicator& world, const std::string& out, std::string config,
            const RunProgress& progress, const std::function<void(const Saved&)>& saved);
  bool due(std::int64_t steps) const { return steps % every_ == 0; }
  std::int64_t last_step() const { return last_step_; }
  // Saves; where that goes on beside training, the one before is waited for.
  void save(const RunProgress& progress, bool best);
  // Is there a checkpoint under way, and has this rank still to write? For an exchange between
  // steps; when none has, all call finish().
  bool pending() const { return saver_.pending(); }
  bool writing() const { return saver_.writing(); }
  void finish();
  void abandon();  // what is under way, of this rank alone
  void close();    // the folder goes too where nothing was saved there

  std::string last_path() const;  // of the newest that is complete; empty where there is none

 private:
  std::int64_t every_;
  int keep_;
  bool async_;
  std::string config_;
  CheckpointSaver saver_;
  std::unique_ptr<CheckpointStore> store_;
  std::function<void(const Saved&)> saved_;
  Saved under_way_;
  std::int64_t last_step_ = -1;
};

}  // namespace sherd
