// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/tools/trainer/settings.h>
#include <sherd/tools/trainer/setup.h>

#include <set>
#include <tuple>

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
  CHECK_THROWS_WITH_AS(from_text("lr = 1\n"),
                       doctest::Contains("outside a section; did you mean 'optimizer.lr'"), Error);
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
  CHECK_THROWS_WITH_AS(read_toml_settings("/tmp"), doctest::Contains("got a directory"), Error);
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

TEST_CASE("settings: precision flags that have no effect") {
  const auto refused = [](Assignments flags, const char* key, const char* value,
                          const char* message) {
    flags.emplace_back(key, value);
    CHECK_THROWS_WITH_AS(resolve_settings({}, flags), doctest::Contains(message), Error);
  };
  const char* needs_half = ": has no effect here, it needs --precision fp16";
  const char* needs_auto = ": has no effect here, it needs --precision fp16 and --loss-scale auto";
  for (const auto& [key, value, needs] : {std::tuple{"precision.loss_scale", "1024", needs_half},
                                          {"precision.loss_scale_window", "5", needs_auto},
                                          {"precision.loss_scale_hysteresis", "2", needs_auto},
                                          {"precision.min_loss_scale", "2", needs_auto}}) {
    const std::string name = std::string(key).substr(10);
    CAPTURE(name);
    for (const char* precision : {"fp32", "bf16", "fp64"}) {
      refused({{"precision.precision", precision}}, key, value, needs);
    }
    // Nothing is in fp16 after all.
    refused({{"precision.precision", "fp16"},
             {"precision.param_dtype", "bf16"},
             {"precision.reduce_dtype", "fp32"}},
            key, value, needs);
    // Something is.
    for (const Assignments& half : {Assignments{{"precision.precision", "fp16"}},
                                    {{"precision.param_dtype", "f16"}},
                                    {{"precision.reduce_dtype", "float16"}}}) {
      Assignments flags = half;
      flags.emplace_back(key, value);
      CHECK_NOTHROW(resolve_settings({}, flags));
    }
    if (needs == needs_auto) {
      refused({{"precision.precision", "fp16"}, {"precision.loss_scale", "8"}}, key, value, needs);
    }
  }
}

TEST_CASE("settings: precision, whole and in parts") {
  const auto of = [](const Assignments& given) {
    TrainSettings s;
    for (const auto& [key, value] : given) assign(s, "precision." + key, value, "test");
    return training_precision(s);
  };
  CHECK(of({}) == Precision(DType::f32));
  CHECK(of({{"precision", "fp64"}}) == Precision(DType::f64));
  Precision expected;
  expected.parameters = expected.reduce = DType::bf16;
  CHECK(of({{"precision", "bf16"}}) == expected);
  expected.parameters = DType::f16;
  expected.reduce = DType::f32;
  CHECK(of({{"param_dtype", "fp16"}}) == expected);
  CHECK(of({{"precision", "float16"}, {"reduce_dtype", "f32"}}) == expected);
  expected.output = DType::f16;
  CHECK(of({{"precision", "fp16"}, {"reduce_dtype", "fp32"}, {"output_dtype", "fp16"}}) ==
        expected);
  const auto refused = [&](const Assignments& given, const char* message) {
    CAPTURE(message);
    CHECK_THROWS_WITH_AS(of(given), message, Error);
  };
  for (const std::string bad : {"int8", "i64", "fp8", ""}) {
    refused({{"precision", bad}},
            ("--precision " + bad + ": expected fp32, bf16, fp16 or fp64").c_str());
  }
  for (const std::string name : {"param", "reduce", "output"}) {
    const std::string flag = "--" + name + "-dtype ", key = name + "_dtype";
    for (const std::string bad : {"int8", "u8"}) {
      refused({{key, bad}}, (flag + bad + ": expected fp32, bf16 or fp16").c_str());
    }
    for (const char* precision : {"fp32", "bf16", "fp16"}) {
      refused({{"precision", precision}, {key, "fp64"}},
              (flag + "fp64: expected fp32, bf16 or fp16; fp64 needs --precision fp64").c_str());
    }
    refused({{"precision", "fp64"}, {key, "bf16"}},
            (flag + "bf16: with --precision fp64 everything is in fp64; leave it out").c_str());
    CHECK(of({{"precision", "fp64"}, {key, "f64"}}) == Precision(DType::f64));
  }
}

TEST_CASE("settings: the loss scale") {
  const auto of = [](const Assignments& given) {
    TrainSettings s;
    s.precision = "fp16";
    for (const auto& [key, value] : given) assign(s, "precision." + key, value, "test");
    return loss_scale_settings(s);
  };
  const auto automatic =
      of({{"loss_scale_window", "7"}, {"loss_scale_hysteresis", "2"}, {"min_loss_scale", "0.5"}});
  REQUIRE(automatic);
  CHECK(automatic->dynamic);
  CHECK(automatic->initial == 65536.0);
  CHECK(automatic->minimum == 0.5);
  CHECK(automatic->growth_window == 7);
  CHECK(automatic->hysteresis == 2);
  const auto fixed = of({{"loss_scale", "1024"}});
  REQUIRE(fixed);
  CHECK_FALSE(fixed->dynamic);
  CHECK(fixed->initial == 1024.0);
  CHECK(fixed->minimum == 1024.0);
  CHECK(of({{"precision", "fp32"}, {"param_dtype", "fp16"}}));
  CHECK(of({{"precision", "fp32"}, {"reduce_dtype", "fp16"}}));
  CHECK_FALSE(of({{"precision", "fp32"}}));
  CHECK_FALSE(of({{"precision", "bf16"}}));
  CHECK_FALSE(of({{"precision", "fp32"}, {"output_dtype", "fp16"}}));
  const auto refused = [&](const char* key, const char* value, const char* message) {
    CHECK_THROWS_WITH_AS(of({{key, value}}), doctest::Contains(message), Error);
  };
  for (const char* text : {"big", "8x", "", "auto "}) {
    refused("loss_scale", text, "--loss-scale: expected auto, or a power of two, got '");
  }
  for (const char* number : {"3", "0", "-4", "nan", "inf", "33554432"}) {
    refused("loss_scale", number, "--loss-scale: expected auto, or a power of two up to 16777216");
  }
  refused("min_loss_scale", "131072", "--min-loss-scale: expected a power of two up to the scale");
  refused("min_loss_scale", "3", "--min-loss-scale: expected a power of two");
  refused("loss_scale_window", "0", "--loss-scale-window: expected 1 or more");
  refused("loss_scale_hysteresis", "0", "--loss-scale-hysteresis: expected 1 or more");
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
