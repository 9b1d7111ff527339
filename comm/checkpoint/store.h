// SPDX-License-Identifier: Apache-2.0
// The checkpoints of a run: a directory in which they appear whole or not at all.
//
//   checkpoints/
//     step-00000500/  step-00001000/      complete
//     .step-00001500.partial/             being written; removed when the next run starts
//     last -> step-00001000               the newest
//     best -> step-00000500               of the best result
//     .lock                               of the run that writes here
//
// Note [A checkpoint appears]
// Ranks write their files into a hidden directory and flush them. When all have, rank 0 adds the
// index, flushes, and gives the directory its name, which is one step for the file system; only
// then does `last` move. So a crash at any instant leaves the checkpoints that were there.
#pragma once

#include <sherd/comm/checkpoint/index.h>
#include <sherd/comm/communicator.h>
#include <sherd/runtime/io/directory.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace sherd {

struct FoundCheckpoint {
  std::int64_t step = 0;
  std::string path;
};
// Those that are complete, by step. None where there is no such directory.
SHERD_API std::vector<FoundCheckpoint> find_checkpoints(const std::string& directory);
// What PATH means: a checkpoint, a link to one, or a directory of them, of which the newest.
SHERD_API std::string resolve_checkpoint(const std::string& path);

class SHERD_API CheckpointStore {
 public:
  // All ranks together, as everything below; what fails on one is an AgreedError on all. Rank 0
  // makes the directory, locks it and removes what killed runs have left half done. `keep`: how
  // many of the newest stay, beside the best.
  CheckpointStore(Communicator& world, std::string directory, int keep);
  ~CheckpointStore();

  // Does what a run that was killed just after a checkpoint had appeared did not come to: the
  // links, and that old ones go. `best_step`: of the best, -1 where there is none.
  void tidy_up(std::int64_t best_step);

  // Makes a directory for the ranks to write into, and returns its path.
  std::string begin(std::int64_t step);
  // Every rank has its file on the disk, and gives what CheckpointShardWriter::commit() said of it,
  // or why it failed. The checkpoint appears; old ones go. Returns its path. An error says whether
  // it did appear.
  struct Content {
    std::string producer, run, config;
    bool best = false;  // so far
  };
  std::string finish(const std::string& table, const std::string& failure, const Content& content);
  // Instead, where the ranks cannot be asked any more: each removes what is its own.
  void abandon();

  const std::string& directory() const { return directory_; }

 private:
  std::string path(const std::string& name) const;
  void publish(const std::vector<std::string>& tables, const Content& content);
  void point_links(std::int64_t newest, std::int64_t best);
  void remove_old();

  Communicator& world_;
  std::string directory_;
  int keep_;
  std::unique_ptr<DirectoryLock> lock_;  // rank 0's
  std::int64_t step_ = -1;               // of the checkpoint being written
  std::string partial_;                  // its directory
};

}  // namespace sherd
