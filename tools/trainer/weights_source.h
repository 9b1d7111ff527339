// SPDX-License-Identifier: Apache-2.0
// Weights from whatever a path names, for train, eval, inspect and convert.
#pragma once

#include <sherd/runtime/io/tensor_file.h>

#include <memory>
#include <string>

namespace sherd {

// A file as open_tensor_file takes it. Of a directory the first of these that it is or has:
//   a sharded checkpoint (index.json), or the newest of a run (RUN, RUN/checkpoints);
//   split files (model.safetensors.index.json, pytorch_model.bin.index.json);
//   a checkpoint of torch.distributed.checkpoint (.metadata);
//   one of DeepSpeed's ZeRO (*_optim_states.pt, or `latest`, which names such a directory);
//   model.safetensors, or pytorch_model.bin.
SHERD_API std::unique_ptr<TensorFile> open_weights(const std::string& path);

}  // namespace sherd
