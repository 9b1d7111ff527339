// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/autograd/operations.h>
#include <sherd/autograd/tape.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/matmul.h>
#include <sherd/kernels/random.h>

using namespace sherd;

namespace {

Tensor vector_of(Context& context, std::vector<double> values) {
  return Tensor::from_host<double>(context, {static_cast<std::int64_t>(values.size())}, values);
}

}  // namespace

TEST_CASE("tape: several uses of a value add up") {
  Context context;
  Tape tape(context);
  const Variable x = tape.watch(vector_of(context, {1, 2}));
  Variable y;
  {
    const TapeScope recording(tape);
    y = sum(add(add(scale(x, 2.0), x), scale(x, -5.0)));
  }
  tape.backward(y);
  CHECK(tape.gradient(x).to_vector<double>() == std::vector<double>{-2, -2});
}

TEST_CASE("tape: nothing is recorded without a tape, or inside NoGradScope") {
  Context context;
  Tape tape(context);
  const Variable x = tape.watch(vector_of(context, {1}));
  {
    const TapeScope recording(tape);
    const NoGradScope none(context);
    CHECK_FALSE(scale(x, 2.0).requires_grad());
  }
  CHECK_FALSE(scale(x, 2.0).requires_grad());
  CHECK(tape.size() == 0);
}

TEST_CASE("tape: constants are not recorded") {
  Context context;
  Tape tape(context);
  const TapeScope recording(tape);
  const Variable constant = vector_of(context, {1});
  CHECK_FALSE(scale(constant, 2.0).requires_grad());
  CHECK(tape.size() == 0);
}

TEST_CASE("tape: two tapes live at once, each runs backward from a given output gradient") {
  Context context;
  const Tensor value = vector_of(context, {3, 4});
  Tape first(context), second(context);
  const Variable a = first.watch(value);
  Variable y;
  {
    const TapeScope outer(first);
    y = scale(a, 2.0);
    Variable b = second.watch(y.tensor());
    Variable z;
    {
      const TapeScope inner(second);
      z = scale(b, 10.0);
    }
    CHECK(context.tape() == &first);
    second.backward(z, vector_of(context, {1, -1}));
    first.backward(y, second.gradient(b));
  }
  CHECK(first.gradient(a).to_vector<double>() == std::vector<double>{20, -20});
}

TEST_CASE("tape: a value of another tape is an error, not a silent constant") {
  Context context;
  Tape first(context), second(context);
  const Variable a = first.watch(vector_of(context, {1}));
  const TapeScope recording(second);
  CHECK_THROWS_WITH_AS(scale(a, 2.0), doctest::Contains("another tape"), Error);
  CHECK_NOTHROW(scale(a.detach(), 2.0));
}

TEST_CASE("tape: hooks run at their position, in reverse") {
  Context context;
  Tape tape(context);
  std::vector<std::string> events;
  Parameter parameter({2}, Initializer::ones(), true);
  parameter.materialize(context, DType::f64);
  Variable y;
  {
    const TapeScope recording(tape);
    tape.on_backward("unit begins", [&] {
      events.push_back(parameter.grad().defined() ? "begin, gradient there" : "begin, none");
    });
    y = scale(parameter.variable(), 3.0);
    tape.on_backward("unit ends", [&] {
      events.push_back(parameter.grad().defined() ? "end, gradient there" : "end, none");
    });
    y = sum(y);
  }
  tape.backward(y);
  CHECK(events == std::vector<std::string>{"end, none", "begin, gradient there"});
}

TEST_CASE("tape: gradients of a parameter accumulate over backwards and count as gradients") {
  Context context;
  Parameter parameter({2}, Initializer::ones(), true);
  parameter.materialize(context, DType::f64);
  for (int i = 0; i < 3; ++i) {
    Tape tape(context);
    const TapeScope recording(tape);
    tape.backward(sum(scale(parameter.variable(), 2.0)));
  }
  CHECK(parameter.grad().to_vector<double>() == std::vector<double>{6, 6});
  CHECK(context.ledger().live(MemoryCategory::gradients) == Allocator::kGranule);
  parameter.set_requires_grad(false);
  parameter.clear_grad();
  CHECK(context.ledger().live(MemoryCategory::gradients) == 0);
  Tape tape(context);
  const TapeScope recording(tape);
  CHECK_FALSE(parameter.variable().requires_grad());
}

TEST_CASE("tape: errors say what is wrong") {
  Context context;
  const Tensor value = vector_of(context, {1, 2});
  SUBCASE("an input overwritten in place") {
    Tape tape(context);
    const Variable x = tape.watch(value);
    const TapeScope recording(tape);
    const Variable y = sum(activate(x, Activation::gelu_erf));
    fill(value, 0.0);
    CHECK_THROWS_WITH_AS(
        tape.backward(y),
        doctest::Contains("backward of activation: a f64 [2] saved for backward was "
                          "written in place"),
        Error);
  }
  SUBCASE("released bytes") {
    Tape tape(context);
    const Variable x = tape.watch(value);
    const TapeScope recording(tape);
    const Variable y = sum(activate(x, Activation::gelu_erf));
    value.storage().set_owner("unit head");
    value.storage().release();
    CHECK_THROWS_WITH_AS(tape.backward(y), doctest::Contains("unit head: its bytes are released"),
                         Error);
  }
  SUBCASE("backward twice") {
    Tape tape(context);
    const Variable x = tape.watch(value);
    Variable y;
    {
      const TapeScope recording(tape);
      y = sum(x);
    }
    tape.backward(y);
    CHECK_THROWS_WITH_AS(tape.backward(y), doctest::Contains("run backward already"), Error);
    const TapeScope recording(tape);
    CHECK_THROWS_WITH_AS(sum(x), doctest::Contains("run backward already"), Error);
  }
  SUBCASE("no gradient needed") {
    Tape tape(context);
    CHECK_THROWS_WITH_AS(tape.backward(Variable(vector_of(context, {1}))),
                         doctest::Contains("does not depend on anything"), Error);
  }
  SUBCASE("an output of several elements needs a gradient") {
    Tape tape(context);
    const Variable x = tape.watch(value);
    const TapeScope recording(tape);
    const Variable y = scale(x, 2.0);
    CHECK_THROWS_WITH_AS(tape.backward(y), doctest::Contains("output gradient is needed"), Error);
    CHECK_THROWS_WITH_AS(tape.backward(y, vector_of(context, {1})), doctest::Contains("f64 [1]"),
                         Error);
  }
  SUBCASE("shapes that do not fit") {
    const Tensor a = full(context, {2, 3}, DType::f64, 1.0),
                 b = full(context, {2, 3}, DType::f64, 1.0);
    CHECK_THROWS_WITH_AS(matmul(a, b),
                         doctest::Contains("inner dimensions differ: f64 [2, 3] by f64 [2, 3]"),
                         Error);
    CHECK_THROWS_WITH_AS(linear(a, full(context, {4, 2}, DType::f64, 1.0), {}),
                         doctest::Contains("does not fit weight"), Error);
    CHECK_THROWS_WITH_AS(add(a, full(context, {3, 2}, DType::f64, 1.0)),
                         doctest::Contains("[3, 2]"), Error);
  }
}

TEST_CASE("tape: the caller's memory is never written") {
  Context context;
  std::vector<double> mine{1, 1};
  const Tensor grad = Tensor::from_blob(context, mine.data(), {2}, DType::f64);
  Parameter parameter({2}, Initializer::ones(), true);
  parameter.materialize(context, DType::f64);
  for (int i = 0; i < 2; ++i) {
    Tape tape(context);
    const TapeScope recording(tape);
    const Variable p = parameter.variable();
    tape.backward(add(scale(p, 2.0), p), grad);
  }
  CHECK(mine == std::vector<double>{1, 1});
  CHECK(parameter.grad().to_vector<double>() == std::vector<double>{6, 6});
}

TEST_CASE("tape: an output gradient of another type is refused") {
  Context context;
  Tape tape(context);
  const Variable x = tape.watch(full(context, {2}, DType::f32, 1.0));
  const TapeScope recording(tape);
  const Variable y = scale(x, 2.0);
  CHECK_THROWS_WITH_AS(tape.backward(y, vector_of(context, {1, 1})), doctest::Contains("f64 [2]"),
                       Error);
}

TEST_CASE("tape: labels overwritten before backward are noticed") {
  Context context;
  const std::vector<std::int64_t> values{0, 1};
  const Tensor labels = Tensor::from_host<std::int64_t>(context, {2}, values);
  Tape tape(context);
  const Variable x = tape.watch(full(context, {2, 3}, DType::f64, 1.0));
  const TapeScope recording(tape);
  const Variable loss = cross_entropy(x, {labels, {}, 0.0});
  labels.copy_from_host(values.data(), values.size() * sizeof values[0]);
  CHECK_THROWS_WITH_AS(tape.backward(loss), doctest::Contains("written in place"), Error);
}

TEST_CASE("tape: a parameter whose data moved is used where it is now") {
  Context context;
  Parameter parameter({1}, Initializer::ones(), true);
  parameter.materialize(context, DType::f64);
  Tape tape(context);
  const TapeScope recording(tape);
  const Variable before = scale(parameter.variable(), 1.0);
  parameter.set_data(vector_of(context, {5}));
  const Variable after = scale(parameter.variable(), 2.0);
  CHECK(after.tensor().item() == 10.0);
  tape.backward(sum(add(before, after)));
  CHECK(parameter.grad().item() == 3.0);
}

TEST_CASE("tape: a backward that throws leaves its context usable") {
  struct ThrowingNode final : Node {
    const char* name() const override { return "throwing"; }
    void backward(Gradients&) override { fail("no gradient today"); }
  };
  Context context;
  {
    Tape tape(context);
    const TapeScope recording(tape);
    const Variable x = tape.watch(vector_of(context, {1}));
    const Variable y =
        record({x}, vector_of(context, {1}), [] { return std::make_unique<ThrowingNode>(); });
    CHECK_THROWS_WITH_AS(tape.backward(scale(y, 2.0)), "backward of throwing: no gradient today",
                         Error);
  }
  CHECK(context.tape() == nullptr);
  Tape tape(context);
  const TapeScope recording(tape);
  const Variable x = tape.watch(vector_of(context, {1}));
  tape.backward(scale(x, 3.0));
  CHECK(tape.gradient(x).item() == 3.0);
}

TEST_CASE(
    "tape: storage released between forward and backward comes back under the same identity") {
  // What a sharding engine does with a unit: two parameters as views of one flat storage.
  Context context;
  const Tensor flat = full(context, {8}, DType::f64, 2.0, MemoryCategory::gathered_parameters);
  Parameter a({4}, Initializer::ones(), true), b({4}, Initializer::ones(), true);
  a.set_data(flat.slice(0, 0, 4));
  b.set_data(flat.slice(0, 4, 8));
  Tape tape(context);
  Variable loss;
  {
    const TapeScope recording(tape);
    tape.on_backward("reshard", [&] { flat.storage().release(); });
    const Variable x = activate(a.variable(), Activation::gelu_erf);
    loss = sum(add(x, activate(b.variable(), Activation::gelu_erf)));
    tape.on_backward("unshard", [&] {
      flat.storage().restore();
      std::fill_n(flat.data<double>(), 8, 2.0);  // the gather; not a modification
    });
    flat.storage().release();
  }
  tape.backward(loss);
  CHECK(a.grad().to_vector<double>() == b.grad().to_vector<double>());
  CHECK(context.ledger().live(MemoryCategory::gathered_parameters) == 0);
}

TEST_CASE("tape: what is saved is freed on the way") {
  Context context;
  Parameter parameter({1000}, Initializer::ones(), true);
  parameter.materialize(context, DType::f32);
  const std::int64_t before = context.ledger().live(MemoryCategory::activations);
  Tape tape(context);
  {
    const TapeScope recording(tape);
    Variable y = parameter.variable();
    for (int i = 0; i < 10; ++i) y = activate(y, Activation::gelu_erf);
    y = sum(y);
    tape.backward(y);
  }
  CHECK(context.ledger().live(MemoryCategory::activations) == before);
}

TEST_CASE("patch_embed: the bits of a product over patches, which are not kept") {
  Context context({.threads = 1});
  const auto random = [&](const Shape& shape, const char* name) {
    const Tensor x = Tensor::empty(context, shape, DType::f32);
    fill_normal(x, 0.0, 1.0, RandomStream(3, "test", name));
    return x;
  };
  const Tensor images = random({4, 3, 16, 16}, "images"), bias = random({6}, "bias");
  const Tensor weight = random({6, 3, 4, 4}, "weight"), grad = random({4, 16, 6}, "grad");
  const PatchSize patch{1, 4, 4};
  std::vector<std::vector<float>> results[2];
  for (const bool in_one : {false, true}) {
    // Images that are not differentiated, as in training, and images that are.
    for (const bool all : {false, true}) {
      Tape tape(context);
      const std::int64_t before = context.ledger().live(MemoryCategory::activations);
      const Variable x = all ? tape.watch(images) : Variable(images);
      const Variable w = tape.watch(weight), b = tape.watch(bias);
      Variable y;
      {
        const TapeScope recording(tape);
        y = in_one ? patch_embed(x, w, b, patch) : linear(patchify(x, patch), w, b);
      }
      const std::int64_t kept = context.ledger().live(MemoryCategory::activations) - before;
      const std::int64_t output = 4 * 16 * 6 * 4, patches = 4 * 16 * 48 * 4;
      CHECK(kept == (in_one ? output : output + patches));
      tape.backward(y, grad);
      auto& to = results[in_one ? 1 : 0];
      to.push_back(y.tensor().to_vector<float>());
      for (const Variable& v : {w, b}) to.push_back(tape.gradient(v).to_vector<float>());
      if (all) to.push_back(tape.gradient(x).to_vector<float>());
    }
  }
  CHECK(results[0] == results[1]);
}
