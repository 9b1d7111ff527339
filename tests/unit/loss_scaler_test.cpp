// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/optim/loss_scaler.h>
#include <sherd/runtime/error.h>

#include <cmath>

using namespace sherd;

namespace {

void good_steps(LossScaler& scaler, int count) {
  for (int i = 0; i < count; ++i) scaler.good_step();
}

}  // namespace

TEST_CASE("loss scale: halves with an overflow, doubles after a window of good steps") {
  LossScaler scaler({.growth_window = 3});
  CHECK(scaler.scale() == 65536.0);
  scaler.overflow();
  CHECK(scaler.scale() == 32768.0);
  good_steps(scaler, 2);
  CHECK(scaler.scale() == 32768.0);
  scaler.good_step();
  CHECK(scaler.scale() == 65536.0);
  // The next window begins there, and anew after an overflow.
  good_steps(scaler, 2);
  CHECK(scaler.scale() == 65536.0);
  scaler.overflow();
  CHECK(scaler.scale() == 32768.0);
  good_steps(scaler, 2);
  CHECK(scaler.scale() == 32768.0);
  scaler.good_step();
  CHECK(scaler.scale() == 65536.0);
}

TEST_CASE("loss scale: hysteresis tolerates overflows, and is counted anew after a doubling") {
  LossScaler scaler({.initial = 1024.0, .growth_window = 4, .hysteresis = 3});
  const auto overflow = [&](double scale) {
    scaler.overflow();
    CHECK(scaler.scale() == scale);
  };
  overflow(1024.0);
  good_steps(scaler, 3);  // no doubling: the overflows so far count on
  overflow(1024.0);
  overflow(512.0);
  overflow(256.0);  // once it has come to halving, every one halves
  good_steps(scaler, 4);
  CHECK(scaler.scale() == 512.0);
  overflow(512.0);
  overflow(512.0);
  overflow(256.0);
}

TEST_CASE("loss scale: a tolerated overflow ends the window of good steps too") {
  LossScaler scaler({.initial = 1024.0, .growth_window = 2, .hysteresis = 2});
  scaler.good_step();
  scaler.overflow();
  scaler.good_step();
  CHECK(scaler.scale() == 1024.0);
  scaler.good_step();
  CHECK(scaler.scale() == 2048.0);
}

TEST_CASE("loss scale: grows no further than 2^24") {
  LossScaler scaler({.initial = 0x1p23, .growth_window = 1});
  scaler.good_step();
  CHECK(scaler.scale() == 0x1p24);
  good_steps(scaler, 5);
  CHECK(scaler.scale() == 0x1p24);
  scaler.overflow();
  CHECK(scaler.scale() == 0x1p23);
}

TEST_CASE("loss scale: exhausted at the minimum, once nothing more is tolerated") {
  LossScaler scaler({.initial = 4.0, .minimum = 1.0, .growth_window = 2});
  CHECK_FALSE(scaler.exhausted());
  scaler.overflow();
  CHECK_FALSE(scaler.exhausted());
  scaler.overflow();
  CHECK(scaler.scale() == 1.0);
  CHECK(scaler.exhausted());
  good_steps(scaler, 2);
  CHECK(scaler.scale() == 2.0);
  CHECK_FALSE(scaler.exhausted());

  LossScaler patient({.initial = 2.0, .minimum = 2.0, .hysteresis = 3});
  for (int i = 0; i < 2; ++i) {
    CHECK_FALSE(patient.exhausted());
    patient.overflow();
    CHECK(patient.scale() == 2.0);
  }
  CHECK(patient.exhausted());

  // Scales below 1 are no special case.
  LossScaler small({.initial = 1.0, .minimum = 0.25});
  small.overflow();
  small.overflow();
  CHECK(small.scale() == 0.25);
  CHECK(small.exhausted());
}

TEST_CASE("loss scale: a fixed one stays, and has no answer to an overflow") {
  LossScaler scaler({.dynamic = false, .initial = 8.0, .minimum = 8.0, .growth_window = 1});
  good_steps(scaler, 10);
  CHECK(scaler.scale() == 8.0);
  CHECK(scaler.exhausted());
}

TEST_CASE("loss scale: what makes no sense is refused, by the flag's name") {
  const auto refused = [](const LossScaleSettings& settings, const char* message) {
    CHECK_THROWS_WITH_AS(LossScaler{settings}, doctest::Contains(message), Error);
  };
  for (const double scale : {0.0, -2.0, 3.0, 65535.0, 0x1p25, double(NAN), double(INFINITY)}) {
    CAPTURE(scale);
    refused({.initial = scale}, "--loss-scale: expected auto, or a power of two up to 16777216");
    refused({.dynamic = false, .initial = scale, .minimum = scale}, "--loss-scale: expected");
  }
  refused({.initial = 3.0}, "got 3");
  for (const double minimum : {0.0, -1.0, 3.0, 32.0, double(NAN)}) {
    CAPTURE(minimum);
    refused({.initial = 16.0, .minimum = minimum},
            "--min-loss-scale: expected a power of two up to the scale at the start, 16; got");
  }
  refused({.growth_window = 0}, "--loss-scale-window: expected 1 or more, got 0");
  refused({.growth_window = -3}, "--loss-scale-window: expected 1 or more, got -3");
  refused({.hysteresis = 0}, "--loss-scale-hysteresis: expected 1 or more, got 0");
  CHECK_NOTHROW(LossScaler({.initial = 0x1p24, .minimum = 0x1p24}));
  CHECK_NOTHROW(LossScaler({.minimum = 0x1p-10}));
}
