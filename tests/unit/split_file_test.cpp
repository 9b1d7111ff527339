// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/runtime/io/safetensors.h>
#include <sherd/runtime/io/split_file.h>

#include "io_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

SplitIndex parse(std::string_view text) {
  return parse_split_index(text, "some/path");
}

template <typename... Pieces>
void check_rejected(std::string_view text, const Pieces&... pieces) {
  CAPTURE(text);
  check_mentions(error_of([&] { parse(text); }), "some/path", pieces...);
}

void write_file(const std::string& path, const std::vector<std::string>& names,
                std::uint8_t start) {
  std::vector<SafetensorsItem> items;
  std::vector<Bytes> bytes(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    bytes[i] = {start++, start++};
    items.push_back({names[i], DType::u8, Shape{2}, bytes[i]});
  }
  write_safetensors(path, items);
}

}  // namespace

TEST_CASE("split file: the index as hubs write it") {
  const SplitIndex index = parse(
      R"({"metadata": {"total_size": 12, "note": "x", "more": {"deep": [1, null]}},
          "weight_map": {"a": "model-00001-of-00002.safetensors", "b.c": "two"}, "else": [{}]})");
  CHECK(index.total_size == 12);
  CHECK(index.metadata == std::map<std::string, std::string>{{"note", "x"}});
  CHECK(index.files == std::map<std::string, std::string>{{"a", "model-00001-of-00002.safetensors"},
                                                          {"b.c", "two"}});
  CHECK_FALSE(parse(R"({"weight_map":{}})").total_size);
  CHECK(parse(R"({"metadata":{"total_size":4.2e9},"weight_map":{}})").total_size == 4'200'000'000);
  const SplitIndex again = parse(to_json(index));
  CHECK(again.files == index.files);
  CHECK(again.metadata == index.metadata);
  CHECK(again.total_size == index.total_size);
}

TEST_CASE("split file: each way in which an index can be wrong") {
  check_rejected("", "not valid JSON", "byte");
  check_rejected("{", "not valid JSON");
  check_rejected("[]", "a list", "weight_map");
  check_rejected("3", "a number", "weight_map");
  check_rejected("{}", "no 'weight_map'");
  check_rejected(R"({"metadata":{"weight_map":{}}})", "no 'weight_map'");
  check_rejected(R"({"weight_map":[]})", "'weight_map' is a list");
  check_rejected(R"({"weight_map":"x"})", "'weight_map' is a text");
  check_rejected(R"({"weight_map":null})", "'weight_map' is null");
  check_rejected(R"({"weight_map":{},"weight_map":{}})", "'weight_map' appears twice");
  check_rejected(R"({"weight_map":{"a":1}})", "the file of 'a' is a number");
  check_rejected(R"({"weight_map":{"a":{}}})", "the file of 'a' is an object");
  check_rejected(R"({"weight_map":{"a":["x"]}})", "the file of 'a' is a list");
  check_rejected(R"({"weight_map":{"a":"x","a":"y"}})", "tensor 'a' appears twice");
  for (const char* name : {"", ".", "..", "../x", "/etc/x", "a/b", "a\\\\b", "a\\u0000"}) {
    check_rejected(fmt::format(R"({{"weight_map":{{"a":"{}"}}}})", name), "tensor 'a'",
                   "beside the index");
  }
  for (const char* size : {"-1", "1.5", "\"7\"", "1e300", "-2.0"}) {
    check_rejected(fmt::format(R"({{"metadata":{{"total_size":{}}},"weight_map":{{}}}})", size),
                   "total_size");
  }
  check_rejected("{\"weight_map\":{},\"x\":" + std::string(100'000, '['), "nested more than");
  check_rejected("{\"weight_map\":{\"\xff\":\"x\"}}", "UTF-8");
}

TEST_CASE("split file: its tensors are those of one file") {
  const TempDirectory folder;
  write_file(folder.path("one"), {"a", "b"}, 1);
  write_file(folder.path("two"), {"c"}, 5);
  const std::string path = folder.path("model.safetensors.index.json");
  const auto put = [&](const std::string& map) {
    put_file(path, bytes_of("{\"metadata\":{\"total_size\":6},\"weight_map\":" + map + "}"));
  };
  put(R"({"c":"two","a":"one","b":"one"})");
  CHECK(find_split_index(folder.path()) == path);
  CHECK(find_split_index(folder.path("one")).empty());
  const auto file = open_tensor_file(path);  // it is known by its first bytes
  CHECK(file->entries().size() == 3);
  CHECK(file->format() == "safetensors, split");
  CHECK(file->metadata().at("total_size") == "6");
  Bytes room, all;
  for (const char* name : {"a", "b", "c"}) {
    const auto bytes = file->read(*file->find(name), 0, 2, room);
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  CHECK(all == Bytes{1, 2, 3, 4, 5, 6});
  const auto refused = [&](const std::string& map) {
    put(map);
    return error_of([&] { open_tensor_file(path); });
  };
  check_mentions(refused(R"({"c":"two","a":"one"})"), path, "'one' has a tensor 'b'");
  check_mentions(refused(R"({"c":"one","a":"one","b":"one"})"), path, "'one' has no tensor 'c'");
  check_mentions(refused(R"({"c":"two","a":"one","b":"two"})"), path, "'one' has a tensor 'b'");
  check_mentions(refused(R"({"c":"two","a":"one","b":"one","d":"three"})"), path,
                 "its file 'three' is not beside it");
  // An index among its own files.
  check_mentions(refused(R"({"a":"model.safetensors.index.json"})"), path);
  put_file(path, bytes_of(R"({"metadata":{"total_size":5},"weight_map":{"c":"two"}})"));
  CHECK(open_tensor_file(path)->metadata().at("total_size") == "5 by the index, 2 in the files");
}
