// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/runtime/io/zip.h>

#include <algorithm>

#include "io_support.h"
#include "zip_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr std::uint32_t kLocal = 0x04034b50, kDirectory = 0x02014b50, kEnd = 0x06054b50,
                        kEnd64 = 0x06064b50, kLocator = 0x07064b50;

// Where the how-manieth header of a kind begins.
std::size_t header(const Bytes& bytes, std::uint32_t signature, int which = 0) {
  Bytes pattern;
  put_number(pattern, signature, 4);
  auto at = bytes.begin();
  for (;; ++at) {
    at = std::search(at, bytes.end(), pattern.begin(), pattern.end());
    REQUIRE(at != bytes.end());
    if (which-- == 0) return static_cast<std::size_t>(at - bytes.begin());
  }
}

void patch(Bytes& bytes, std::size_t at, std::uint64_t value, int width) {
  Bytes digits;
  put_number(digits, value, width);
  std::copy(digits.begin(), digits.end(), bytes.begin() + static_cast<std::ptrdiff_t>(at));
}

std::string refusal(const Bytes& bytes) {
  return error_of([&] { ZipArchive(bytes, "a.zip"); });
}

Bytes text_of(const ZipArchive& archive, const char* name, std::uint64_t max_bytes = 1 << 20) {
  const ZipEntry* entry = archive.find(name);
  REQUIRE(entry != nullptr);
  Bytes room;
  const auto bytes = archive.read(*entry, max_bytes, room);
  return Bytes(bytes.begin(), bytes.end());
}

const Bytes kLong(5000, 'x');

Bytes two() {
  return make_zip({{"d/stored", bytes_of("hello")}, {"d/packed", kLong, true}});
}

}  // namespace

TEST_CASE("zip: stored and deflated entries, with and without zip64 and a comment") {
  for (const bool zip64 : {false, true}) {
    for (const char* comment :
         {"", "a comment", "PK\5\6 in a comment, of no use as an end record"}) {
      const Bytes bytes = make_zip(
          {{"d/stored", bytes_of("hello")}, {"d/", {}}, {"d/packed", kLong, true}, {"none", {}}},
          zip64, comment);
      CHECK(is_zip(bytes));
      const ZipArchive archive(bytes, "a.zip");
      REQUIRE(archive.entries().size() == 4);
      CHECK(archive.entries()[1].name == "d/");
      CHECK(archive.find("stored") == nullptr);
      CHECK(text_of(archive, "d/stored") == bytes_of("hello"));
      CHECK(text_of(archive, "d/packed") == kLong);
      CHECK(text_of(archive, "none").empty());
      const auto view = archive.stored(*archive.find("d/stored"));
      CHECK(Bytes(view.begin(), view.end()) == bytes_of("hello"));
      CHECK((view.data() > bytes.data() && view.data() < bytes.data() + bytes.size()));
      check_mentions(error_of([&] { (void)archive.stored(*archive.find("d/packed")); }), "a.zip",
                     "'d/packed'", "compressed");
    }
  }
  CHECK(ZipArchive(make_zip({}), "a.zip").entries().empty());
  CHECK(is_zip(make_zip({})));
  CHECK(!is_zip(bytes_of("PK")));
  CHECK(!is_zip(bytes_of("PK\1\2 and more")));
}

TEST_CASE("zip: what is cut short or damaged") {
  const Bytes whole = two();
  check_mentions(refusal({}), "a.zip", "0 bytes");
  for (std::size_t size = 22; size < whole.size(); ++size) {
    check_mentions(refusal(Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size))),
                   "a.zip", "truncated");
  }
  Bytes changed = whole;
  const std::size_t data = header(whole, kLocal) + 30 + 8 + 6;
  CHECK(changed[data] == 'h');
  changed[data] = 'j';
  check_mentions(error_of([&] { text_of(ZipArchive(changed, "a.zip"), "d/stored"); }), "'d/stored'",
                 "CRC-32", "fetch it again");
  changed = whole;
  changed[header(whole, kLocal, 1) + 30 + 8 + 6 + 3] ^= 0xff;
  check_mentions(error_of([&] { text_of(ZipArchive(changed, "a.zip"), "d/packed"); }),
                 "'d/packed'");
}

TEST_CASE("zip: sizes are limits, before memory is taken and while inflating") {
  const Bytes whole = two();
  check_mentions(error_of([&] { text_of(ZipArchive(whole, "a.zip"), "d/packed", 4999); }),
                 "'d/packed'", "5000 bytes", "more than the 4999 allowed");
  const std::size_t entry = header(whole, kDirectory, 1);
  for (const std::uint64_t size : {0u, 1u, 4999u, 5001u}) {  // inflates to 5000
    Bytes changed = whole;
    patch(changed, entry + 24, size, 4);
    check_mentions(error_of([&] { text_of(ZipArchive(changed, "a.zip"), "d/packed"); }),
                   "does not inflate", std::to_string(size));
  }
  Bytes changed = whole;
  patch(changed, entry + 24, 1'000'000, 4);
  check_mentions(error_of([&] { text_of(ZipArchive(changed, "a.zip"), "d/packed"); }),
                 "cannot have 1000000 bytes");
}

TEST_CASE("zip: headers that lie") {
  const Bytes whole = two();
  const std::size_t first = header(whole, kDirectory), second = header(whole, kDirectory, 1),
                    local = header(whole, kLocal), end = header(whole, kEnd);
  struct Lie {
    std::size_t at;
    std::uint64_t value;
    int width;
    std::vector<std::string> said;
  };
  const std::vector<Lie> lies{
      {first + 8, 1, 2, {"'d/stored'", "encrypted"}},
      {first + 10, 12, 2, {"'d/stored'", "method 12"}},
      {first + 10, 8, 2, {"'d/stored'", "another method"}},
      {local + 6, 2, 2, {"'d/stored'", "other flags"}},
      {local + 30, 'x', 1, {"'d/stored'", "another name"}},
      {local + 26, 7, 2, {"'d/stored'", "another name"}},
      {local + 28, 60000, 2, {"'d/stored'", "runs into the directory"}},
      {first + 24, 6, 4, {"'d/stored'", "5 bytes in the file and 6"}},
      {second + 20, 5000, 4, {"'d/packed'", "5000 bytes", "before the directory"}},
      {first + 42, 3, 4, {"'d/stored'", "begin at 3"}},
      {first + 42, 0xfffffff0, 4, {"'d/stored'", "begin at 4294967280"}},
      {first + 34, 1, 2, {"'d/stored'", "another disk"}},
      {first, 0, 4, {"entry 1 of 2", "missing"}},
      {second + 30, 1, 2, {"entry 2 of 2", "past the end"}},
      {end + 4, 1, 2, {"several parts"}},
      {end + 8, 1, 2, {"several parts"}},
      {end + 16, whole.size(), 4, {"does not lie before"}},
      {end + 12, 200, 4, {"directory of 200 bytes", "does not lie before"}},
  };
  for (const Lie& lie : lies) {
    Bytes changed = whole;
    patch(changed, lie.at, lie.value, lie.width);
    const std::string message = refusal(changed);
    check_mentions(message, "a.zip");
    for (const std::string& piece : lie.said) check_mentions(message, piece);
  }
  Bytes changed = whole;  // more entries than are there, and fewer
  patch(changed, end + 8, 3, 2);
  patch(changed, end + 10, 3, 2);
  check_mentions(refusal(changed), "3 entries do not fit");
  patch(changed, end + 8, 1, 2);
  patch(changed, end + 10, 1, 2);
  check_mentions(refusal(changed), "follow the last entry");
}

TEST_CASE("zip: zip64 records that lie") {
  const Bytes whole = make_zip({{"a", bytes_of("hello")}, {"b", bytes_of("you")}}, true);
  const std::size_t record = header(whole, kEnd64), locator = header(whole, kLocator),
                    first = header(whole, kDirectory);
  const auto changed = [&](std::size_t at, std::uint64_t value, int width) {
    Bytes bytes = whole;
    patch(bytes, at, value, width);
    return refusal(bytes);
  };
  check_mentions(changed(locator + 8, record + 1, 8), "zip64 end record at", "found none");
  check_mentions(changed(locator + 8, ~std::uint64_t{0}, 8), "found none");
  check_mentions(changed(locator + 16, 2, 4), "several parts");
  check_mentions(changed(record + 24, 3, 8), "several parts");
  check_mentions(changed(record + 48, ~std::uint64_t{0} - 5, 8), "does not lie before");
  check_mentions(changed(first + 46 + 1 + 2, 25, 2), "'a'", "longer than its room");
  check_mentions(changed(first + 46 + 1, 9, 2), "'a'", "4294967295");  // no zip64 field any more
  const std::uint64_t huge = ~std::uint64_t{0} - 3;
  Bytes bytes = whole;
  patch(bytes, first + 46 + 1 + 4, huge, 8);
  patch(bytes, first + 46 + 1 + 12, huge, 8);
  check_mentions(refusal(bytes), "'a'", "more than lie before");
}

TEST_CASE("zip: names that lead out, and entries that overlap or come twice") {
  for (const std::string name : {"/a", "..", "../a", "a/../b", "a/..", "a\\b", ""}) {
    check_mentions(refusal(make_zip({{name, {}}})), "entry name");
  }
  check_mentions(refusal(make_zip({{std::string("a\0b", 3), {}}})), "'a\\x00b'", "NUL");
  CHECK(ZipArchive(make_zip({{"a..b/...", {}}, {".data/x", {}}}), "a.zip").entries().size() == 2);
  check_mentions(refusal(make_zip({{"a", {}}, {"a", {}}})), "'a' appears twice");

  // The second entry's own header, inside the first's data.
  Bytes inner = make_zip({{"b", bytes_of("inner")}});
  inner.resize(header(inner, kDirectory));
  Bytes whole = make_zip({{"a", inner}, {"b", bytes_of("inner")}});
  patch(whole, header(whole, kDirectory, 1) + 42, header(whole, kLocal, 1), 4);
  check_mentions(refusal(whole), "'a' and 'b' overlap");
  // Two names for one place.
  Bytes same = make_zip({{"a", bytes_of("x")}, {"b", bytes_of("x")}});
  const std::size_t second = header(same, kDirectory, 1);
  patch(same, second + 42, 0, 4);
  patch(same, second + 46, 'a', 1);
  check_mentions(refusal(same), "'a' appears twice");
}
