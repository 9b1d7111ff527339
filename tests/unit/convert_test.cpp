// SPDX-License-Identifier: Apache-2.0
// Conversions of weights: the same bits under every name and in every format.
#include <doctest/doctest.h>
#include <sherd/comm/checkpoint/tensor_file.h>
#include <sherd/models/weights_names.h>
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/io/safetensors.h>
#include <sherd/tools/trainer/convert.h>
#include <sherd/tools/trainer/convert_plan.h>
#include <sherd/tools/trainer/weights_source.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "io_support.h"

using namespace sherd;
using namespace sherd::test;
namespace fs = std::filesystem;

namespace {

std::string golden(const std::string& name) {
  return std::string(SHERD_TEST_DATA) + "/golden/torch/" + name;
}

// Names, types, shapes and bits of all tensors.
std::map<std::string, std::string> content(const std::string& path) {
  const auto file = open_weights(path);
  std::map<std::string, std::string> all;
  Bytes room;
  for (const TensorEntry& entry : file->entries()) {
    const auto bytes = file->read(entry, 0, entry.numel, room);
    all[entry.name] = fmt::format("{} [{}] {:02x}", entry.type, fmt::join(entry.dims, ", "),
                                  fmt::join(bytes, ""));
  }
  return all;
}

// Weights and Adam's state of the golden ViT as one file: the moments are the weights plus one and
// two, those of the head are missing.
void write_with_states(const std::string& path) {
  const auto source = open_weights(golden("vit.pt"));
  std::vector<SafetensorsItem> items;
  std::vector<Bytes> rooms(3 * source->entries().size());
  std::size_t next = 0;
  for (const TensorEntry& entry : source->entries()) {
    const Shape shape{std::span<const std::int64_t>(entry.dims)};
    Bytes room;
    for (const char* state : {"", "exp_avg", "exp_avg_sq"}) {
      const bool weight = *state == '\0';
      if (!weight && entry.name.starts_with("head.")) continue;
      const auto bytes = source->read(entry, 0, entry.numel, room);
      Bytes& own = rooms[next++];
      own.assign(bytes.begin(), bytes.end());
      for (std::size_t i = 0; !weight && i < own.size(); i += 4) {
        float value = 0;
        std::memcpy(&value, &own[i], 4);
        value += std::strlen(state) == 7 ? 1.0f : 2.0f;
        std::memcpy(&own[i], &value, 4);
      }
      items.push_back(
          {weight ? entry.name : "optimizer." + entry.name + "." + state, DType::f32, shape, own});
    }
  }
  write_safetensors(path, items, {{"from", "a test"}});
}

}  // namespace

TEST_CASE("convert: every format holds the same tensors, and back come the same bytes") {
  const TempDirectory folder;
  const std::string start = folder.path("start.safetensors");
  write_with_states(start);
  const auto all = content(start);
  CHECK(all.size() == 20 + 2 * 18);
  for (const int pieces : {1, 2, 3, 7}) {
    const std::string to = folder.path("checkpoint" + std::to_string(pieces));
    const ConvertResult result =
        convert_weights(start, to, {.to = "checkpoint", .optimizer = "yes", .pieces = pieces});
    CHECK(result.files == static_cast<std::size_t>(pieces));
    CHECK(result.tensors == all.size());
    CHECK_FALSE(result.resumable);
    const CheckpointReader reader(to);
    CHECK_NOTHROW(reader.verify());
    CHECK(content(to) == all);
    // Files of one size, but for headers: that is what pieces are for.
    std::vector<std::uint64_t> sizes;
    for (const CheckpointFile& file : reader.index().files) {
      sizes.push_back(file.bytes - file.header_bytes);
    }
    CHECK(*std::ranges::max_element(sizes) - *std::ranges::min_element(sizes) <= 4);
  }
  for (const std::uint64_t most : {std::uint64_t{1}, std::uint64_t{300}, std::uint64_t{1} << 30}) {
    const std::string to = folder.path("split" + std::to_string(most));
    const ConvertResult result = convert_weights(
        folder.path("checkpoint3"), to, {.to = "split", .optimizer = "yes", .max_file_size = most});
    CHECK(result.files == (most == 1 ? all.size() : most == 300 ? 11 : 1));
    CHECK(content(to) == all);
    CHECK(content(to + "/model.safetensors.index.json") == all);
    for (const auto& entry : fs::directory_iterator(to)) {
      if (entry.path().extension() == ".json") continue;
      std::uint64_t bytes = 0, tensors = 0;
      const SafetensorsFile file = SafetensorsFile::open(entry.path().string());
      for (const SafetensorsEntry& tensor : file.entries()) {
        bytes += tensor.size;
        ++tensors;
      }
      CHECK((bytes <= most || tensors == 1));
    }
  }
  const std::string back = folder.path("back.safetensors");
  convert_weights(folder.path("split300"), back, {.optimizer = "yes"});
  CHECK(content(back) == all);
  // Without the state, which a file does not get by itself.
  const std::string weights = folder.path("weights.safetensors");
  const ConvertResult result = convert_weights(start, weights, {});
  CHECK(content(weights) == content(golden("vit.pt")));
  CHECK(result.notes == std::vector<std::string>{
                            "the optimizer's state was left out; --optimizer yes takes it along"});
  CHECK(SafetensorsFile::open(weights).metadata().at("from") == "a test");
}

TEST_CASE("convert: to transformers' names and back, states too") {
  const TempDirectory folder;
  const std::string start = folder.path("start.safetensors"), theirs = folder.path("t.safetensors"),
                    back = folder.path("back.safetensors");
  write_with_states(folder.path("first.safetensors"));
  convert_weights(folder.path("first.safetensors"), start, {.optimizer = "yes"});
  const ConvertResult result =
      convert_weights(start, theirs, {.names = "transformers", .optimizer = "yes"});
  REQUIRE(result.notes.size() == 1);
  CHECK(result.notes[0].starts_with("names of transformers, q, k and v apart"));
  const auto all = content(theirs);
  CHECK(all.contains("optimizer.vit.encoder.layer.0.attention.attention.key.bias.exp_avg_sq"));
  CHECK(all.contains("classifier.bias"));
  convert_weights(theirs, back, {.names = "timm", .optimizer = "yes"});
  CHECK(read_file(back) == read_file(start));
  // What transformers' own layout holds.
  convert_weights(golden("vit.pt"), folder.path("w.safetensors"), {.names = "transformers"});
  CHECK(content(folder.path("w.safetensors")) == content(golden("transformers4.bin")));
  // The names of their version 5 end as those of version 4.
  convert_weights(golden("transformers5.bin"), folder.path("w5.safetensors"),
                  {.names = "transformers"});
  CHECK(read_file(folder.path("w5.safetensors")) == read_file(folder.path("w.safetensors")));
  convert_weights(golden("checkpoint.pt"), folder.path("c.safetensors"), {.names = "timm"});
  CHECK(content(folder.path("c.safetensors")) == content(golden("vit.pt")));
}

TEST_CASE("convert: checkpoints of other programs' processes, with the optimizer's state") {
  const TempDirectory folder;
  for (const std::string name : {"dcp", "zero1", "zero2", "zero3"}) {
    CAPTURE(name);
    const std::string source = std::string(SHERD_TEST_DATA) + "/golden/distributed/" + name;
    const std::string to = folder.path(name), back = folder.path(name + ".safetensors");
    convert_weights(source, to, {.to = "checkpoint", .pieces = 3});
    convert_weights(to, back, {.optimizer = "yes"});
    std::map<std::string, std::string> expected;
    for (const auto& [key, value] : content(source)) {
      if (key.find("optimizer.state.") == 0) continue;  // the count of steps
      expected[key.starts_with("model.") ? key.substr(6) : key] = value;
    }
    CHECK(content(to) == expected);
    CHECK(content(back) == expected);
    CHECK(expected.size() == (name == "dcp" ? 4 : 15));
    // Types change for weights alone.
    const std::string half = folder.path(name + "-half.safetensors");
    convert_weights(source, half, {.dtype = "bf16", .optimizer = "yes"});
    for (const auto& [key, value] : content(half)) {
      CHECK(value.starts_with("bf16") == !key.starts_with("optimizer."));
    }
  }
}

TEST_CASE("convert: types change once, and states keep theirs") {
  const TempDirectory folder;
  const std::string start = folder.path("start.safetensors");
  write_with_states(start);
  for (const auto& [name, dtype] : std::vector<std::pair<std::string, DType>>{
           {"bf16", DType::bf16}, {"fp16", DType::f16}, {"fp64", DType::f64}}) {
    const std::string to = folder.path(name + ".safetensors");
    convert_weights(start, to, {.dtype = name, .optimizer = "yes"});
    const SafetensorsFile before = SafetensorsFile::open(start), after = SafetensorsFile::open(to);
    for (const SafetensorsEntry& entry : after.entries()) {
      const auto old = before.bytes(*before.find(entry.name)), now = after.bytes(entry);
      if (entry.name.starts_with("optimizer.")) {
        CHECK(std::ranges::equal(old, now));
        continue;
      }
      CHECK(entry.dtype == dtype);
      bool same = true;
      for (std::size_t i = 0; i < old.size() / 4; ++i) {
        float value = 0;
        std::memcpy(&value, &old[4 * i], 4);
        const double wide = value;
        const bf16 brain(value);
        const f16 half(value);
        const void* expected = dtype == DType::bf16  ? static_cast<const void*>(&brain)
                               : dtype == DType::f16 ? static_cast<const void*>(&half)
                                                     : static_cast<const void*>(&wide);
        same = same && std::memcmp(&now[i * size_of(dtype)], expected, size_of(dtype)) == 0;
      }
      CHECK(same);
    }
  }
}

TEST_CASE("convert: tensors larger than a block, whole and cut") {
  const TempDirectory folder;
  const std::int64_t numel = (std::int64_t{1} << 20) * 2 + 12'345;
  std::vector<float> values(static_cast<std::size_t>(numel));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 8191);
  const std::span<const std::uint8_t> bytes(reinterpret_cast<const std::uint8_t*>(values.data()),
                                            values.size() * 4);
  const std::vector<SafetensorsItem> items{{"a", DType::f32, Shape{numel}, bytes},
                                           {"empty", DType::f32, Shape{0, 3}, {}},
                                           {"i", DType::i64, Shape{1}, bytes.first(8)},
                                           {"z", DType::f32, Shape{}, bytes.first(4)}};
  const std::string start = folder.path("a.safetensors");
  write_safetensors(start, items);
  const auto all = content(start);
  std::uint64_t last = 0;
  convert_weights(start, folder.path("c"), {.to = "checkpoint", .pieces = 3},
                  [&](std::uint64_t done, std::uint64_t of) {
                    CHECK(done >= last);
                    CHECK(of == bytes.size() + 12);
                    last = done;
                    return true;
                  });
  CHECK(last == bytes.size() + 12);
  CHECK(content(folder.path("c")) == all);
  convert_weights(folder.path("c"), folder.path("b.safetensors"), {.dtype = "fp64"});
  convert_weights(folder.path("b.safetensors"), folder.path("d.safetensors"), {.dtype = "fp32"});
  CHECK(content(folder.path("d.safetensors")) == all);
}

TEST_CASE("convert: what cannot be is refused before anything is there") {
  const TempDirectory folder;
  const std::string start = folder.path("start.safetensors");
  write_with_states(start);
  const auto refused = [&](const std::string& to, const ConvertOptions& options) {
    const std::string error = error_of([&] { convert_weights(start, to, options); });
    CHECK(folder.file_count() == 1);
    return error;
  };
  const std::string file = folder.path("x.safetensors"), directory = folder.path("x");
  check_mentions(refused(directory, {}), directory, "--to split", "--to checkpoint");
  check_mentions(refused(folder.path("x.pt"), {}), "x.pt", ".safetensors");
  check_mentions(refused(folder.path("x.bin"), {.to = "split"}), "x.bin", ".safetensors");
  check_mentions(refused(directory, {.to = "safetensors"}), "end in .safetensors");
  check_mentions(refused(file, {.to = "checkpoint"}), "take .safetensors away");
  check_mentions(refused(file, {.to = "zip"}), "--to: expected", "zip");
  check_mentions(refused(file, {.names = "torch"}), "--names: expected", "torch");
  check_mentions(refused(file, {.dtype = "i64"}), "--dtype: expected", "i64");
  check_mentions(refused(file, {.dtype = "fp8"}), "--dtype: expected", "fp8");
  check_mentions(refused(file, {.optimizer = "perhaps"}), "--optimizer: expected", "perhaps");
  check_mentions(refused(file, {.pieces = 2}), "--pieces", "--to checkpoint");
  check_mentions(refused(file, {.max_file_size = 2}), "--max-file-size", "--to split");
  check_mentions(refused(directory, {.to = "checkpoint", .pieces = -1}), "--pieces", "-1");
  check_mentions(refused(start, {}), start, "is there already");
  check_mentions(error_of([&] { convert_weights(folder.path("none"), file, {}); }), "none");
  check_mentions(error_of([&] { convert_weights(folder.path(), file, {}); }),
                 "directory without weights");
  check_mentions(error_of([&] { convert_weights(golden("vit.pt"), file, {.optimizer = "yes"}); }),
                 "--optimizer yes", "vit.pt");
  check_mentions(error_of([&] { convert_weights(golden("views.pt"), file, {}); }), "views.pt",
                 "type", "cannot write");
  CHECK(folder.file_count() == 1);
  // Missing directories above are made.
  convert_weights(start, folder.path("new/er/model.safetensors"), {});
  CHECK(content(folder.path("new/er")).size() == 20);
  // A directory with anything in it stays; an empty one may be filled.
  fs::create_directory(directory);
  put_file(directory + "/y", {1});
  check_mentions(error_of([&] { convert_weights(start, directory, {.to = "split"}); }), directory,
                 "is there already");
  fs::remove(directory + "/y");
  convert_weights(start, directory, {.to = "split"});
  CHECK(content(directory).size() == 20);
}

TEST_CASE("convert: what is stopped leaves nothing") {
  const TempDirectory folder;
  const std::string start = folder.path("start.safetensors");
  write_with_states(start);
  for (const char* format : {"safetensors", "split", "checkpoint"}) {
    const bool file = format == std::string("safetensors");
    int calls = 0;
    const std::string message = error_of([&] {
      convert_weights(start, folder.path(file ? "x.safetensors" : "x"), {.to = format},
                      [&](std::uint64_t, std::uint64_t) { return ++calls < 5; });
    });
    CHECK(message == "stopped; nothing was written");
    CHECK(folder.file_count() == 1);
  }
  // Somebody else's file comes in between.
  const std::string to = folder.path("x.safetensors");
  const std::string message = error_of([&] {
    convert_weights(start, to, {}, [&](std::uint64_t, std::uint64_t) {
      put_file(to, bytes_of("precious"));
      return true;
    });
  });
  check_mentions(message, to, "was not before");
  CHECK(read_file(to) == bytes_of("precious"));
}

TEST_CASE("convert: names of transformers for timm's") {
  const std::vector<std::string> names{"patch_embed.proj.weight",
                                       "blocks.2.attn.qkv.bias",
                                       "fc_norm.weight",
                                       "head.weight",
                                       "cls_token",
                                       "cls_tokens"};
  std::vector<std::string> left_over;
  const auto show = [&](std::span<const std::string> of) {
    std::vector<std::string> text;
    for (const WeightTarget& t : transformers_names(of, &left_over)) {
      text.push_back(fmt::format("{} <- {} {}/{}", t.name, t.from, t.part, t.parts));
    }
    return text;
  };
  CHECK(show(names) ==
        std::vector<std::string>{
            "vit.embeddings.patch_embeddings.projection.weight <- patch_embed.proj.weight 0/1",
            "vit.encoder.layer.2.attention.attention.query.bias <- blocks.2.attn.qkv.bias 0/3",
            "vit.encoder.layer.2.attention.attention.key.bias <- blocks.2.attn.qkv.bias 1/3",
            "vit.encoder.layer.2.attention.attention.value.bias <- blocks.2.attn.qkv.bias 2/3",
            "fc_norm.weight <- fc_norm.weight 0/1", "classifier.weight <- head.weight 0/1",
            "vit.embeddings.cls_token <- cls_token 0/1", "cls_tokens <- cls_tokens 0/1"});
  CHECK(left_over == std::vector<std::string>{"fc_norm.weight", "cls_tokens"});
  // Without a head it is their bare model, whose names have no prefix.
  CHECK(show(std::span(names).first(1)) ==
        std::vector<std::string>{
            "embeddings.patch_embeddings.projection.weight <- patch_embed.proj.weight 0/1"});
  check_mentions(error_of([&] { (void)transformers_names(std::span(names).subspan(1)); }),
                 "patch_embed.proj.weight", "Vision Transformer");
}
