// SPDX-License-Identifier: Apache-2.0
// Inputs of recomputed modules that wait in the host's memory: the same bits, and what both ledgers
// count.
#include <doctest/doctest.h>
#include <sherd/autograd/operations.h>
#include <sherd/autograd/recompute.h>
#include <sherd/autograd/tape.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/random.h>
#include <sherd/models/vit.h>

#include <map>

#include "recompute_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr auto kActivations = MemoryCategory::activations;

struct Mode {
  Recompute recompute;
  bool offload;
};
constexpr Mode kModes[] = {{Recompute::none, false},
                           {Recompute::selective, false},
                           {Recompute::selective, true},
                           {Recompute::block, false},
                           {Recompute::block, true}};

struct Ledgers {
  std::int64_t kept = 0, peak = 0;  // of activations on the device, after forward and at most
  std::int64_t host_kept = 0, host_peak = 0, host_end = 0;
  std::vector<MemoryBreakdown> all;
  bool operator==(const Ledgers&) const = default;
};

ViTSettings odd_vit() {
  return {.image_height = 6,
          .image_width = 9,
          .channels = 2,
          .patch = 3,
          .dim = 10,
          .depth = 4,
          .heads = 2,
          .mlp_ratio = 1.5,
          .classes = 5,
          .drop = 0.1,
          .drop_path = 0.3};
}

constexpr std::int64_t kBatch = 8, kInput = kBatch * 16 * 32 * 4;

void add_gradients(const Module& model, std::map<std::string, Bytes>& all) {
  for (const Parameter* parameter : model.parameters()) {
    if (parameter->grad().defined()) all[parameter->name()] = bytes_of(parameter->grad());
  }
}

Variable loss_of(Module& model, Context& context, const ViTSettings& s, std::int64_t batch,
                 DType dtype, std::uint64_t which = 0) {
  const Tensor images = Tensor::empty(context, {batch, s.channels, s.image_height, s.image_width},
                                      dtype, MemoryCategory::inputs);
  fill_normal(images, 0.0, 1.0, RandomStream(9, "test", "images", which));
  const Tensor labels = Tensor::empty(context, {batch}, DType::i64, MemoryCategory::inputs);
  std::vector<std::int64_t> values;
  for (std::int64_t i = 0; i < batch; ++i) values.push_back(i % 4);
  if (!context.is_meta()) labels.copy_from_host(values.data(), values.size() * sizeof values[0]);
  return cross_entropy(model(images), {labels, {}, 0.1});
}

Tensor rows(Context& context, std::int64_t count = 1024) {
  const Tensor x = Tensor::empty(context, {count, 4}, DType::f64);
  fill_normal(x, 0.0, 1.0, RandomStream(2, "test", "rows"));
  return x;
}

// Loss and gradients, the input's among them, of `f` with the probe recomputed or not.
std::map<std::string, Bytes> results(bool offload, Probe& probe,
                                     const std::function<Variable(const Variable&)>& f) {
  Context context({.threads = 1, .seed = 4});
  probe.initialize(context, DType::f64);
  probe.set_recompute(offload, offload);
  std::map<std::string, Bytes> all;
  {
    Tape tape(context);
    const Variable x = tape.watch(rows(context, 3));
    Variable loss;
    {
      const TapeScope recording(tape);
      loss = sum(f(x));
    }
    CHECK((context.host_ledger().live_total() > 0) == offload);
    tape.backward(loss);
    CHECK(context.host_ledger().live_total() == 0);
    add_gradients(probe, all);
    all["loss"] = bytes_of(loss.tensor());
    all["input"] = bytes_of(tape.gradient(x));
  }
  probe.clear_gradients();
  probe.weight->set_data(Tensor::zeros(context, {4, 4}, DType::f64));
  return all;
}

}  // namespace

TEST_CASE("recompute, offload: a ViT has the bits that it has without, over two tapes at once") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int threads : {1, 2}) {
      std::map<std::string, Bytes> expected;
      for (const Mode& mode : kModes) {
        CAPTURE(name_of(mode.recompute));
        CAPTURE(mode.offload);
        Context context({.threads = threads, .seed = 4});
        VisionTransformer model(odd_vit());
        model.initialize(context, dtype);
        model.set_recompute(mode.recompute, mode.offload);
        // Micro-batches at their own random positions, whose gradients add up.
        std::map<std::string, Bytes> now;
        for (const std::uint64_t micro : {0, 1}) {
          Tape first(context), second(context);
          Variable a, b;
          {
            const TapeScope recording(first);
            context.set_random_position({.step = micro, .first_sample = 0});
            a = loss_of(model, context, odd_vit(), 4, dtype, 2 * micro);
          }
          {
            const TapeScope recording(second);
            context.set_random_position({.step = micro, .first_sample = 4});
            b = loss_of(model, context, odd_vit(), 5, dtype, 2 * micro + 1);
          }
          CHECK((context.host_ledger().live(kActivations) > 0) == mode.offload);
          first.backward(a);
          second.backward(b);
          now["first loss " + std::to_string(micro)] = bytes_of(a.tensor());
          now["second loss " + std::to_string(micro)] = bytes_of(b.tensor());
        }
        CHECK(context.host_ledger().live_total() == 0);
        add_gradients(model, now);
        CHECK(now.size() == model.parameters().size() + 4);
        if (mode.recompute == Recompute::none) expected = now;
        CHECK(now == expected);
      }
    }
  }
}

TEST_CASE(
    "recompute, offload: inputs leave the device, come back in pairs, and are all on the host") {
  const auto step = [](Device device, Mode mode, std::int64_t depth) {
    Context context({.device = device, .threads = 2});
    VisionTransformer model(even_vit(depth));
    model.initialize(context, DType::f32);
    model.set_recompute(mode.recompute, mode.offload);
    Tape tape(context);
    const TapeScope recording(tape);
    const Variable loss = loss_of(model, context, even_vit(depth), kBatch, DType::f32);
    Ledgers ledgers;
    ledgers.kept = context.ledger().live(kActivations);
    ledgers.host_kept = context.host_ledger().live_total();
    tape.backward(loss);
    ledgers.peak = context.ledger().peaks()[static_cast<std::size_t>(kActivations)];
    ledgers.host_peak = context.host_ledger().peak_total();
    ledgers.host_end = context.host_ledger().live_total();
    CHECK(context.host_ledger().peaks()[static_cast<std::size_t>(kActivations)] ==
          ledgers.host_peak);
    ledgers.all = {context.ledger().peaks(), context.ledger().at_peak(),
                   context.host_ledger().peaks()};
    return ledgers;
  };
  for (const Recompute recompute : {Recompute::selective, Recompute::block}) {
    CAPTURE(name_of(recompute));
    for (const std::int64_t depth : {1, 2, 3, 6}) {
      CAPTURE(depth);
      const Ledgers without = step(Device::cpu, {recompute, false}, depth);
      const Ledgers with = step(Device::cpu, {recompute, true}, depth);
      CHECK(without.kept - with.kept == depth * kInput);
      CHECK(without.host_peak == 0);
      CHECK(with.host_kept == depth * kInput);
      CHECK(with.host_peak == depth * kInput);
      CHECK(with.host_end == 0);
      // The peak is in the backward of the last block, with its input and the one before.
      CHECK(without.peak - with.peak == std::max<std::int64_t>(depth - 2, 0) * kInput);
      CHECK(step(Device::meta, {recompute, true}, depth) == with);
      CHECK(step(Device::meta, {recompute, false}, depth) == without);
    }
  }
}

TEST_CASE("recompute, offload: the input that is needed next comes back meanwhile, no more") {
  Context context({.threads = 1, .seed = 4});
  std::vector<std::int64_t> device, host;
  bool backward = false;
  Probe probe([&](Probe& p, const Variable& x) {
    if (backward) {
      host.push_back(context.host_ledger().live_total());
      device.push_back(context.ledger().live(kActivations));
    }
    return two_layers(p, x);
  });
  probe.initialize(context, DType::f64);
  probe.set_recompute(true, true);
  constexpr std::int64_t kRows = 1024 * 4 * 8;
  Tape tape(context);
  Variable loss;
  {
    const TapeScope recording(tape);
    Variable y = scale(tape.watch(rows(context)), 0.5);
    for (int i = 0; i < 4; ++i) y = probe(y);
    loss = sum(y);
  }
  CHECK(context.host_ledger().live_total() == 4 * kRows);
  CHECK(context.ledger().live(kActivations) == 512);  // the loss
  backward = true;
  tape.backward(loss);
  CHECK(host == std::vector<std::int64_t>{2 * kRows, kRows, 0, 0});
  // Beside its input and the next: the gradient that has come so far.
  REQUIRE(device.size() == 4);
  CHECK(device[1] == device[2]);
  CHECK(device[2] == device[3] + kRows);
}

TEST_CASE("recompute, offload: one storage as the input of two modules, through views as well") {
  Probe probe(two_layers);
  const auto check = [&](const std::function<Variable(const Variable&)>& f) {
    const auto expected = results(false, probe, f);
    CHECK(results(true, probe, f) == expected);
  };
  check([&](const Variable& x) {
    const Variable y = scale(x, 0.5);
    return add(add(probe(y), probe(y)), y);
  });
  check([&](const Variable& x) {
    const Variable y = scale(x, 0.5);
    return add(y, probe(add(y, probe(y))));
  });
  // Another view of it, and a node outside that keeps it.
  check([&](const Variable& x) {
    const Variable y = scale(x, 0.5);
    const Variable z = activate(y, Activation::gelu_erf);
    return add(probe(reshape(reshape(y, {12}), {3, 4})), add(probe(y), z));
  });
  check([&](const Variable& x) { return add(probe(scale(x.detach(), 2.0)), x); });
}

TEST_CASE("recompute, offload: a view comes back with its strides") {
  Context context({.threads = 2});
  const Tensor whole = rows(context, 6);
  const Tensor view = whole.slice(0, 1, 5).permute({1, 0});
  OffloadedTensor away(view);
  OffloadedTensor held(whole);
  const Bytes expected = bytes_of(clone(view));
  const std::int64_t live = context.ledger().live_total();
  CHECK(held.get().shared_storage() == whole.shared_storage());
  CHECK(context.ledger().live_total() == live);
  Tensor gone = clone(whole);
  OffloadedTensor copy(gone.slice(0, 1, 5).permute({1, 0}));
  gone = {};
  const Tensor back = copy.get();
  CHECK(back.strides() == view.strides());
  CHECK(back.shape() == view.shape());
  CHECK_FALSE(back.is_contiguous());
  CHECK(bytes_of(clone(back)) == expected);
  CHECK(away.get().shared_storage() == whole.shared_storage());
}

TEST_CASE("recompute, offload: what is no activation stays where it is") {
  Context context({.threads = 1, .seed = 4});
  Probe probe(two_layers);
  probe.initialize(context, DType::f64);
  probe.set_recompute(true, true);
  std::vector<double> values(12, 0.5);
  int freed = 0;
  const Tensor images = Tensor::from_host(context, {3, 4}, std::span<const double>(values));
  for (const bool external : {false, true}) {
    Tape tape(context);
    const TapeScope recording(tape);
    Tensor x = external
                   ? Tensor::from_blob(context, values.data(), {3, 4}, DType::f64, [&] { ++freed; })
                   : images;
    const Variable loss = sum(probe(x));
    x = {};
    CHECK(context.host_ledger().live_total() == 0);
    CHECK(freed == 0);
    tape.backward(loss);
  }
  CHECK(freed == 1);
  CHECK(probe.runs == 4);
  // Nor what nobody makes again.
  probe.weight->set_requires_grad(false);
  Tape tape(context);
  const TapeScope recording(tape);
  probe(rows(context));
  CHECK(context.host_ledger().live_total() == 0);
  CHECK(context.host_ledger().peak_total() == 0);
}

TEST_CASE("recompute, offload: an input that was written in place is found, even when it is gone") {
  for (const bool gone : {false, true}) {
    for (const bool offload : {false, true}) {
      CAPTURE(gone);
      CAPTURE(offload);
      Context context({.threads = 1, .seed = 4});
      Probe probe(two_layers);
      probe.initialize(context, DType::f64);
      probe.set_recompute(true, offload);
      Tensor input = rows(context, 3);
      Tape tape(context);
      Variable loss;
      {
        const TapeScope recording(tape);
        loss = sum(probe(input));
      }
      // Not in the middle of the copy out, which is over when a later one has come back.
      OffloadedTensor later(rows(context));
      later.get();
      fill(input, 0.0);
      if (gone) input = {};
      CHECK_THROWS_WITH_AS(
          tape.backward(loss),
          "backward of linear: a f64 [3, 4] saved for backward was written in place since "
          "(version 2, saved at 1); write to a copy, or after backward",
          Error);
      CHECK(probe.runs == 1);
    }
  }
}

TEST_CASE("recompute, offload: after an exception in either run everything can be used") {
  for (const int failing : {1, 2, 3}) {
    CAPTURE(failing);
    Context context({.threads = 1, .seed = 4});
    int runs = 0;
    Probe probe([&](Probe& p, const Variable& x) {
      const Variable y = two_layers(p, x);
      SHERD_CHECK(++runs != failing, "out of luck");
      return activate(y, Activation::relu);
    });
    probe.initialize(context, DType::f64);
    probe.set_recompute(true, true);
    const auto step = [&] {
      Tape tape(context);
      const Variable x = tape.watch(rows(context));
      Variable loss;
      {
        const TapeScope recording(tape);
        loss = sum(probe(probe(scale(x, 0.5))));
      }
      tape.backward(loss);
      return bytes_of(tape.gradient(x));
    };
    CHECK_THROWS_WITH_AS(step(), doctest::Contains("out of luck"), Error);
    CHECK(context.tape() == nullptr);
    CHECK(context.ledger().live(kActivations) == 0);
    CHECK(context.host_ledger().live_total() == 0);
    probe.clear_gradients();
    const Bytes once = step();
    probe.set_recompute(false);
    CHECK(step() == once);
  }
}

TEST_CASE("recompute, offload: a tape that never runs backward gives everything back") {
  Context context({.threads = 1, .seed = 4});
  VisionTransformer model(even_vit(3));
  model.initialize(context, DType::f32);
  model.set_recompute(Recompute::block, true);
  for (int i = 0; i < 3; ++i) {
    Tape tape(context);
    const TapeScope recording(tape);
    loss_of(model, context, even_vit(3), kBatch, DType::f32);
    CHECK(context.host_ledger().live_total() == 3 * kInput);
  }
  CHECK(context.host_ledger().live_total() == 0);
  CHECK(context.ledger().live(kActivations) == 0);
}

TEST_CASE("recompute, offload: without room on the host the error says so") {
  Context context({.threads = 1, .seed = 4, .host_memory_limit = 2 * kInput});
  VisionTransformer model(even_vit(3));
  model.initialize(context, DType::f32);
  model.set_recompute(Recompute::block, true);
  {
    Tape tape(context);
    const TapeScope recording(tape);
    CHECK_THROWS_WITH_AS(loss_of(model, context, even_vit(3), kBatch, DType::f32),
                         doctest::Contains("host"), OutOfMemory);
  }
  CHECK(context.host_ledger().live_total() == 0);
  model.set_recompute(Recompute::block);
  Tape tape(context);
  const TapeScope recording(tape);
  tape.backward(loss_of(model, context, even_vit(3), kBatch, DType::f32));
}

TEST_CASE("recompute, offload: only where something is recomputed; a replaced child keeps it") {
  VisionTransformer model(odd_vit());
  CHECK_THROWS_WITH_AS(
      model.set_recompute(Recompute::none, true),
      doctest::Contains("module 'blocks.0': its input can be offloaded only where"), Error);
  model.set_recompute(Recompute::block, true);
  model.child("blocks")->replace_child("1", std::make_shared<Probe>(two_layers));
  CHECK(model.child("blocks")->child("1")->offloads_input());
  model.set_recompute(Recompute::block);
  CHECK_FALSE(model.child("blocks")->child("1")->offloads_input());
}
