// SPDX-License-Identifier: Apache-2.0
// Checkpoints of DeepSpeed's ZeRO: a directory with the weights in fp32 (or what the optimizer
// kept) cut over *zero_pp_rank_R_mp_rank_00_optim_states.pt, and their names and shapes in
// mp_rank_00_model_states.pt (stages 1, 2) or zero_pp_rank_R_mp_rank_00_model_states.pt (stage 3).
//
//   stages 1, 2: all weights of a parameter group, one after the other, each followed by its own
//                padding where the file says so; that vector is cut into one run a rank
//   stage 3:     each weight is cut into ranks' equal parts, the last ones padded; a rank has its
//                parts of all weights, one after the other, over its groups
//
// The optimizer's vectors (exp_avg, ...) are cut in the same way. Nothing in the files is run, see
// unpickler.h. Refused, with what to do: model parallelism, pipelines (layer files), missing ranks.
#pragma once

#include <sherd/runtime/io/tensor_file.h>

#include <memory>
#include <string>

namespace sherd {

// The directory with the files: this one, or the one that its file `latest` names; else empty.
SHERD_API std::string find_torch_zero(const std::string& directory);

// Trained and frozen weights and buffers by the model's names, states as optimizer.NAME.exp_avg.
SHERD_API std::unique_ptr<TensorFile> open_torch_zero(const std::string& directory);

}  // namespace sherd
