// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/autograd/operations.h>
#include <sherd/autograd/tape.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/matmul.h>

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
    CHECK_THROWS_WITH_AS(tape.backward(y),
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
    const Tensor a = full(context, {2, 3}, DType::f64, 1.0), b = full(context, {2, 3}, DType::f64, 1.0);
    CHECK_THROWS_WITH_AS(matmul(a, b), doctest::Contains("inner dimensions differ: f64 [2, 3] by f64 [2, 3]"),
                         Error);
    CHECK_THROWS_WITH_AS(linear(a, full(context, {4, 2}, DType::f64, 1.0), {}),
                         doctest::Contains("does not fit weight"), Error);
    CHECK_THROWS_WITH_AS(add(a, full(context, {3, 2}, DType::f64, 1.0)), doctest::Contains("[3, 2]"),
                         Error);
  }
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
