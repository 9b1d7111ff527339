// SPDX-License-Identifier: Apache-2.0
// A model's weights as one safetensors file under its parameters' names, which for a Vision
// Transformer are timm's.
#pragma once

#include <sherd/models/module.h>

#include <map>
#include <string>
#include <vector>

namespace sherd {

// Writes every parameter, atomically.
SHERD_API void save_weights(const Module& model, const std::string& path,
                            const std::map<std::string, std::string>& metadata = {});

// Allocates every parameter and fills it from the file, converting between floating types. Every
// parameter must be there with its shape; a tensor in the file that the model lacks is an error
// too, except the ones that old files are known to carry ("pre_logits.", "pooler."), which are
// returned.
SHERD_API std::vector<std::string> load_weights(Module& model, Context& context, DType dtype,
                                                const std::string& path);

}  // namespace sherd
