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
  const Assignments file =
      from_text("[model]\npreset = 'vit_small_patch16_224'\ndepth = 3\n[optimizer]\nlr = 5e-4\n");
  const TrainSettings s = resolve_settings(file, {{"model.heads", "2"}});
  CHECK(s.dim == 384);  // preset
  CHECK(s.depth == 3);  // file
  CHECK(s.heads == 2);  // flag
  CHECK(s.lr == 5e-4);
  CHECK(s.batch_size == 128);  // default
  // A preset as a flag cannot be honoured beside a file that sets what it would set.
  CHECK_THROWS_WITH_AS(resolve_settings(file, {{"model.preset", "vit_tiny_patch16_224"}}),
                       doctest::Contains("the settings file sets model.depth"), Error);
  CHECK(resolve_settings({}, {{"model.preset", "vit_tiny_patch16_224"}}).dim == 192);
}

TEST_CASE("settings: the resolved configuration reads back to the same settings") {
  TrainSettings s;
  s.mean = {0.1, 0.25};
  s.data_dir = "a \"quoted\" folder\\with a backslash";
  s.out = "somewhere";
  s.qkv_bias = false;
  s.lr = 1.0 / 3.0;
  s.weight_decay = 1;
  const std::string text = settings_to_toml(s);
  const TrainSettings again = resolve_settings(from_text(text), {});
  for (const Setting& setting : setting_table()) {
    if (setting.key == "run.out") continue;  // of one run alone
    CHECK_MESSAGE(value_text(again, setting) == value_text(s, setting), setting.key);
  }
  CHECK(again.out.empty());
}

TEST_CASE("settings: every flag once") {
  std::set<std::string> flags;
  for (const Setting& setting : setting_table()) CHECK(flags.insert(setting.flag()).second);
}

TEST_CASE("settings: errors name the key, what came, and a suggestion") {
  CHECK_THROWS_WITH_AS(from_text("[optimizer]\nlearning_rate = 1\n"),
                       doctest::Contains("unknown key 'optimizer.learning_rate'"), Error);
  CHECK_THROWS_WITH_AS(from_text("[run]\nbatchsize = 1\n"),
                       doctest::Contains("did you mean 'run.batch_size'"), Error);
  CHECK_THROWS_WITH_AS(from_text("lr = 1\n"), doctest::Contains("outside a section"), Error);
  CHECK_THROWS_WITH_AS(from_text("[run\n"), doctest::Contains("run.toml:1:"), Error);
  CHECK_THROWS_WITH_AS(
      resolve_settings(from_text("[run]\nepochs = 1.5\n"), {}),
      doctest::Contains("run.toml:2: run.epochs: expected a whole number, got 1.5"), Error);
  CHECK_THROWS_WITH_AS(from_text("[optimizer]\nlr = '1e-3'\n"),
                       doctest::Contains("optimizer.lr: expected a number"), Error);
  CHECK_THROWS_WITH_AS(from_text("[data]\nmean = [[0.5]]\n"),
                       doctest::Contains("expected a list of numbers"), Error);
  CHECK_THROWS_WITH_AS(from_text("[model]\nqkv_bias = 'yes'\n"),
                       doctest::Contains("expected true or false"), Error);
  CHECK_THROWS_WITH_AS(resolve_settings({}, {{"optimizer.lr", "fast"}}),
                       doctest::Contains("--lr: expected a number, got 'fast'"), Error);
  CHECK_THROWS_WITH_AS(resolve_settings({}, {{"data.shuffle", "maybe"}}),
                       doctest::Contains("expected yes or no"), Error);
  CHECK_THROWS_WITH_AS(read_toml_settings("/nonexistent/run.toml"),
                       doctest::Contains("no such file"), Error);
  CHECK_THROWS_WITH_AS(read_toml_settings("/tmp"), doctest::Contains("no such file"), Error);
}

TEST_CASE("settings: a flag without effect is an error") {
  const auto refused = [](const Assignments& flags, const char* message) {
    CHECK_THROWS_WITH_AS(resolve_settings({}, flags), doctest::Contains(message), Error);
  };
  refused({{"optimizer.optimizer", "sgd"}, {"optimizer.beta1", "0.8"}},
          "--beta1: has no effect here");
  refused({{"optimizer.momentum", "0.8"}},
          "--momentum: has no effect here, it needs --optimizer sgd");
  refused({{"data.images", "10"}}, "--images: has no effect here");
  refused({{"data.dataset", "synthetic"}, {"data.data_dir", "x"}},
          "--data-dir: has no effect here");
  refused({{"schedule.warmup_epochs", "2"}, {"schedule.warmup_steps", "5"}}, "--warmup-epochs");
  refused({{"schedule.schedule", "constant"}, {"schedule.min_lr", "1e-5"}}, "--min-lr");
  CHECK_NOTHROW(
      resolve_settings({}, {{"optimizer.optimizer", "sgd"}, {"optimizer.momentum", "0.8"}}));
}

TEST_CASE("settings: amounts of memory") {
  CHECK(parse_bytes("", "--memory-limit") == 0);
  CHECK(parse_bytes("6GiB", "--memory-limit") == std::size_t{6} << 30);
  CHECK(parse_bytes("1.5MB", "--memory-limit") == 1'500'000);
  CHECK(parse_bytes("4096", "--memory-limit") == 4096);
  for (const char* bad : {"6 apples", "-1GiB", "GiB", "1e40GiB", "nan"}) {
    CHECK_THROWS_WITH_AS(parse_bytes(bad, "--memory-limit"), doctest::Contains("such as 6GiB"),
                         Error);
  }
}

TEST_CASE("settings: model and schedule") {
  TrainSettings s;
  CHECK_THROWS_WITH_AS(model_settings(s, 1, 28, 30, 10),
                       doctest::Contains("not divisible by the patch size 7"), Error);
  s.pooling = "max";
  CHECK_THROWS_WITH_AS(model_settings(s, 1, 28, 28, 10), doctest::Contains("'max'"), Error);
  s = {};
  CHECK(lr_schedule(s, 469, 4690).warmup_steps == 469);
  CHECK(lr_schedule(s, 469, 100).warmup_steps == 50);
  s.warmup_epochs = 5;
  CHECK_THROWS_AS(lr_schedule(s, 469, 469), Error);
  s.warmup_steps = -2;
  CHECK_THROWS_WITH_AS(lr_schedule(s, 469, 4690), doctest::Contains("--warmup-steps"), Error);
  s.warmup_steps = 7;
  CHECK(lr_schedule(s, 469, 4690).warmup_steps == 7);
}
