// SPDX-License-Identifier: Apache-2.0
// The folder of a run: which one, what is in it, and that nobody's files are overwritten.
//
//   OUT/config.toml  log.jsonl  model.safetensors  checkpoints/
#pragma once

#include <sherd/comm/communicator.h>
#include <sherd/tools/trainer/run_checkpoints.h>
#include <sherd/tools/trainer/settings.h>

#include <string>
#include <string_view>
#include <vector>

namespace sherd {

class RunFiles {
 public:
  RunFiles(const TrainSettings& settings, const ResumePoint& resume, Communicator& world)
      : settings_(settings), resume_(resume), world_(world) {}

  // Rank 0: --out, or a new folder of its own.
  void choose();
  // All ranks together: they hear which.
  void share();

  const std::string& out() const { return out_; }
  std::string path(std::string_view name) const;
  std::string config_path() const { return path("config.toml"); }
  std::string log_path() const { return path("log.jsonl"); }
  static constexpr const char* kWeights = "model.safetensors";
  std::string weights_path() const { return path(kWeights); }
  // The settings, with paths that hold from wherever they are used later.
  std::string config() const;

  // Makes what can be made now; throws where something is there that is not this run's, or the disk
  // has less than `bytes` free, which `what` needs ("the weights and the log").
  void claim(std::int64_t bytes, const std::string& what);
  // Whether the log is that of the run that goes on; else it will be made.
  bool log_goes_on() const;
  void add(const std::string& path) { claimed_.push_back(path); }
  void remove();  // what this run has made

 private:
  void make(const std::string& path, std::string_view text);
  void claim_out(std::int64_t bytes, const std::string& what);
  void remove_left_over() const;

  const TrainSettings& settings_;
  const ResumePoint& resume_;
  Communicator& world_;
  std::string out_;
  std::vector<std::string> claimed_;
};

}  // namespace sherd
