// SPDX-License-Identifier: Apache-2.0
// Files of PyTorch as weights, as a user meets them.
#include <doctest/doctest.h>
#include <sherd/runtime/io/safetensors.h>

#include "../unit/pickle_support.h"
#include "../unit/zip_support.h"
#include "cli_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

std::string golden(const std::string& name) {
  return std::string(SHERD_TEST_DATA) + "/golden/torch/" + name;
}

// The tensors of a safetensors file in fp32 as torch.save writes {"model": state dict}, those of
// two dimensions as transposed views.
void write_checkpoint(const std::string& from, const std::string& to) {
  const SafetensorsFile file = SafetensorsFile::open(from);
  Pickle pickle;
  pickle.op("}(").str("epoch").integer(3).str("model").op("}(");
  std::vector<std::pair<std::string, Bytes>> storages;
  for (const SafetensorsEntry& entry : file.entries()) {
    REQUIRE(entry.dtype == DType::f32);
    const auto dims = entry.shape.dims();
    const auto bytes = file.bytes(entry);
    Bytes storage(bytes.begin(), bytes.end());
    const auto row_major = contiguous_strides(entry.shape);
    std::vector<std::int64_t> strides(row_major.begin(), row_major.begin() + entry.shape.rank());
    if (entry.shape.rank() == 2) {
      strides = {1, dims[0]};
      for (std::int64_t i = 0; i < dims[0]; ++i) {
        for (std::int64_t j = 0; j < dims[1]; ++j) {
          std::copy_n(bytes.begin() + 4 * (i * dims[1] + j), 4,
                      storage.begin() + 4 * (i + dims[0] * j));
        }
      }
    }
    const std::string key = std::to_string(storages.size());
    pickle.str("module." + entry.name)
        .tensor(key, entry.shape.numel(), 0, {dims.begin(), dims.end()}, strides);
    storages.emplace_back(key, std::move(storage));
  }
  put_file(to, make_torch_zip(pickle.op("uu").done(), storages));
}

}  // namespace

TEST_CASE("cli: weights of a PyTorch checkpoint give the run's own results") {
  const TempDirectory folder;
  const std::string run = folder.path("run"), checkpoint = folder.path("checkpoint.pt");
  REQUIRE(sherd_run("train " + kTiny + "--epochs 2 --out " + run).status == 0);
  write_checkpoint(run + "/model.safetensors", checkpoint);

  const Output inspected = sherd_run("inspect weights " + checkpoint);
  CHECK(inspected.status == 0);
  for (const char* piece : {"model.module.blocks.0.attn.qkv.weight", "under 'model'",
                            "prefix 'module.' removed", "PyTorch", "epoch = 3"}) {
    CHECK_MESSAGE(contains(inspected, piece), inspected.text);
  }
  const auto results = [](const Output& eval) {
    CHECK_MESSAGE(eval.status == 0, eval.text);
    return eval.text.substr(eval.text.find("top-1"));
  };
  const std::string own = results(sherd_run("eval " + run));
  CHECK(results(sherd_run("eval " + run + " --weights " + checkpoint)) == own);
  // Training goes on from them, each of two ranks reading its own part.
  const std::string on =
      "train " + kTiny + "--epochs 1 --lr 1e-3 --ranks 2 --shard zero3 --weights ";
  REQUIRE(sherd_run(on + checkpoint + " --out " + folder.path("a")).status == 0);
  REQUIRE(sherd_run(on + run + "/model.safetensors --out " + folder.path("b")).status == 0);
  CHECK(read_file(folder.path("a/model.safetensors")) ==
        read_file(folder.path("b/model.safetensors")));
}

TEST_CASE("cli: inspect weights lists what PyTorch and transformers wrote, and refuses programs") {
  const Output views = sherd_run("inspect weights " + golden("views.pt"));
  CHECK(views.status == 0);
  CHECK_MESSAGE(contains(views, "complex64"), views.text);
  CHECK_MESSAGE(contains(views, "(cannot be read here)"), views.text);
  CHECK_MESSAGE(contains(views, "14 tensors, 106 elements"), views.text);
  CHECK(contains(sherd_run("inspect weights " + golden("transformers4.bin")),
                 "names of transformers mapped to timm's, 2 of them joined from q, k and v"));
  refuses("inspect weights " + golden("module.pt"),
          {"module.pt", "torch.nn.modules.container.Sequential", "state_dict()"});
  const TempDirectory folder;
  refuses("train " + kTiny + "--out " + folder.path("run") + " --weights " + golden("module.pt"),
          {"module.pt", "could run code"});
  refuses("train " + kTiny + "--out " + folder.path("run") + " --weights " + golden("vit.pt"),
          {"vit.pt", "has shape"});
  CHECK_FALSE(std::filesystem::exists(folder.path("run")));
}
