// SPDX-License-Identifier: Apache-2.0
// Weights from one format to another, tensor by tensor: no more than a few MiB, or for a checkpoint
// one piece of a tensor, are in memory.
//
//   convert_weights("runs/a", "a.safetensors", {.names = "transformers"});
#pragma once

#include <sherd/runtime/api.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace sherd {

struct ConvertOptions {
  // safetensors, split (several files and an index) or checkpoint; empty: by the destination's
  // name.
  std::string to = {};
  std::string names = {};       // timm, transformers; empty: as they are
  std::string dtype = "as-is";  // of the weights; or fp32, bf16, fp16, fp64
  std::string optimizer = {};   // yes, no; empty: into a checkpoint where the source has a state
  std::uint64_t max_file_size = 0;  // of tensors in one of split files; 0: 5 GB
  int pieces = 0;                   // files of a checkpoint; 0: one
};

struct ConvertResult {
  std::string from, to;            // what was read; the destination's format
  std::vector<std::string> notes;  // what was renamed, left out, or is worth knowing
  std::size_t tensors = 0, files = 0;
  std::uint64_t bytes = 0;
  bool resumable = false;  // a checkpoint that a run can go on from
};

// Writes `destination`, which must not be there (an empty directory may); it appears whole or not
// at all. progress(bytes done, of all) is called now and then; where it returns false all that was
// written is removed, and the Error says so. Throws, saying what to change, for what does not go
// together.
SHERD_API ConvertResult convert_weights(
    const std::string& source, const std::string& destination, const ConvertOptions& options,
    const std::function<bool(std::uint64_t, std::uint64_t)>& progress = {});

}  // namespace sherd
