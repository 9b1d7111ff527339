// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/autograd/operations.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/random.h>
#include <sherd/models/vit.h>
#include <sherd/models/weights.h>
#include <sherd/runtime/io/safetensors.h>

#include <cmath>
#include <map>

#include "io_support.h"

using namespace sherd;

namespace {

ViTSettings small_vit() {
  ViTSettings s;
  s.image_height = s.image_width = 8;
  s.channels = 2;
  s.patch = 4;
  s.dim = 12;
  s.depth = 2;
  s.heads = 3;
  s.mlp_ratio = 2.0;
  s.classes = 5;
  return s;
}

std::int64_t count(const std::string& name, std::int64_t classes) {
  ViTSettings settings = vit_preset(name);
  settings.classes = classes;
  return VisionTransformer(settings).parameter_count();
}

}  // namespace

TEST_CASE("ViT: parameter counts of the published models") {
  CHECK(count("vit_large_patch16_224", 101) == 303'405'157);
  CHECK(count("vit_huge_patch14_224", 101) == 630'894'181);
  CHECK(count("vit_base_patch16_224", 1000) == 86'567'656);
  CHECK(count("vit_small_patch16_224", 1000) == 22'050'664);
  CHECK(count("vit_tiny_patch16_224", 1000) == 5'717'416);
}

TEST_CASE("ViT: the quick start's model has 139,018 parameters") {
  ViTSettings s;
  s.image_height = s.image_width = 28;
  s.channels = 1;
  s.patch = 7;
  s.dim = 64;
  s.depth = 4;
  s.heads = 4;
  s.mlp_ratio = 2.0;
  s.classes = 10;
  CHECK(VisionTransformer(s).parameter_count() == 139'018);
}

TEST_CASE("ViT: timm's names, shapes and decay groups") {
  VisionTransformer model(small_vit());
  std::map<std::string, const Parameter*> by_name;
  for (const Parameter* p : model.parameters()) by_name[p->name()] = p;
  CHECK(by_name.at("patch_embed.proj.weight")->shape() == Shape{12, 2, 4, 4});
  CHECK(by_name.at("pos_embed")->shape() == Shape{1, 5, 12});
  CHECK(by_name.at("blocks.1.attn.qkv.weight")->shape() == Shape{36, 12});
  CHECK(by_name.at("blocks.0.mlp.fc1.bias")->shape() == Shape{24});
  for (const auto& entry : by_name) {
    const std::string& name = entry.first;
    const Parameter* p = entry.second;
    const bool decays = p->shape().rank() > 1 && name != "pos_embed" && name != "cls_token";
    CHECK_MESSAGE(p->weight_decay() == decays, name);
  }
  CHECK(model.parameters().front()->name() == "cls_token");
  CHECK(model.parameters().back()->name() == "head.bias");
}

TEST_CASE("ViT: settings that cannot make a model") {
  ViTSettings s = small_vit();
  s.patch = 3;
  CHECK_THROWS_WITH_AS(VisionTransformer{s},
                       doctest::Contains("8 x 8 is not divisible by the patch size 3"), Error);
  s = small_vit();
  s.heads = 5;
  CHECK_THROWS_WITH_AS(VisionTransformer{s},
                       doctest::Contains("dim 12 is not divisible by 5 heads"), Error);
  s.head_dim = 7;
  CHECK_NOTHROW(VisionTransformer{s});
  s.depth = 0;
  CHECK_THROWS_WITH_AS(VisionTransformer{s}, doctest::Contains("depth"), Error);
  CHECK_THROWS_WITH_AS(vit_preset("vit_basse_patch16_224"),
                       doctest::Contains("did you mean 'vit_base_patch16_224'"), Error);
  Context context;
  VisionTransformer model(small_vit());
  model.initialize(context, DType::f32);
  CHECK_THROWS_WITH_AS(model(Variable(Tensor::zeros(context, {2, 2, 8, 4}, DType::f32))),
                       doctest::Contains("expected images [2, 2, 8, 8]"), Error);
}

TEST_CASE("ViT: initial weights are timm's, and depend on the seed and the name alone") {
  Context a({.seed = 7}), b({.threads = 1, .seed = 7}), other({.seed = 8});
  VisionTransformer first(small_vit()), second(small_vit()), third(small_vit());
  first.initialize(a, DType::f32);
  second.initialize(b, DType::f32);
  third.initialize(other, DType::f32);
  const auto same = [](const Parameter* x, const Parameter* y) {
    return x->data().to_vector<float>() == y->data().to_vector<float>();
  };
  int different = 0;
  for (std::size_t i = 0; i < first.parameters().size(); ++i) {
    CHECK(same(first.parameters()[i], second.parameters()[i]));
    different += same(first.parameters()[i], third.parameters()[i]) ? 0 : 1;
    // A shard filled by its own range has the whole tensor's bits.
    const Parameter* p = first.parameters()[i];
    const std::int64_t n = p->numel(), cut = n / 3;
    const Tensor tail = Tensor::empty(a, {n - cut}, DType::f32);
    initialize(tail, p->initializer(), a.seed(), p->name(), cut);
    const std::vector<float> whole = p->data().to_vector<float>();
    CHECK(tail.to_vector<float>() == std::vector<float>(whole.begin() + cut, whole.end()));
  }
  CHECK(different == 2 + 2 + 2 * 4 + 1);  // tokens, patch embedding, block weights, head weight
  double square = 0.0;
  const std::vector<float> fc1 = first.child("blocks")
                                     ->child("0")
                                     ->child("mlp")
                                     ->child("fc1")
                                     ->own_parameters()[0]
                                     .second->data()
                                     .to_vector<float>();
  for (const float w : fc1) square += static_cast<double>(w) * w;
  CHECK(std::sqrt(square / static_cast<double>(fc1.size())) == doctest::Approx(0.02).epsilon(0.15));
}

TEST_CASE("Module: hooks, replace_child and tied parameters") {
  struct Doubler : Module {
    Variable forward(const Variable& x) override { return scale(x, 2.0); }
  };
  struct Halver : Module {
    Variable forward(const Variable& x) override { return scale(x, 0.5); }
  };
  Context context;
  Sequential chain;
  chain.append("first", std::make_shared<Doubler>());
  chain.append("second", std::make_shared<Doubler>());
  const Tensor one = Tensor::from_host<double>(context, {1}, std::vector<double>{1.0});
  CHECK(chain(one).tensor().item() == 4.0);
  std::vector<std::string> calls;
  chain.assign_names();
  const int id = chain.child("second")->add_pre_forward_hook([&](Module& m, const Variable& x) {
    calls.push_back("before " + m.name());
    return scale(x, 10.0);
  });
  chain.child("first")->add_post_forward_hook([&](Module& m, const Variable& x) {
    calls.push_back("after " + m.name());
    return x;
  });
  CHECK(chain(one).tensor().item() == 40.0);
  CHECK(calls == std::vector<std::string>{"after first", "before second"});
  chain.child("second")->remove_hook(id);
  chain.replace_child("second", std::make_shared<Halver>());
  CHECK(chain(one).tensor().item() == 1.0);
  CHECK_THROWS_WITH_AS(chain.replace_child("third", std::make_shared<Halver>()),
                       doctest::Contains("'third'"), Error);

  struct Tied : Module {
    Tied() {
      const auto linear = std::make_shared<Linear>(3, 3, false);
      a = register_child("a", linear);
      register_parameter("b", linear->weight());
    }
    Variable forward(const Variable& x) override { return a(x); }
    Child a;
  };
  Tied tied;
  CHECK(tied.parameters().size() == 1);
  tied.initialize(context, DType::f32);
  CHECK(tied.parameters()[0]->name() == "b");
  CHECK(tied.parameter_count() == 9);
}

TEST_CASE("Module: a replaced child is the one that runs, in every layer of the ViT") {
  struct Zero : Module {
    Variable forward(const Variable& x) override { return scale(x, 0.0); }
  };
  Context context({.seed = 3});
  const Tensor images = Tensor::empty(context, {1, 2, 8, 8}, DType::f32);
  fill_normal(images, 0.0, 1.0, RandomStream(1, "test", "images"));
  const auto output = [&](const std::vector<std::string>& path) {
    VisionTransformer model(small_vit());
    model.initialize(context, DType::f32);
    Module* parent = &model;
    for (std::size_t i = 0; i + 1 < path.size(); ++i) parent = parent->child(path[i]).get();
    if (!path.empty()) parent->replace_child(path.back(), std::make_shared<Zero>());
    return model(images).tensor().to_vector<float>();
  };
  const auto plain = output({});
  CHECK(output({"norm"}) != plain);
  for (const std::string part : {"norm1", "norm2", "attn", "mlp"})
    CHECK(output({"blocks", "1", part}) != plain);
  CHECK(output({"blocks", "0", "attn", "proj"}) != plain);
  CHECK(output({"blocks", "0"}) != plain);

  VisionTransformer model(small_vit());
  model.set_training(false);
  model.replace_child("head", std::make_shared<Linear>(12, 7, true));
  CHECK(model.child("head")->name() == "head");
  CHECK_FALSE(model.child("head")->training());
  model.initialize(context, DType::f32);
  CHECK(model(images).shape() == Shape{1, 7});
  // A part initialised alone gets the values it gets within the model.
  VisionTransformer whole(small_vit()), parts(small_vit());
  whole.initialize(context, DType::f32);
  parts.child("head")->initialize(context, DType::f32);
  CHECK(parts.child("head")->parameters()[0]->name() == "head.weight");
  CHECK(parts.child("head")->parameters()[0]->data().to_vector<float>() ==
        whole.child("head")->parameters()[0]->data().to_vector<float>());
}

TEST_CASE("Module: a hook may remove itself; buffers have names") {
  struct Scaled : Module {
    explicit Scaled(Context& context) {
      register_buffer("factor", full(context, {1}, DType::f64, 2.0));
    }
    Variable forward(const Variable& x) override { return scale(x, buffers()[0].second.item()); }
  };
  Context context;
  Sequential chain;
  chain.append("scaled", std::make_shared<Scaled>(context));
  int calls = 0, id = 0;
  id = chain.add_pre_forward_hook([&, keep = std::string(100, 'x')](Module& m, const Variable& x) {
    m.remove_hook(id);
    calls += keep.size() == 100 ? 1 : 1000;
    return x;
  });
  const Tensor one = full(context, {1}, DType::f64, 1.0);
  CHECK(chain(one).tensor().item() == 2.0);
  CHECK(chain(one).tensor().item() == 2.0);
  CHECK(calls == 1);
  REQUIRE(chain.buffers().size() == 1);
  CHECK(chain.buffers()[0].first == "scaled.factor");
}

TEST_CASE("weights: round trip, and each way to be wrong") {
  const test::TempDirectory folder;
  const std::string path = folder.path("model.safetensors");
  Context context({.seed = 3});
  VisionTransformer model(small_vit());
  model.initialize(context, DType::f32);
  save_weights(model, path, {{"format", "pt"}});

  VisionTransformer again(small_vit());
  load_weights(again, context, DType::f64, path);
  for (std::size_t i = 0; i < model.parameters().size(); ++i) {
    const std::vector<float> saved = model.parameters()[i]->data().to_vector<float>();
    const std::vector<double> loaded = again.parameters()[i]->data().to_vector<double>();
    CHECK(std::equal(saved.begin(), saved.end(), loaded.begin(), loaded.end()));
  }

  ViTSettings deeper = small_vit();
  deeper.depth = 3;
  VisionTransformer bigger(deeper);
  CHECK_THROWS_WITH_AS(load_weights(bigger, context, DType::f32, path),
                       doctest::Contains("has no tensor 'blocks.2.norm1.weight'"), Error);
  ViTSettings fewer = small_vit();
  fewer.depth = 1;
  VisionTransformer smaller(fewer);
  CHECK_THROWS_WITH_AS(load_weights(smaller, context, DType::f32, path),
                       doctest::Contains("that the model lacks"), Error);
  ViTSettings wider = small_vit();
  wider.classes = 6;
  VisionTransformer other(wider);
  CHECK_THROWS_WITH_AS(
      load_weights(other, context, DType::f32, path),
      doctest::Contains("'head.weight' has shape [5, 12], the model needs [6, 12]"), Error);
}
