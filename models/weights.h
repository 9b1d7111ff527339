// SPDX-License-Identifier: Apache-2.0
// A model's weights as a file under its parameters' names, which for a Vision Transformer are
// timm's. Written as safetensors; read from these, or from what torch.save wrote of a state dict
// (runtime/io/torch_file.h).
#pragma once

#include <sherd/models/module.h>
#include <sherd/runtime/io/safetensors.h>
#include <sherd/runtime/io/tensor_file.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace sherd {

// Writes every parameter, atomically.
SHERD_API void save_weights(const Module& model, const std::string& path,
                            const std::map<std::string, std::string>& metadata = {});

// The names of a model's weights in a file, in its order: without TensorFile::prefix, without an
// optimizer's state.
SHERD_API std::vector<std::string> weight_names(const TensorFile& file);

// A file of weights for a model: opening it checks that every parameter is there with its shape,
// and that the file has no tensor that the model lacks, except the ones that old files are known to
// carry ("pre_logits.", "pooler."). Of a checkpoint the weights alone are looked at, see
// TensorFile::prefix and kOptimizerPrefix; names of wrappers and of transformers become timm's, see
// weights_names.h.
class SHERD_API WeightsFile {
 public:
  WeightsFile(const std::string& path, const Module& model);
  // Of any source, such as a sharded checkpoint.
  WeightsFile(std::unique_ptr<TensorFile> file, const Module& model);

  // Reads elements of a parameter from the one with index `first` on, converting between floating
  // types: a rank reads the elements it keeps alone.
  void read(const Parameter& parameter, std::int64_t first, const Tensor& elements) const;
  const TensorFile& file() const { return *file_; }
  const std::vector<std::string>& leftover() const { return leftover_; }
  // How the file's names became the model's and what was left over, a short sentence each; empty
  // where they are the same.
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  using Sources = std::vector<const TensorEntry*>;  // joined along the first dimension
  void check(const Parameter& parameter, const Sources& sources) const;

  std::unique_ptr<TensorFile> file_;
  std::map<std::string, Sources> weights_;  // by the model's names
  std::vector<std::string> leftover_, notes_;
};

// Allocates every parameter and fills it from the file, see WeightsFile. Returns what is left over.
SHERD_API std::vector<std::string> load_weights(Module& model, Context& context, DType dtype,
                                                const std::string& path);

}  // namespace sherd
