// SPDX-License-Identifier: Apache-2.0
// Weights for a model out of files of torch.save, under the names that others give them.
#include <doctest/doctest.h>
#include <sherd/models/vit.h>
#include <sherd/models/weights.h>
#include <sherd/models/weights_names.h>
#include <sherd/runtime/tensor.h>

#include <functional>

#include "io_support.h"
#include "pickle_support.h"
#include "zip_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

// The model of tests/golden/make_torch_files.py.
ViTSettings golden_vit() {
  return {.image_height = 2,
          .image_width = 4,
          .channels = 1,
          .patch = 2,
          .dim = 4,
          .depth = 1,
          .heads = 2,
          .mlp_ratio = 2.0,
          .classes = 3};
}

std::string golden(const std::string& name) {
  return std::string(SHERD_TEST_DATA) + "/golden/torch/" + name;
}

using Names = std::vector<std::string>;

// "name <- from", "name <- a + b + c", for the weights that are not called so already.
Names mapped(const Names& names, Names* notes = nullptr) {
  const WeightNames result = map_weight_names(names);
  Names text;
  std::size_t used = 0;
  for (const WeightSource& weight : result.weights) {
    used += weight.from.size();
    if (weight.from == Names{weight.name}) continue;
    text.push_back(fmt::format("{} <- {}", weight.name, fmt::join(weight.from, " + ")));
  }
  CHECK(used == names.size());
  if (notes != nullptr) *notes = result.notes;
  return text;
}

struct Item {
  std::string name;
  std::vector<std::int64_t> dims;
  std::string storage = "FloatStorage";
};

// A state dict of zeros.
void write_state_dict(const std::string& path, const std::vector<Item>& items) {
  constexpr std::int64_t kNumel = 4096;
  Pickle pickle;
  pickle.op("}(");
  for (const Item& item : items) {
    std::vector<std::int64_t> strides(item.dims.size());
    std::int64_t step = 1;
    for (std::size_t i = item.dims.size(); i-- > 0;) {
      strides[i] = step;
      step *= item.dims[i];
    }
    pickle.str(item.name).tensor("0", kNumel, 0, item.dims, strides, item.storage);
  }
  put_file(path, make_torch_zip(pickle.op("u").done(), {{"0", Bytes(8 * kNumel)}}));
}

}  // namespace

TEST_CASE("weights: one model from PyTorch, from a checkpoint and from transformers") {
  // Each tensor of vit.pt counts on from the one before, in eighths.
  std::map<std::string, std::int64_t> starts;
  std::int64_t place = 0;
  const auto plain = open_tensor_file(golden("vit.pt"));
  for (const TensorEntry& entry : plain->entries()) {
    starts[entry.name] = place;
    place += entry.numel;
  }
  CHECK(starts.size() == 20);
  const std::pair<const char*, Names> files[]{
      {"vit.pt", {}},
      {"checkpoint.pt", {"weights under 'model'", "prefix 'module._orig_mod.' removed"}},
      {"transformers4.bin",
       {"names of transformers mapped to timm's, 2 of them joined from q, k and v"}},
      {"transformers5.bin",
       {"names of transformers mapped to timm's, 2 of them joined from q, k and v"}}};
  for (const auto& [file, notes] : files) {
    const std::string name = file;
    CAPTURE(name);
    for (const DType dtype : {DType::f32, DType::f64}) {
      Context context;
      VisionTransformer model(golden_vit());
      CHECK(load_weights(model, context, dtype, golden(name)).empty());
      for (const Parameter* parameter : model.parameters()) {
        CAPTURE(parameter->name());
        const std::int64_t start = starts.at(parameter->name());
        std::vector<double> expected, values;
        for (std::int64_t i = 0; i < parameter->numel(); ++i) {
          expected.push_back(static_cast<double>(start + i) / 8);
        }
        if (dtype == DType::f64) {
          values = parameter->data().to_vector<double>();
        } else {
          const auto narrow = parameter->data().to_vector<float>();
          values.assign(narrow.begin(), narrow.end());
        }
        CHECK(values == expected);
      }
      CHECK(WeightsFile(golden(name), model).notes() == notes);
    }
  }
}

TEST_CASE("weights: any range of a weight joined from three tensors") {
  Context context;
  VisionTransformer model(golden_vit());
  model.assign_names();
  const WeightsFile whole(golden("vit.pt"), model), parts(golden("transformers4.bin"), model);
  for (const Parameter* parameter : model.parameters()) {
    if (!parameter->name().starts_with("blocks.0.attn.qkv.")) continue;
    const std::int64_t numel = parameter->numel();
    for (std::int64_t first = 0; first < numel; ++first) {
      for (std::int64_t count = 1; first + count <= numel; ++count) {
        const Tensor one = Tensor::empty(context, {count}, DType::f32, MemoryCategory::workspace);
        const Tensor other = Tensor::empty(context, {count}, DType::f32, MemoryCategory::workspace);
        whole.read(*parameter, first, one);
        parts.read(*parameter, first, other);
        CHECK(one.to_vector<float>() == other.to_vector<float>());
      }
    }
  }
}

TEST_CASE("weights: what transformers call them, in both generations") {
  const std::string old = "vit.encoder.layer.11.", late = "vit.layers.11.";
  Names notes;
  CHECK(mapped({"vit.embeddings.cls_token", "vit.embeddings.position_embeddings",
                "vit.embeddings.patch_embeddings.projection.bias", "vit.layernorm.weight",
                "classifier.bias", "vit.pooler.dense.weight"},
               &notes) ==
        Names{"cls_token <- vit.embeddings.cls_token",
              "pos_embed <- vit.embeddings.position_embeddings",
              "patch_embed.proj.bias <- vit.embeddings.patch_embeddings.projection.bias",
              "norm.weight <- vit.layernorm.weight", "head.bias <- classifier.bias",
              "pooler.dense.weight <- vit.pooler.dense.weight"});
  CHECK(notes == Names{"names of transformers mapped to timm's, 0 of them joined from q, k and v"});
  for (const std::string prefix : {"vit.", ""}) {
    const std::string block = prefix + "encoder.layer.3.", new_block = prefix + "layers.3.";
    const auto one = [&](const std::string& from, const std::string& to) {
      CHECK(mapped({block + "layernorm_before.bias", from}) ==
            Names{"blocks.3.norm1.bias <- " + block + "layernorm_before.bias",
                  "blocks.3." + to + " <- " + from});
    };
    one(block + "layernorm_after.weight", "norm2.weight");
    one(block + "attention.output.dense.bias", "attn.proj.bias");
    one(block + "intermediate.dense.bias", "mlp.fc1.bias");
    one(block + "output.dense.bias", "mlp.fc2.bias");
    one(new_block + "attention.o_proj.bias", "attn.proj.bias");
    one(new_block + "mlp.fc1.bias", "mlp.fc1.bias");
    one(new_block + "mlp.fc2.weight", "mlp.fc2.weight");
  }
  // The order in the file does not matter, that of the rows does.
  CHECK(mapped({old + "attention.attention.value.bias", old + "attention.attention.query.bias",
                old + "layernorm_before.bias", old + "attention.attention.key.bias"}) ==
        Names{"blocks.11.norm1.bias <- " + old + "layernorm_before.bias",
              "blocks.11.attn.qkv.bias <- " + old + "attention.attention.query.bias + " + old +
                  "attention.attention.key.bias + " + old + "attention.attention.value.bias"});
  CHECK(mapped({late + "layernorm_before.bias", late + "attention.k_proj.bias",
                late + "attention.v_proj.bias", late + "attention.q_proj.bias"},
               &notes)[1] == "blocks.11.attn.qkv.bias <- " + late + "attention.q_proj.bias + " +
                                 late + "attention.k_proj.bias + " + late +
                                 "attention.v_proj.bias");
  CHECK(notes == Names{"names of transformers mapped to timm's, 1 of them joined from q, k and v"});
  // Without k there is nothing to join.
  CHECK(mapped({late + "layernorm_before.bias", late + "attention.q_proj.bias",
                late + "attention.v_proj.bias"})
            .size() == 1);
  // timm's own names, and those that only look alike, stay.
  CHECK(mapped({"blocks.0.norm1.weight", "classifier.bias", "layernorm.bias", "vit.x"}, &notes)
            .empty());
  CHECK(notes.empty());
}

TEST_CASE("weights: prefixes of wrappers go where every name has them") {
  const auto stripped = [](Names names) {
    const std::string taken = strip_wrapper_prefixes(names);
    return fmt::format("{}|{}", taken, fmt::join(names, " "));
  };
  CHECK(stripped({"module.a", "module.module.b"}) == "module.|a module.b");
  CHECK(stripped({"_orig_mod.module.a", "_orig_mod.module.b"}) == "_orig_mod.module.|a b");
  CHECK(stripped({"module._orig_mod.a"}) == "module._orig_mod.|a");
  CHECK(stripped({"module.a", "b"}) == "|module.a b");
  CHECK(stripped({}) == "|");
}

TEST_CASE("weights: each way in which a PyTorch file can be wrong for a model") {
  const TempDirectory folder;
  const std::string path = folder.path("w.pt");
  VisionTransformer model(golden_vit());
  model.assign_names();
  std::vector<Item> sound;
  for (const Parameter* parameter : model.parameters()) {
    const auto dims = parameter->shape().dims();
    sound.push_back({parameter->name(), {dims.begin(), dims.end()}});
  }
  const auto item = [](std::vector<Item>& items, const std::string& name) -> Item& {
    for (Item& each : items) {
      if (each.name == name) return each;
    }
    FAIL("no item");
    return items[0];
  };
  const auto refusal = [&](const std::function<void(std::vector<Item>&)>& change) {
    std::vector<Item> items = sound;
    change(items);
    write_state_dict(path, items);
    return error_of([&] { WeightsFile(path, model); });
  };
  write_state_dict(path, sound);
  CHECK(WeightsFile(path, model).leftover().empty());
  check_mentions(refusal([&](auto& items) { item(items, "head.bias").name = "head.bios"; }), path,
                 "no tensor 'head.bias' [3]", "did you mean 'head.bios'");
  check_mentions(refusal([&](auto& items) { item(items, "head.bias").dims = {4}; }), path,
                 "'head.bias' has shape [4], the model needs [3]");
  check_mentions(refusal([&](auto& items) {
                   item(items, "head.bias").dims = {1, 3};
                 }),
                 "has shape [1, 3]");
  check_mentions(refusal([&](auto& items) { item(items, "head.bias").storage = "LongStorage"; }),
                 path, "'head.bias' is i64", "floating");
  check_mentions(refusal([&](auto& items) { item(items, "head.bias").storage = "BoolStorage"; }),
                 path, "'head.bias' is bool");
  check_mentions(refusal([&](auto& items) {
                   items.push_back({"extra", {1}});
                 }),
                 path, "a tensor 'extra' that the model lacks");
  {
    std::vector<Item> items = sound;
    items.push_back({"pre_logits.fc.weight", {1}});
    write_state_dict(path, items);
    CHECK(WeightsFile(path, model).leftover() == Names{"pre_logits.fc.weight"});
  }
  // Names of transformers, of which two stand for the same, or do not go together.
  const auto split = [&](const std::vector<std::int64_t>& key, const std::string& type) {
    return [=](std::vector<Item>& items) {
      std::erase_if(items, [](const Item& i) { return i.name == "blocks.0.attn.qkv.bias"; });
      items.push_back({"layers.0.attention.q_proj.bias", {4}});
      items.push_back({"layers.0.attention.k_proj.bias", key, type});
      items.push_back({"layers.0.attention.v_proj.bias", {4}});
      for (Item& each : items) {
        if (each.name == "blocks.0.norm1.bias") each.name = "layers.0.layernorm_before.bias";
      }
    };
  };
  const std::string message = refusal([&](auto& items) {
    split({4}, "FloatStorage")(items);
    items.push_back({"blocks.0.norm1.bias", {4}});
  });
  check_mentions(message, path, "two of its tensors stand for 'blocks.0.norm1.bias'");
  check_mentions(refusal(split({5}, "FloatStorage")), path, "'layers.0.attention.q_proj.bias'",
                 "[13] with those joined to it, the model needs [12]");
  check_mentions(refusal(split({4}, "DoubleStorage")), "differ in type or shape");
  check_mentions(refusal(split({4, 1}, "FloatStorage")), "differ in type or shape");
  check_mentions(refusal(split({}, "FloatStorage")), "differ in type or shape");
  std::vector<Item> items = sound;
  split({4}, "FloatStorage")(items);
  write_state_dict(path, items);
  CHECK(WeightsFile(path, model).notes().size() == 1);
}
