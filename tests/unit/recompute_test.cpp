// SPDX-License-Identifier: Apache-2.0
// Activation recomputation: the same bits with less memory, and what happens where a forward does
// not repeat itself.
#include <doctest/doctest.h>
#include <sherd/autograd/operations.h>
#include <sherd/autograd/recompute.h>
#include <sherd/autograd/tape.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/random.h>
#include <sherd/models/vit.h>

#include <cstring>
#include <map>

#include "recompute_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr Recompute kModes[] = {Recompute::none, Recompute::selective, Recompute::block};

// Everything random is on, nothing is divisible by much.
ViTSettings odd_vit() {
  return {.image_height = 6,
          .image_width = 9,
          .channels = 2,
          .patch = 3,
          .dim = 10,
          .depth = 3,
          .heads = 2,
          .mlp_ratio = 1.5,
          .classes = 5,
          .drop = 0.1,
          .drop_path = 0.3};
}

std::map<std::string, Bytes> gradients_of(const Module& model) {
  std::map<std::string, Bytes> all;
  for (const Parameter* parameter : model.parameters()) {
    if (parameter->grad().defined()) all[parameter->name()] = bytes_of(parameter->grad());
  }
  return all;
}

Tensor images_for(Context& context, const ViTSettings& s, std::int64_t batch, DType dtype,
                  std::uint64_t which = 0) {
  const Tensor images =
      Tensor::empty(context, {batch, s.channels, s.image_height, s.image_width}, dtype);
  fill_normal(images, 0.0, 1.0, RandomStream(9, "test", "images", which));
  return images;
}

Tensor labels_for(Context& context, std::int64_t batch) {
  const Tensor labels = Tensor::empty(context, {batch}, DType::i64, MemoryCategory::inputs);
  std::vector<std::int64_t> values;
  for (std::int64_t i = 0; i < batch; ++i) values.push_back(i % 4);
  if (!context.is_meta()) labels.copy_from_host(values.data(), values.size() * sizeof values[0]);
  return labels;
}

Variable loss_of(Module& model, const Tensor& images) {
  return cross_entropy(model(images), {labels_for(images.context(), images.dim(0)), {}, 0.1});
}

Tensor rows(Context& context, std::int64_t count = 3) {
  const Tensor x = Tensor::empty(context, {count, 4}, DType::f64);
  fill_normal(x, 0.0, 1.0, RandomStream(2, "test", "rows"));
  return x;
}

// Loss and gradients, the input's among them, of `f` with the probe recomputed or not.
std::map<std::string, Bytes> results(bool recomputed, Probe& probe,
                                     const std::function<Variable(const Variable&)>& f) {
  Context context({.threads = 1, .seed = 4});
  probe.initialize(context, DType::f64);
  probe.clear_gradients();
  probe.set_recompute(recomputed);
  Tape tape(context);
  const Variable x = tape.watch(rows(context));
  Variable loss;
  {
    const TapeScope recording(tape);
    loss = sum(f(x));
  }
  tape.backward(loss);
  std::map<std::string, Bytes> all = gradients_of(probe);
  all["loss"] = bytes_of(loss.tensor());
  all["input"] = bytes_of(tape.gradient(x));
  probe.clear_gradients();
  probe.weight->set_data(Tensor::zeros(context, {4, 4}, DType::f64));
  return all;
}

// What a step took.
struct Step {
  MemoryBreakdown peaks{}, at_peak{};
  std::int64_t peak = 0, products = 0, attention = 0;
  bool operator==(const Step&) const = default;
};

void check_same(const std::map<std::string, Bytes>& a, const std::map<std::string, Bytes>& b) {
  REQUIRE(a.size() == b.size());
  for (const auto& entry : a) {
    const std::string& name = entry.first;
    CAPTURE(name);
    CHECK(b.at(name) == entry.second);
  }
}

}  // namespace

TEST_CASE("recompute: a ViT has the bits that it has without, over two tapes alive at once") {
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const int threads : {1, 2}) {
      std::map<std::string, Bytes> expected;
      for (const Recompute mode : kModes) {
        const std::string name(name_of(mode));
        CAPTURE(name);
        Context context({.threads = threads, .seed = 4});
        VisionTransformer model(odd_vit());
        model.initialize(context, dtype);
        model.set_recompute(mode);
        // Two micro-batches at their own random positions; backward runs at a third.
        Tape first(context), second(context);
        Variable a, b;
        {
          const TapeScope recording(first);
          context.set_random_position({.step = 7, .first_sample = 0});
          a = loss_of(model, images_for(context, odd_vit(), 4, dtype, 0));
        }
        {
          const TapeScope recording(second);
          context.set_random_position({.step = 7, .first_sample = 4});
          b = loss_of(model, images_for(context, odd_vit(), 5, dtype, 1));
        }
        context.set_random_position({.step = 8, .first_sample = 0});
        first.backward(a);
        second.backward(b);
        CHECK(context.random_position().step == 8);
        CHECK(context.tape() == nullptr);
        std::map<std::string, Bytes> now = gradients_of(model);
        CHECK(now.size() == model.parameters().size());
        now["first loss"] = bytes_of(a.tensor());
        now["second loss"] = bytes_of(b.tensor());
        if (mode == Recompute::none) expected = now;
        check_same(expected, now);
      }
    }
  }
}

TEST_CASE("recompute: with parts of a ViT frozen") {
  for (const char* frozen : {"attn", "mlp.fc2", "mlp", "norm", "blocks.1", "patch_embed"}) {
    CAPTURE(frozen);
    std::map<std::string, Bytes> expected;
    for (const Recompute mode : kModes) {
      Context context({.threads = 1, .seed = 4});
      VisionTransformer model(odd_vit());
      model.initialize(context, DType::f32);
      model.set_recompute(mode);
      for (Parameter* parameter : model.parameters()) {
        const std::string& name = parameter->name();
        parameter->set_requires_grad(name.find(frozen) == std::string::npos);
      }
      Tape tape(context);
      const TapeScope recording(tape);
      tape.backward(loss_of(model, images_for(context, odd_vit(), 4, DType::f32)));
      const std::map<std::string, Bytes> now = gradients_of(model);
      CHECK(!now.empty());
      if (mode == Recompute::none) expected = now;
      check_same(expected, now);
    }
  }
}

TEST_CASE("recompute: a module called twice, and a parameter used inside and outside") {
  Probe probe(two_layers);
  const auto twice = [&](const Variable& x) { return probe(scale(probe(x), 0.5)); };
  const auto plain = results(false, probe, twice);
  CHECK(std::exchange(probe.runs, 0) == 2);
  check_same(plain, results(true, probe, twice));
  CHECK(probe.runs == 4);
  const auto tied = [&](const Variable& x) {
    const Variable y = matmul(probe(x), probe.weight->variable());
    return add(probe(linear(y, probe.weight->variable(), {})), x);
  };
  check_same(results(false, probe, tied), results(true, probe, tied));
  CHECK(plain != results(false, probe, tied));
}

TEST_CASE("recompute: an input without a gradient, and one that the module hands on") {
  Probe probe(two_layers);
  const auto constant = [&](const Variable& x) { return add(probe(x.detach()), x); };
  check_same(results(false, probe, constant), results(true, probe, constant));
  // A product that saves its input, through a view of it.
  probe.function = [](Probe& p, const Variable& x) { return matmul(x, p.weight->variable()); };
  const auto wide = [&](const Variable& x) {
    const Variable row = reshape(linear(x, probe.weight->variable(), {}), {12});
    return probe(reshape(add(row, scale(row, 0.3)), {3, 4}));
  };
  check_same(results(false, probe, wide), results(true, probe, wide));
}

TEST_CASE("recompute: what no gradient asks for does not run again") {
  Context context({.threads = 1, .seed = 4});
  Probe probe(two_layers);
  probe.initialize(context, DType::f64);
  probe.set_recompute(true);
  const auto run = [&](const std::function<Variable(const Variable&)>& f) {
    probe.runs = 0;
    Tape tape(context);
    const Variable x = tape.watch(rows(context));
    const TapeScope recording(tape);
    tape.backward(sum(f(x)));
    return probe.runs;
  };
  CHECK(run([&](const Variable& x) { return probe(x); }) == 2);
  CHECK(run([&](const Variable& x) { return probe(x), x; }) == 1);
  CHECK(run([&](const Variable& x) { return add(probe(x).detach(), x); }) == 1);
  const auto without_tape = [&](const Variable& x) {
    const NoGradScope none(context);
    return probe(x);
  };
  CHECK(run([&](const Variable& x) { return add(without_tape(x), x); }) == 1);
  probe.weight->set_requires_grad(false);
  CHECK(run([&](const Variable& x) { return add(probe(x.detach()), x); }) == 1);
  CHECK(run([&](const Variable& x) { return probe(x); }) == 2);  // the activation's input
  probe.runs = 0;
  probe(rows(context));
  CHECK(probe.runs == 1);
  CHECK(context.ledger().live(MemoryCategory::activations) == 0);
}

TEST_CASE("recompute: hooks of the module run once, those below again; the outermost flag wins") {
  Context context({.threads = 1, .seed = 4});
  const auto inner = std::make_shared<Probe>(two_layers);
  Sequential outer;
  outer.append("inner", inner);
  outer.assign_names("outer");
  outer.initialize(context, DType::f64);
  inner->set_recompute(true);
  int own = 0, below = 0, backward = 0;
  const auto count = [](int& n) { return [&n](Module&, const Variable& x) { return ++n, x; }; };
  outer.add_pre_forward_hook(count(own));
  outer.add_post_forward_hook(count(own));
  inner->add_pre_forward_hook(count(below));
  inner->add_post_forward_hook([&](Module& module, const Variable& x) {
    ++below;
    x.context().tape()->on_backward("hook of " + module.name(), [&] { ++backward; });
    return x;
  });
  for (const bool both : {false, true}) {
    own = below = backward = inner->runs = 0;
    outer.set_recompute(both);
    Tape tape(context);
    const Variable x = tape.watch(rows(context));
    const TapeScope recording(tape);
    tape.backward(sum(outer(x)));
    CHECK(inner->runs == 2);
    CHECK(own == 2);
    CHECK(below == (both ? 4 : 2));
    CHECK(backward == 1);
  }
}

TEST_CASE("recompute: a forward that does something else the second time is an error") {
  const auto message = [](const Probe::Function& function) -> std::string {
    Context context({.threads = 1, .seed = 4});
    Probe probe(function);
    probe.initialize(context, DType::f64);
    probe.set_recompute(true);
    Tape tape(context);
    const Variable x = tape.watch(rows(context));
    const TapeScope recording(tape);
    const Variable loss = sum(probe(x));
    std::string text;
    try {
      tape.backward(loss);
    } catch (const Error& error) {
      text = error.what();
    }
    CHECK(context.tape() == &tape);
    probe.weight->set_data(Tensor::zeros(context, {4, 4}, DType::f64));
    return text;
  };
  const auto more = message([](Probe& p, const Variable& x) {
    const Variable y = activate(two_layers(p, x), Activation::relu);
    return p.runs == 1 ? y : activate(y, Activation::relu);
  });
  CHECK(more ==
        "backward of activation: running the forward of probe again: it saved 6 tensors for "
        "backward, and then more; what runs again has to do the same both times: depend on its "
        "input, its parameters and the random position alone, and change nothing");
  const auto fewer = message([](Probe& p, const Variable& x) {
    return p.runs == 1 ? two_layers(p, x) : linear(x, p.weight->variable(), {});
  });
  CHECK(fewer.find("again: it recorded 3 operations and saved 5 tensors for backward, and then 1 "
                   "and 2; what runs again") != std::string::npos);
  const auto shape = message([](Probe& p, const Variable& x) {
    return activate(p.runs == 1 ? x : reshape(x, {4, 3}), Activation::relu);
  });
  CHECK(shape.find("again: tensor 0 of those that it saved for backward was a f64 [3, 4], and then "
                   "a f64 [4, 3]; what runs again") != std::string::npos);
  const auto one_less = message([](Probe& p, const Variable& x) {
    const Variable y = activate(x, Activation::relu);
    return p.runs == 1 ? activate(y, Activation::relu) : scale(y, 2.0);
  });
  CHECK(one_less.find("again: it recorded 2 operations and saved 2 tensors for backward, and then "
                      "2 and 1; what runs again") != std::string::npos);
  // Dropout saves nothing.
  const auto unsaved = message([](Probe& p, const Variable& x) {
    return activate(dropout(x, p.runs == 1 ? 0.5 : 0.0, "layer"), Activation::relu);
  });
  CHECK(unsaved.find("again: it recorded 2 operations and saved 1 tensors for backward, and then 1 "
                     "and 1; what runs again") != std::string::npos);
}

TEST_CASE("recompute: the mode must not change before backward") {
  Context context({.threads = 1, .seed = 4});
  VisionTransformer model(odd_vit());
  model.initialize(context, DType::f32);
  model.set_recompute(Recompute::block);
  Tape tape(context);
  const TapeScope recording(tape);
  const Variable loss = loss_of(model, images_for(context, odd_vit(), 2, DType::f32));
  model.set_training(false);
  CHECK_THROWS_WITH_AS(tape.backward(loss),
                       doctest::Contains("running the forward of blocks.2 again: "
                                         "set_training(false) came between forward and backward"),
                       Error);
}

TEST_CASE("recompute: what was written in place is found, the input and values inside alike") {
  Context context({.threads = 1, .seed = 4});
  Probe probe(two_layers);
  probe.initialize(context, DType::f64);
  probe.set_recompute(true);
  const Tensor input = rows(context);
  {
    Tape tape(context);
    const Variable x = tape.watch(input);
    const TapeScope recording(tape);
    const Variable loss = sum(probe(x));
    fill(input, 0.0);
    CHECK_THROWS_WITH_AS(tape.backward(loss),
                         doctest::Contains("f64 [3, 4] saved for backward was written in place"),
                         Error);
  }
  probe.function = [](Probe& p, const Variable& x) {
    const Variable hidden = linear(x, p.weight->variable(), {});
    const Variable y = activate(hidden, Activation::gelu_erf);
    fill(hidden.tensor(), 0.0);
    return y;
  };
  {
    Tape tape(context);
    const Variable x = tape.watch(input);
    const TapeScope recording(tape);
    CHECK_THROWS_WITH_AS(tape.backward(sum(probe(x))),
                         doctest::Contains("f64 [3, 4] saved for backward was written in place"),
                         Error);
  }
  // A parameter is kept, so its change is found as without recomputation.
  probe.function = two_layers;
  Tape tape(context);
  const Variable x = tape.watch(input);
  const TapeScope recording(tape);
  const Variable loss = sum(probe(x));
  fill(probe.weight->data(), 1.0);
  CHECK_THROWS_WITH_AS(tape.backward(loss),
                       doctest::Contains("f64 [4, 4] saved for backward was written in place"),
                       Error);
}

TEST_CASE("recompute: after an exception in the second run everything can be used") {
  Context context({.threads = 1, .seed = 4});
  Probe probe([](Probe& p, const Variable& x) {
    const Variable y = two_layers(p, x);
    SHERD_CHECK(p.runs != 2, "out of luck");
    return activate(y, Activation::relu);
  });
  probe.initialize(context, DType::f64);
  probe.set_recompute(true);
  context.set_random_position({.step = 5, .first_sample = 6});
  std::int64_t before = 0;
  {
    Tape tape(context);
    const Variable x = tape.watch(rows(context));
    Variable loss;
    {
      const TapeScope recording(tape);
      loss = sum(probe(x));
    }
    before = context.ledger().live_total();
    context.set_random_position({.step = 6, .first_sample = 0});
    CHECK_THROWS_WITH_AS(tape.backward(loss),
                         "backward of activation: running the forward of probe again: out of luck",
                         Error);
    CHECK(context.tape() == nullptr);
    CHECK(context.random_position().step == 6);
    // Half-made values are not held, but for the loss's gradient nothing is left.
    CHECK(context.ledger().live_total() <= before);
  }
  CHECK(context.ledger().live(MemoryCategory::activations) == 0);
  Tape tape(context);
  const Variable x = tape.watch(rows(context));
  const TapeScope recording(tape);
  tape.backward(sum(probe(x)));
  CHECK(probe.runs == 4);
  CHECK(tape.gradient(x).defined());
  CHECK(probe.weight->grad().defined());
}

TEST_CASE("recompute: what is kept between forward and backward is what models/vit.h says") {
  const std::int64_t batch = 8, tokens = batch * even_vit(1).tokens(), dim = 32, heads = 2, r = 4;
  const auto kept = [&](Device device, DType dtype, Recompute mode, std::int64_t depth) {
    Context context({.device = device, .threads = 2});
    VisionTransformer model(even_vit(depth));
    model.initialize(context, dtype);
    model.set_recompute(mode);
    const Tensor images = images_for(context, even_vit(depth), batch, dtype);
    Tape tape(context);
    const TapeScope recording(tape);
    const Variable loss = loss_of(model, images);
    return context.ledger().live(MemoryCategory::activations);
  };
  const std::map<Recompute, std::int64_t> elements{{Recompute::none, (8 + 2 * r) * dim + heads + 4},
                                                   {Recompute::selective, 7 * dim + heads + 2},
                                                   {Recompute::block, dim}};
  for (const Device device : {Device::cpu, Device::meta}) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      for (const auto& entry : elements) {
        const Recompute mode = entry.first;
        CAPTURE(name_of(mode));
        const auto size = static_cast<std::int64_t>(size_of(dtype));
        CHECK(kept(device, dtype, mode, 4) - kept(device, dtype, mode, 2) ==
              2 * tokens * entry.second * size);
      }
      // What is around the blocks does not depend on the mode.
      const auto around = [&](Recompute mode) {
        return 2 * kept(device, dtype, mode, 1) - kept(device, dtype, mode, 2);
      };
      CHECK(around(Recompute::block) == around(Recompute::none));
      CHECK(around(Recompute::selective) == around(Recompute::none));
    }
  }
}

TEST_CASE("recompute: a step on meta has the peak and the work of the real one") {
  const std::int64_t batch = 4;
  const auto run = [&](Device device, const ViTSettings& s, Recompute mode, bool frozen) {
    Context context({.device = device, .threads = 2, .seed = 3});
    VisionTransformer model(s);
    model.initialize(context, DType::f32);
    model.set_recompute(mode);
    for (Parameter* parameter : model.parameters()) {
      const bool fc2 = parameter->name().find("fc2") != std::string::npos;
      parameter->set_requires_grad(!frozen || !fc2);
    }
    const Tensor images = images_for(context, s, batch, DType::f32);
    context.ledger().reset_peak();
    const WorkCounters start = context.work();
    Tape tape(context);
    const TapeScope recording(tape);
    tape.backward(loss_of(model, images));
    return Step{context.ledger().peaks(), context.ledger().at_peak(), context.ledger().peak_total(),
                context.work().matmul_flops - start.matmul_flops,
                context.work().attention_flops - start.attention_flops};
  };
  ViTSettings big = even_vit(4);
  big.drop = 0.1;
  big.drop_path = 0.2;
  for (const ViTSettings& s : {odd_vit(), big}) {
    for (const bool frozen : {false, true}) {
      std::map<Recompute, Step> steps;
      for (const Recompute mode : kModes) {
        CAPTURE(name_of(mode));
        steps[mode] = run(Device::cpu, s, mode, frozen);
        CHECK(run(Device::meta, s, mode, frozen) == steps[mode]);
      }
      // A product of one feature vector with another, for every token and block. The last one of a
      // block is not computed again, whether its node saves one tensor or two.
      const std::int64_t product = 2 * batch * s.tokens() * s.depth * s.dim;
      const std::int64_t none = steps[Recompute::none].products;
      CHECK(steps[Recompute::selective].products - none == product * s.hidden());
      CHECK(steps[Recompute::block].products - none == product * (4 * s.dim + s.hidden()));
      CHECK(steps[Recompute::selective].attention == steps[Recompute::none].attention);
      // Attention's backward computes the products of its forward again, and four more.
      CHECK(steps[Recompute::block].attention > steps[Recompute::none].attention);
      if (s.depth < 4) continue;
      CHECK(steps[Recompute::selective].peak < steps[Recompute::none].peak);
      CHECK(steps[Recompute::block].peak < steps[Recompute::selective].peak);
    }
  }
}

TEST_CASE("recompute: the peak of one module is not above what it is without") {
  const auto peak = [](bool recomputed) {
    Context context({.device = Device::meta});
    VisionTransformer model(even_vit(1));
    model.initialize(context, DType::f32);
    model.set_recompute(recomputed ? Recompute::block : Recompute::none);
    const Tensor images = images_for(context, even_vit(1), 8, DType::f32);
    context.ledger().reset_peak();
    Tape tape(context);
    const TapeScope recording(tape);
    tape.backward(loss_of(model, images));
    return context.ledger().peak_total();
  };
  CHECK(peak(true) <= peak(false));
}

TEST_CASE("recompute: in backward memory falls node by node, and the input goes when it can") {
  constexpr std::int64_t kRows = 64;  // of 4 numbers: 2,048 bytes
  constexpr std::int64_t kTensor = kRows * 4 * 8;
  for (const bool recomputed : {false, true}) {
    Context context({.threads = 1, .seed = 4});
    std::vector<std::int64_t> live;
    Probe probe([&](Probe&, const Variable& x) {
      Variable y = scale(x, 1.0);  // so that no node saves the input
      for (int i = 0; i < 4; ++i) {
        context.tape()->on_backward("memory",
                                    [&] { live.push_back(context.ledger().live_total()); });
        y = activate(y, Activation::gelu_erf);
      }
      return y;
    });
    probe.initialize(context, DType::f64);
    probe.set_recompute(recomputed);
    Tape tape(context);
    Variable loss;
    std::int64_t base = 0;
    {
      const TapeScope recording(tape);
      base = context.ledger().live_total();
      loss = sum(probe(scale(tape.watch(rows(context, kRows)), 2.0)));
      const std::int64_t forward = context.ledger().live_total() - base;
      // The loss; the module's input, or what its four nodes saved.
      CHECK(forward == 512 + (recomputed ? 1 : 4) * kTensor);
    }
    tape.backward(loss);
    // Four, three, two, one: after each node the gradient of its input, and what the others saved.
    REQUIRE(live.size() == 4);
    for (std::size_t i = 0; i < 4; ++i) {
      CAPTURE(i);
      CHECK(live[i] - base == 512 + static_cast<std::int64_t>(4 - i) * kTensor);
    }
  }
}

TEST_CASE("recompute: one handle holds the input, and lets go of it when it has run again") {
  Context context({.threads = 1, .seed = 4});
  long after_rerun = 0;
  Tensor input = rows(context);
  Probe probe([&](Probe& p, const Variable& x) {
    Variable y = add(x, two_layers(p, x));  // its first product saves the input
    if (p.runs == 1) {
      context.tape()->on_backward("input",
                                  [&] { after_rerun = input.shared_storage().use_count(); });
    }
    return activate(y, Activation::relu);
  });
  probe.initialize(context, DType::f64);
  probe.set_recompute(true);
  Tape tape(context);
  Variable loss;
  {
    const TapeScope recording(tape);
    loss = sum(probe(tape.watch(input)));
  }
  CHECK(input.shared_storage().use_count() == 2);
  tape.backward(loss);
  CHECK(probe.runs == 2);
  CHECK(after_rerun == 2);  // the product's
  CHECK(input.shared_storage().use_count() == 1);
}

TEST_CASE("recompute: the second run holds nothing of nodes that no gradient reached") {
  Context context({.threads = 1, .seed = 4});
  std::int64_t before = 0, after = 0;
  Probe probe([&](Probe& p, const Variable& x) {
    const Variable y = two_layers(p, x);
    before = context.ledger().live_total();
    two_layers(p, y);
    after = context.ledger().live_total();
    if (p.runs == 1) CHECK(after == before);
    return y;
  });
  probe.initialize(context, DType::f64);
  probe.set_recompute(true);
  Tape tape(context);
  const Variable x = tape.watch(rows(context));
  const TapeScope recording(tape);
  tape.backward(sum(probe(x)));
  CHECK(probe.runs == 2);
  CHECK(after == before);
}

TEST_CASE("recompute: names, and blocks that were replaced") {
  for (const Recompute mode : kModes) CHECK(recompute_from_name(name_of(mode)) == mode);
  CHECK_THROWS_WITH_AS(recompute_from_name("blok"),
                       "unknown recomputation 'blok'; did you mean 'block'?", Error);
  VisionTransformer model(odd_vit());
  model.set_recompute(Recompute::block);
  model.child("blocks")->replace_child("1", std::make_shared<Probe>(two_layers));
  CHECK(model.child("blocks")->child("1")->recomputes());
  CHECK_THROWS_WITH_AS(model.set_recompute(Recompute::selective),
                       doctest::Contains("module 'blocks.1' is no ViTBlock"), Error);
  model.set_recompute(Recompute::none);
  CHECK_FALSE(model.child("blocks")->child("1")->recomputes());
}
