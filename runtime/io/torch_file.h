// SPDX-License-Identifier: Apache-2.0
// PyTorch's .pt, .pth and .bin files as torch.save writes them: since version 1.6 a zip archive
// with a pickle (NAME/data.pkl) that describes the objects, and each storage's bytes as an entry
// (NAME/data/KEY); before, see torch_legacy.h. Nothing in such a file is run: see unpickler.h for
// what a pickle may hold.
//
// Opening checks that every tensor lies inside its storage, and every storage inside the file.
// Tensors of types that Sherd lacks (bool, complex, float8, quantized, ...) are listed. Errors,
// each an Error with the file, the place and what to do: names of other classes and functions (a
// whole nn.Module, say: save its state_dict()), TorchScript and tar archives, big-endian files, and
// tensors whose storage is compressed (by another program than PyTorch).
#pragma once

#include <sherd/runtime/io/tensor_file.h>
#include <sherd/runtime/io/unpickler.h>

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace sherd {

struct TorchTensor {
  // The keys on the way to it, joined by dots, a list's index for a key: "model.cls_token",
  // "optimizer.state.0.exp_avg". A file of one tensor alone calls it "tensor".
  std::string name;
  std::string_view type;                     // "float32"
  std::optional<DType> dtype;                // none where Sherd has no such type
  std::uint64_t width = 0;                   // bytes of an element
  std::vector<std::int64_t> shape, strides;  // strides in elements, never negative
  std::uint64_t numel = 0, offset = 0;       // elements; where in the storage the first one is
  std::span<const std::uint8_t> storage;     // shared between views of one storage

  bool contiguous() const;  // its elements lie in row-major order without gaps
};

// Copies elements from the one with row-major index `first` on. The caller has seen to it that they
// exist; `to` has room for count * width bytes.
SHERD_API void copy_elements(const TorchTensor& tensor, std::uint64_t first, std::uint64_t count,
                             std::uint8_t* to);

// A file in memory; `file` outlives this, `path` only serves messages.
class SHERD_API TorchArchive {
 public:
  // `classes`: names that the pickle may have besides, of objects whose parts are looked at alone.
  TorchArchive(std::span<const std::uint8_t> file, const std::string& path,
               std::span<const std::string_view> classes = {});
  TorchArchive(const TorchArchive&) = delete;  // what it lists may point into itself
  TorchArchive& operator=(const TorchArchive&) = delete;

  const PickleTree& tree() const { return tree_; }
  // Every tensor, once for each way to it, in the file's order.
  const std::vector<TorchTensor>& tensors() const { return tensors_; }
  // How the names of a model's weights begin: that dict's key and a dot, where of the outermost
  // dict and those under its keys model, state_dict, model_state_dict, module and ema, one of the
  // latter holds most tensors (of equals the first in this order). Else, or where nothing of these
  // holds tensors, empty.
  const std::string& state_dict() const { return state_dict_; }
  // The numbers, strings and None beside the tensors in the outermost dict, as text.
  std::map<std::string, std::string> plain_values() const;

 private:
  void read_zip(std::span<const std::uint8_t> file, const std::string& path,
                const PickleNames& names);
  void read_legacy(std::span<const std::uint8_t> file, const std::string& path,
                   const PickleNames& names);

  std::vector<std::uint8_t> inflated_;  // the pickle, where it is compressed
  PickleTree tree_;
  std::vector<TorchTensor> tensors_;
  std::string state_dict_;
};

// By its first bytes: one that TorchArchive is for. An Error for what may come from PyTorch but is
// none: a bare pickle, a tar archive.
SHERD_API bool is_torch_file(std::span<const std::uint8_t> file, const std::string& path);

// The file as a TensorFile, mapped.
SHERD_API std::unique_ptr<TensorFile> open_torch_file(const std::string& path);

}  // namespace sherd
