// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/io/safetensors.h>
#include <sherd/runtime/philox.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "io_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

// A file from a header text and a number of data bytes.
Bytes file_of(std::string_view header, std::size_t data_bytes) {
  Bytes file;
  for (int shift = 0; shift < 64; shift += 8) {
    file.push_back(static_cast<std::uint8_t>(static_cast<std::uint64_t>(header.size()) >> shift));
  }
  file.insert(file.end(), header.begin(), header.end());
  for (std::size_t i = 0; i < data_bytes; ++i) file.push_back(static_cast<std::uint8_t>(i));
  return file;
}

SafetensorsHeader parse(std::string_view header, std::size_t data_bytes) {
  return parse_safetensors_header(file_of(header, data_bytes), "some/path");
}

template <typename... Pieces>
void check_rejected(std::string_view header, std::size_t data_bytes, const Pieces&... pieces) {
  CAPTURE(header);
  check_mentions(error_of([&] { parse(header, data_bytes); }), "some/path", pieces...);
}

std::string one_tensor(std::string_view dtype, std::string_view shape, std::string_view range) {
  return fmt::format(R"({{"a":{{"dtype":{},"shape":{},"data_offsets":{}}}}})", dtype, shape, range);
}

template <typename T>
std::span<const std::uint8_t> raw(const std::vector<T>& values) {
  return {reinterpret_cast<const std::uint8_t*>(values.data()), values.size() * sizeof(T)};
}

}  // namespace

TEST_CASE("safetensors: what is written is read back") {
  const TempDirectory directory;
  const std::string path = directory.path("model.safetensors");
  const std::vector<double> f64{1.5, -2.25};
  const std::vector<float> f32{std::nanf(""), std::numeric_limits<float>::infinity(), 3.0f};
  const std::vector<f16> half{f16(1.0f), f16(-0.5f)};
  const std::vector<bf16> brain{bf16(1.0f)};
  const std::vector<std::int64_t> i64{-1};
  const std::vector<std::int32_t> i32{7, 8};
  const std::vector<std::uint8_t> u8{1, 2, 3};
  const std::vector<SafetensorsItem> items{
      {"z.u8", DType::u8, Shape{3}, raw(u8)},
      {"bf16", DType::bf16, Shape{1, 1}, raw(brain)},
      {"f16", DType::f16, Shape{2, 1, 1, 1, 1, 1}, raw(half)},
      {"weight \"quoted\" \xc3\xa9\n", DType::f32, Shape{3}, raw(f32)},
      {"i32", DType::i32, Shape{2}, raw(i32)},
      {"scalar", DType::i64, Shape{}, raw(i64)},
      {"empty", DType::f32, Shape{0, 5}, {}},
      {"f64", DType::f64, Shape{2, 1}, raw(f64)},
  };
  write_safetensors(path, items, {{"format", "pt"}, {"note", "line\nbreak"}});
  CHECK(directory.file_count() == 1);

  const SafetensorsFile file = SafetensorsFile::open(path);
  CHECK(file.path() == path);
  CHECK(file.metadata() ==
        std::map<std::string, std::string>{{"format", "pt"}, {"note", "line\nbreak"}});
  REQUIRE(file.entries().size() == items.size());
  for (const SafetensorsItem& item : items) {
    CAPTURE(item.name);
    const SafetensorsEntry* entry = file.find(item.name);
    REQUIRE(entry != nullptr);
    CHECK(entry->dtype == item.dtype);
    CHECK(entry->shape == item.shape);
    CHECK(std::ranges::equal(file.bytes(*entry), item.bytes));
    CHECK(entry->offset % size_of(item.dtype) == 0);
  }
  CHECK(file.find("absent") == nullptr);

  // Largest elements first, then by name; the data begins at a multiple of 8.
  std::vector<std::string> names;
  for (const SafetensorsEntry& entry : file.entries()) names.push_back(entry.name);
  const std::vector<std::string> expected{"f64",         "scalar", "empty", "i32",
                                          items[3].name, "bf16",   "f16",   "z.u8"};
  CHECK(names == expected);
  CHECK(file.entries()[0].offset % 8 == 0);

  SafetensorsEntry foreign = file.entries()[0];
  foreign.offset = std::numeric_limits<std::uint64_t>::max() - 3;
  check_mentions(error_of([&] { (void)file.bytes(foreign); }), path, "f64");
}

TEST_CASE("safetensors: equal tensors in another order give equal files") {
  const TempDirectory directory;
  const std::vector<float> values{1, 2};
  std::vector<SafetensorsItem> items{{"b", DType::f32, Shape{2}, raw(values)},
                                     {"a", DType::f32, Shape{2}, raw(values)}};
  write_safetensors(directory.path("1"), items);
  std::swap(items[0], items[1]);
  write_safetensors(directory.path("2"), items);
  CHECK(read_file(directory.path("1")) == read_file(directory.path("2")));
}

TEST_CASE("safetensors: a file without tensors") {
  const TempDirectory directory;
  write_safetensors(directory.path("a"), {});
  CHECK(read_file(directory.path("a")) == file_of("{}      ", 0));
  CHECK(SafetensorsFile::open(directory.path("a")).entries().empty());
  write_safetensors(directory.path("a"), {}, {{"k", "v"}});
  CHECK(SafetensorsFile::open(directory.path("a")).metadata().at("k") == "v");
  CHECK(parse("{}", 0).entries.empty());
}

TEST_CASE("safetensors: tensors may begin at any address and be listed in any order") {
  const SafetensorsHeader header =
      parse(R"({"b":{"data_offsets":[1,9],"shape":[2],"dtype":"F32"},"__metadata__":{},)"
            R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
            R"("none":{"dtype":"I64","shape":[3,0],"data_offsets":[1,1]}}  )",
            9);
  REQUIRE(header.entries.size() == 3);
  CHECK(header.entries[0].name == "a");
  CHECK(header.entries[1].name == "none");
  CHECK(header.entries[2].name == "b");
  CHECK(header.entries[2].offset == header.entries[0].offset + 1);
}

TEST_CASE("safetensors: the frame of the file") {
  const auto rejected = [](const Bytes& file, const auto&... pieces) {
    check_mentions(error_of([&] { parse_safetensors_header(file, "some/path"); }), "some/path",
                   pieces...);
  };
  rejected({}, "0 bytes");
  rejected(Bytes(7, 0), "7 bytes", "at least 8");
  rejected(Bytes(8, 0), "first byte");
  rejected(Bytes(8, 255), "18446744073709551615", "100000000");
  rejected({1, 0xe1, 0xf5, 5, 0, 0, 0, 0, '{', '}'}, "100000001", "100000000");
  rejected({0, 0xe1, 0xf5, 5, 0, 0, 0, 0, '{', '}'}, "truncated", "100000000", "only 2");
  rejected({3, 0, 0, 0, 0, 0, 0, 0, '{', '}'}, "truncated", "3 bytes", "only 2");
  check_rejected("[]", 0, "first byte");
  check_rejected(" {}", 0, "first byte");
  check_rejected("\xef\xbb\xbf{}", 0, "first byte");
  check_rejected(std::string_view("{}\0", 3), 0, "NUL");
  check_rejected("{}", 3, "3 bytes after its last tensor");
  check_rejected("{} {}", 0, "not valid JSON", "byte 4");
  check_rejected("{", 0, "not valid JSON");
  check_rejected("{\"\xff\":1}", 0, "UTF-8");
  check_rejected("{\"\xc3\":1}", 0, "UTF-8");
  check_rejected(R"({"\ud800":1})", 0, "not valid JSON");
  check_rejected("{} \xc3\xa9", 0, "not valid JSON");
}

TEST_CASE("safetensors: the grammar of the header") {
  check_rejected(R"({"a":1})", 0, "'a'", "a number", "expected an object");
  check_rejected(R"({"a":[]})", 0, "'a'", "an array", "expected an object");
  check_rejected(R"({"a":null})", 0, "'a'", "null");
  check_rejected(R"({"a":true})", 0, "'a'", "true or false");
  check_rejected(R"({"a":{}})", 0, "'a'", "no field 'dtype'");
  check_rejected(R"({"a":{"dtype":"F32"}})", 0, "'a'", "no field 'shape'");
  check_rejected(R"({"a":{"dtype":"F32","shape":[]}})", 0, "'a'", "no field 'data_offsets'");
  check_rejected(R"({"a":{"strides":[]}})", 0, "'a'", "unknown field 'strides'");
  check_rejected(R"({"a":{"dtype":"F32","dtype":"F32"}})", 0, "'a'", "'dtype' twice");
  check_rejected(one_tensor("1", "[]", "[0,4]"), 4, "'a'", "a number as its dtype");
  check_rejected(one_tensor("[]", "[]", "[0,4]"), 4, "'a'", "an array as its dtype");
  check_rejected(one_tensor(R"("F32")", "1", "[0,4]"), 4, "'a'", "a number as its shape");
  check_rejected(one_tensor(R"("F32")", "{}", "[0,4]"), 4, "'a'", "an object as its shape");
  check_rejected(one_tensor(R"("F32")", "[[1]]", "[0,4]"), 4, "'a'", "an array inside its shape");
  check_rejected(one_tensor(R"("F32")", "[null]", "[0,4]"), 4, "'a'", "null inside its shape");
  check_rejected(one_tensor(R"("F32")", R"(["1"])", "[0,4]"), 4, "a string inside its shape");
  check_rejected(one_tensor(R"("F32")", "[]", "[0]"), 4, "'a'", "1 data_offsets, expected 2");
  check_rejected(one_tensor(R"("F32")", "[]", "[0,4,4]"), 4, "'a'", "more than 2 numbers");
  check_rejected(R"({"__metadata__":{"a":1}})", 0, "metadata value of 'a'", "expected a string");
  check_rejected(R"({"__metadata__":{"a":{}}})", 0, "metadata value of 'a'", "an object");
  check_rejected(R"({"__metadata__":[]})", 0, "__metadata__", "expected an object");
}

TEST_CASE("safetensors: duplicate keys") {
  const std::string a = R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  check_rejected("{" + a + "," + a + "}", 1, "'a' appears twice");
  check_rejected("{" + a + R"(,"\u0061":{}})", 1, "'a' appears twice");  // the same name, escaped
  check_rejected(R"({"__metadata__":{"k":"1","k":"2"}})", 0, "metadata key 'k' appears twice");
  check_rejected(R"({"__metadata__":{},"__metadata__":{}})", 0, "'__metadata__' appears twice");
}

TEST_CASE("safetensors: numbers") {
  const auto shape = [](std::string_view text) { return one_tensor(R"("U8")", text, "[0,1]"); };
  check_rejected(shape("[-1]"), 1, "'a'", "negative number (-1)", "shape");
  check_rejected(shape("[-0]"), 1, "'a'", "negative number (-0)", "shape");
  check_rejected(shape("[1.0]"), 1, "'a'", "'1.0'", "whole number");
  check_rejected(shape("[1e0]"), 1, "'a'", "'1e0'", "whole number");
  check_rejected(shape("[18446744073709551616]"), 1, "'a'", "'18446744073709551616'");
  check_rejected(shape("[9223372036854775808]"), 1, "'a'", "does not fit 63 bits");
  check_rejected(shape("[1,1,1,1,1,1,1]"), 1, "'a'", "more than 6 numbers in its shape",
                 "most dimensions");
  check_rejected(shape("[1e999]"), 1, "not valid JSON");
  check_rejected(shape("[4294967296,4294967296]"), 1, "'a'", "overflow 64 bits");
  check_rejected(one_tensor(R"("F64")", "[4611686018427387904]", "[0,1]"), 1, "overflow 64 bits");
  check_rejected(one_tensor(R"("U8")", "[1]", "[1,0]"), 1, "'a'", "ends at 0", "begins at 1");
  check_rejected(one_tensor(R"("U8")", "[1]", "[-1,0]"), 1, "negative number", "data_offsets");
  check_rejected(one_tensor(R"("F32")", "[2,3]", "[0,20]"), 20, "'a'", "[2, 3]", "needs 24 bytes",
                 "span 20");
}

TEST_CASE("safetensors: element types") {
  check_rejected(one_tensor(R"("Q4")", "[1]", "[0,1]"), 1, "'a'", "'Q4'", "unknown", "BF16");
  check_rejected(one_tensor(R"("f32")", "[1]", "[0,4]"), 4, "'f32'", "unknown");
  for (const char* dtype : {"F8_E4M3", "I8", "I16", "BOOL", "U64"}) {
    check_rejected(one_tensor(fmt::format("\"{}\"", dtype), "[1]", "[0,1]"), 1, "'a'", dtype,
                   "does not support", "convert");
  }
}

TEST_CASE("safetensors: holes, overlaps and ends") {
  const auto two = [](const char* a, const char* b) {
    return fmt::format(R"({{"a":{{"dtype":"U8","shape":[2],"data_offsets":{}}},)"
                       R"("b":{{"dtype":"U8","shape":[2],"data_offsets":{}}}}})",
                       a, b);
  };
  CHECK(parse(two("[2,4]", "[0,2]"), 4).entries.size() == 2);
  check_rejected(two("[0,2]", "[1,3]"), 3, "'b' begins at 1", "inside tensor 'a'", "ends at 2");
  check_rejected(two("[0,2]", "[0,2]"), 2, "inside tensor");
  check_rejected(two("[0,2]", "[3,5]"), 5, "bytes 2 to 3", "before tensor 'b'");
  check_rejected(two("[1,3]", "[3,5]"), 5, "bytes 0 to 1", "before tensor 'a'");
  check_rejected(two("[0,2]", "[2,4]"), 5, "1 bytes after its last tensor");
  check_rejected(two("[0,2]", "[2,4]"), 3, "truncated", "need 4 bytes", "has 3");
}

TEST_CASE("safetensors: a nesting bomb is refused at its first level") {
  for (const char* open : {"[", "{\"a\":"}) {
    std::string bomb = "{\"a\":";
    for (int i = 0; i < 1'000'000; ++i) bomb += open;
    check_rejected(bomb, 0, "'a'");
  }
}

TEST_CASE("safetensors: a message shows hostile names short and printable") {
  const std::string message =
      error_of([] { parse("{\"" + std::string(5000, 'x') + R"(\u001b\u0000":1})", 0); });
  CHECK(message.size() < 400);
  check_rejected(R"({"\u001b[31m":1})", 0, R"('\x1b[31m')");
  CHECK(error_of([] { parse("{\"" + std::string(5000, '\xff'), 0); }).size() < 400);
}

TEST_CASE("safetensors: what cannot be written") {
  const TempDirectory directory;
  const std::string path = directory.path("a");
  const std::vector<float> values{1, 2};
  const auto rejected = [&](const std::vector<SafetensorsItem>& items, const auto&... pieces) {
    check_mentions(error_of([&] { write_safetensors(path, items); }), path, pieces...);
  };
  const SafetensorsItem good{"a", DType::f32, Shape{2}, raw(values)};
  rejected({good, good}, "\"a\"", "twice");
  rejected({{"__metadata__", DType::f32, Shape{2}, raw(values)}}, "reserved");
  rejected({{"a", DType::f32, Shape{3}, raw(values)}}, "\"a\"", "[3]",
           "needs 3 elements of 4 bytes", "got 8");
  rejected({{"a", DType::f64, Shape{std::int64_t{1} << 61}, {}}}, "elements of 8 bytes", "got 0");
  rejected({{"a\xff", DType::f32, Shape{2}, raw(values)}}, "UTF-8", R"("a\ufffd")");
  CHECK(directory.file_count() == 0);
}

TEST_CASE("safetensors: a file cut at any byte is refused") {
  const TempDirectory directory;
  const std::string path = directory.path("a");
  const std::vector<float> values{1, 2};
  const std::vector<SafetensorsItem> items{{"a", DType::f32, Shape{2}, raw(values)}};
  write_safetensors(path, items);
  const Bytes whole = read_file(path);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    CAPTURE(size);
    put_file(path, Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)));
    check_mentions(error_of([&] { SafetensorsFile::open(path); }), path);
  }
}

TEST_CASE("safetensors: damaged headers are refused or read, never worse") {
  const std::string text =
      R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
      R"("b":{"dtype":"BF16","shape":[3],"data_offsets":[8,14]}})";
  const std::string_view alphabet = "{}[]\",:0129-.eE\\u\x80\xff aF";
  const RandomStream random(1, "test", "mutate");
  std::uint64_t draw = 0;
  int accepted = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string header = text;
    const std::uint64_t edits = 1 + random.below(draw++, 3);
    for (std::uint64_t edit = 0; edit < edits; ++edit) {
      const std::size_t at = random.below(draw++, header.size());
      const char c = alphabet[random.below(draw++, alphabet.size())];
      switch (random.below(draw++, 4)) {
        case 0: header[at] = c; break;
        case 1: header.insert(at, 1, c); break;
        case 2: header.erase(at, 1 + random.below(draw++, 5)); break;
        default: header.insert(at, header.substr(random.below(draw++, header.size()), 20));
      }
      if (header.empty()) header = "{";
    }
    Bytes file = file_of(header, 14);
    if (random.below(draw++, 10) == 0) file[random.below(draw++, 8)] ^= 1u;
    try {
      const SafetensorsHeader parsed = parse_safetensors_header(file, "fuzz");
      for (const SafetensorsEntry& entry : parsed.entries) {
        REQUIRE(entry.offset + entry.size <= file.size());
        REQUIRE(entry.size ==
                static_cast<std::uint64_t>(entry.shape.numel()) * size_of(entry.dtype));
      }
      ++accepted;
    } catch (const Error&) {
    }
  }
  CHECK(accepted > 0);  // some edits only touch a name
  CHECK(accepted < 10'000);
}

// Of tests/golden/check_safetensors.py, which checks that the library loads both files.
TEST_CASE("safetensors: a file of the library, and the bytes that it is known to load") {
  const std::string golden = std::string(SHERD_TEST_DATA) + "/golden/safetensors/";
  const SafetensorsFile file = SafetensorsFile::open(golden + "python.safetensors");
  CHECK(file.entries().size() == 10);
  const auto has = [&](const char* name, DType dtype, const Shape& shape, const auto& values) {
    const std::string text = name;
    CAPTURE(text);
    const SafetensorsEntry* entry = file.find(text);
    REQUIRE(entry != nullptr);
    CHECK(entry->dtype == dtype);
    CHECK(entry->shape == shape);
    CHECK(std::ranges::equal(file.bytes(*entry), raw(values)));
  };
  const auto third = [](double value) { return value / 3; };
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  has("f64", DType::f64, Shape{2, 3},
      std::vector<double>{third(0), third(1), third(2), third(3), third(4), third(5)});
  has("f32", DType::f32, Shape{4}, std::vector<float>{1.5f, -0.0f, kInfinity, -kInfinity});
  has("f16", DType::f16, Shape{1, 2}, std::vector<f16>{f16(0.1f), f16(65504.0f)});
  has("i64", DType::i64, Shape{2}, std::vector<std::int64_t>{-1, std::int64_t{1} << 40});
  has("i32", DType::i32, Shape{2, 1}, std::vector<std::int32_t>{7, -8});
  has("u8", DType::u8, Shape{5}, std::vector<std::uint8_t>{0, 1, 2, 3, 4});
  has("scalar", DType::f64, Shape{}, std::vector<double>{2.5});
  has("empty", DType::f32, Shape{0, 4}, std::vector<float>{});
  has("a \"quoted\" \\ name", DType::f32, Shape{1}, std::vector<float>{1.0f});
  has("größe", DType::f64, Shape{2}, std::vector<double>{0.0, 0.0});

  const TempDirectory folder;
  std::vector<SafetensorsItem> items;
  for (const SafetensorsEntry& entry : file.entries()) {
    items.push_back({entry.name, entry.dtype, entry.shape, file.bytes(entry)});
  }
  write_safetensors(folder.path("again"), items, {{"format", "pt"}, {"note", "ä\n"}});
  CHECK(read_file(folder.path("again")) == read_file(golden + "sherd.safetensors"));
}
