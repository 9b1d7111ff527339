// SPDX-License-Identifier: Apache-2.0
// Checkpoints of torch.distributed.checkpoint (DCP): a directory with .metadata, a pickle that says
// which box of which tensor is at which bytes of which file, and __RANK_N.distcp files, in which
// each box is what torch.save wrote of one tensor. Nothing in them is run: see unpickler.h.
//
// Opening checks that the boxes of each tensor lie in it, do not overlap and leave nothing out, and
// that each is in its file with that shape and type. Errors, each with the file and what to do:
// files that are missing, compressed (transform_descriptors) or of other formats.
#pragma once

#include <sherd/runtime/io/tensor_file.h>

#include <memory>
#include <string>

namespace sherd {

// Is the directory such a checkpoint?
SHERD_API bool is_torch_distributed(const std::string& directory);

// All of its tensors as those of one file. The model's are those under model, state_dict,
// model_state_dict, module or app.model, whichever has most (TensorFile::prefix), else all. Of an
// optimizer's state by names (OPTIMIZER.state.NAME.exp_avg, as get_state_dict gives it) what has
// the weight's shape is called optimizer.NAME.exp_avg here.
SHERD_API std::unique_ptr<TensorFile> open_torch_distributed(const std::string& directory);

}  // namespace sherd
