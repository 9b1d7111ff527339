// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/tools/trainer/settings.h>

#include <set>

#include "io_support.h"

using namespace sherd;

namespace {

Assignments from_text(const std::string& text) {
  const test::TempDirectory folder;
  test::put_file(folder.path("run.toml"), test::bytes_of(text));
  return read_toml_settings(folder.path("run.toml"));
}

}  // namespace

TEST_CASE("settings: defaults < preset < file < flags") {
  const Assignments file = from_text("[model]\npreset = 'vit_small_patch16_224'\ndepth = 3\n[optimizer]\nlr = 5e-4\n");
  const TrainSettings s = resolve_settings(file, {{"model.heads", "2"}});
  CHECK(s.dim == 384);   // preset
  CHECK(s.depth == 3);   // file
  CHECK(s.heads == 2);   // flag
  CHECK(s.lr == 5e-4);
  CHECK(s.batch_size == 128);  // default
  // A preset given as a flag does not undo what the file says.
  CHECK(resolve_settings(file, {{"model.preset", "vit_tiny_patch16_224"}}).depth == 3);
  CHECK(resolve_settings(file, {{"model.preset", "vit_tiny_patch16_224"}}).dim == 192);
}

TEST_CASE("settings: the resolved configuration reads back to the same settings") {
  TrainSettings s;
  s.mean = {0.1, 0.25};
  s.out = "a \"quoted\" folder\\with a backslash";
  s.qkv_bias = false;
  s.lr = 1.0 / 3.0;
  s.weight_decay = 1;
  const std::string text = settings_to_toml(s);
  const TrainSettings again = resolve_settings(from_text(text), {});
  for (const Setting& setting : setting_table()) {
    CHECK_MESSAGE(value_text(again, setting) == value_text(s, setting), setting.key);
  }
}

TEST_CASE("settings: every flag once") {
  std::set<std::string> flags;
  for (const Setting& setting : setting_table()) CHECK(flags.insert(setting.flag()).second);
}

TEST_CASE("settings: errors name the key, what came, and a suggestion") {
  CHECK_THROWS_WITH_AS(from_text("[optimizer]\nlearing_rate = 1\n"), doctest::Contains("unknown key 'optimizer.learing_rate'"), Error);
  CHECK_THROWS_WITH_AS(from_text("[run]\nbatchsize = 1\n"), doctest::Contains("did you mean 'run.batch_size'"), Error);
  CHECK_THROWS_WITH_AS(from_text("lr = 1\n"), doctest::Contains("outside a section"), Error);
  CHECK_THROWS_WITH_AS(from_text("[run\n"), doctest::Contains("run.toml:1:"), Error);
  CHECK_THROWS_WITH_AS(resolve_settings(from_text("[run]\nepochs = 1.5\n"), {}),
                       doctest::Contains("run.epochs: expected a whole number, got '1.5'"), Error);
  CHECK_THROWS_WITH_AS(resolve_settings({}, {{"optimizer.lr", "fast"}}),
                       doctest::Contains("--lr: expected a number, got 'fast'"), Error);
  CHECK_THROWS_WITH_AS(resolve_settings({}, {{"data.shuffle", "maybe"}}),
                       doctest::Contains("expected yes or no"), Error);
  CHECK_THROWS_AS(read_toml_settings("/nonexistent/run.toml"), Error);
}

TEST_CASE("settings: amounts of memory") {
  CHECK(parse_bytes("") == 0);
  CHECK(parse_bytes("6GiB") == std::size_t{6} << 30);
  CHECK(parse_bytes("1.5MB") == 1'500'000);
  CHECK(parse_bytes("4096") == 4096);
  for (const char* bad : {"6 apples", "-1GiB", "GiB", "1e40GiB", "nan"}) {
    CHECK_THROWS_WITH_AS(parse_bytes(bad), doctest::Contains("such as 6GiB"), Error);
  }
}

TEST_CASE("settings: model and schedule") {
  TrainSettings s;
  CHECK_THROWS_WITH_AS(model_settings(s, 1, 28, 30, 10), doctest::Contains("not divisible by the patch size 7"), Error);
  s.pooling = "max";
  CHECK_THROWS_WITH_AS(model_settings(s, 1, 28, 28, 10), doctest::Contains("'max'"), Error);
  s = {};
  CHECK(lr_schedule(s, 469, 4690).warmup_steps == 469);
  CHECK(lr_schedule(s, 469, 100).warmup_steps == 50);
  s.warmup_steps = 7;
  CHECK(lr_schedule(s, 469, 4690).warmup_steps == 7);
}
