// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/runtime/io/unpickler.h>

#include <array>
#include <cmath>

#include "io_support.h"
#include "pickle_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr std::array<std::string_view, 1> kCallable{"torch.Size"};
constexpr std::array<std::string_view, 1> kConstant{"torch.float32"};
const PickleNames kNames{.callable = kCallable, .constant = kConstant, .advice = "do otherwise"};

PickleTree read(const Bytes& bytes) {
  return read_pickle(bytes, "a.pkl", kNames);
}
std::string refusal(const Bytes& bytes) {
  return error_of([&] { read(bytes); });
}

// The value as Python would print it, so that a test says it in a line.
std::string text_of(const PickleTree& tree, PickleId id) {
  const PickleValue& value = tree[id];
  const auto items = [&](const std::vector<PickleId>& ids) {
    std::string out;
    for (const PickleId item : ids) out += (out.empty() ? "" : ", ") + text_of(tree, item);
    return out;
  };
  if (const auto* x = std::get_if<bool>(&value)) return *x ? "True" : "False";
  if (const auto* x = std::get_if<std::int64_t>(&value)) return std::to_string(*x);
  if (const auto* x = std::get_if<double>(&value)) return fmt::format("{}", *x);
  if (const auto* x = std::get_if<std::string_view>(&value)) return "'" + std::string(*x) + "'";
  if (const auto* x = std::get_if<PickleBytes>(&value)) {
    return "b'" + std::string(x->bytes.begin(), x->bytes.end()) + "'";
  }
  if (const auto* x = std::get_if<PickleBigInteger>(&value)) {
    return fmt::format("int of {} bytes", x->bytes.size());
  }
  if (const auto* x = std::get_if<PickleTuple>(&value)) return "(" + items(x->items) + ")";
  if (const auto* x = std::get_if<PickleList>(&value)) return "[" + items(x->items) + "]";
  if (const auto* x = std::get_if<PickleSet>(&value)) return "set(" + items(x->items) + ")";
  if (const auto* x = std::get_if<PickleDict>(&value)) {
    std::string out;
    for (const auto& [key, item] : x->items) {
      out += (out.empty() ? "" : ", ") + text_of(tree, key) + ": " + text_of(tree, item);
    }
    return "{" + out + "}";
  }
  if (std::holds_alternative<PickleGlobal>(value)) return tree.global_name(id);
  if (const auto* x = std::get_if<PickleCall>(&value)) {
    const std::string state =
        std::holds_alternative<PickleNone>(tree[x->state]) ? "" : "." + text_of(tree, x->state);
    return text_of(tree, x->callee) + text_of(tree, x->arguments) + state;
  }
  if (const auto* x = std::get_if<PicklePersistent>(&value)) return "@" + text_of(tree, x->id);
  return "None";
}

std::string parsed(const Bytes& bytes) {
  const PickleTree tree = read(bytes);
  CHECK(tree.used == bytes.size());
  return text_of(tree, tree.root);
}
std::string parsed(std::string_view operations) {
  return parsed(Pickle(4).op(operations).done());
}

}  // namespace

TEST_CASE("pickle: plain values") {
  CHECK(parsed("N") == "None");
  CHECK(parsed("\x88") == "True");
  CHECK(parsed("\x89") == "False");
  CHECK(parsed(std::string_view("J\xfe\xff\xff\xff", 5)) == "-2");
  CHECK(parsed("K\xff") == "255");
  CHECK(parsed("M\xff\xff") == "65535");
  CHECK(parsed(std::string_view("\x8a\0", 2)) == "0");
  CHECK(parsed("\x8a\x01\xff") == "-1");
  CHECK(parsed(std::string_view("\x8a\x02\xff\0", 4)) == "255");
  CHECK(parsed("\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f") == "9223372036854775807");
  CHECK(parsed("\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x01") == "int of 9 bytes");
  CHECK(parsed(std::string_view("\x8b\x01\0\0\0\x05", 6)) == "5");
  CHECK(parsed(std::string_view("G\xbf\xe0\0\0\0\0\0\0", 9)) == "-0.5");
  CHECK(parsed("\x8c\x02\xc3\xa9") == "'\xc3\xa9'");
  CHECK(parsed(std::string_view("X\x02\0\0\0ab", 7)) == "'ab'");
  CHECK(parsed(std::string_view("\x8d\x01\0\0\0\0\0\0\0a", 10)) == "'a'");
  CHECK(parsed("U\x02hi") == "'hi'");
  CHECK(parsed(std::string_view("T\x02\0\0\0hi", 7)) == "'hi'");
  CHECK(parsed("C\x02hi") == "b'hi'");
  CHECK(parsed(std::string_view("B\x02\0\0\0hi", 7)) == "b'hi'");
  CHECK(parsed(std::string_view("\x8e\x02\0\0\0\0\0\0\0hi", 11)) == "b'hi'");
  CHECK(parsed(std::string_view("\x96\x02\0\0\0\0\0\0\0hi", 11)) == "b'hi'");
}

TEST_CASE("pickle: containers, the memo and the stack") {
  CHECK(parsed(")") == "()");
  CHECK(parsed("K\1\x85") == "(1)");
  CHECK(parsed("K\1K\2\x86") == "(1, 2)");
  CHECK(parsed("K\1K\2K\3\x87") == "(1, 2, 3)");
  CHECK(parsed("(K\1K\2K\3K\4t") == "(1, 2, 3, 4)");
  CHECK(parsed("](K\1K\2eK\3a") == "[1, 2, 3]");
  CHECK(parsed("}(K\1K\2K\3K\4uK\5K\6s") == "{1: 2, 3: 4, 5: 6}");
  CHECK(parsed("\x8f(K\1K\2\x90") == "set(1, 2)");
  CHECK(parsed("(K\1K\2\x91") == "set(1, 2)");
  CHECK(parsed("K\7q\x05"
               "0]h\x05"
               "ah\x05"
               "a") == "[7, 7]");
  CHECK(parsed("K\7\x94"
               "0K\x08\x94"
               "0]h\1a") == "[8]");  // remembered, popped, recalled
  CHECK(parsed("K\1K\2"
               "0") == "1");
  CHECK(parsed("K\1(K\2K\3"
               "1") == "1");
  CHECK(parsed("K\1("
               "0") == "1");
  CHECK(parsed("K\1"
               "2\x86") == "(1, 1)");
  // What is shared is one value.
  const Bytes shared = Pickle().op("]q\1").op("K\1a").op("h\1").op("\x86").done();
  CHECK(read(shared).values.size() < 9);
}

TEST_CASE("pickle: names on the list are values, calls of them stay calls") {
  CHECK(parsed(Pickle().global("torch", "float32").done()) == "torch.float32");
  CHECK(parsed(Pickle(4).str("torch").str("float32").op("\x93").done()) == "torch.float32");
  CHECK(parsed(Pickle().global("torch", "Size").op("K\1\x85\x85R").done()) == "torch.Size((1))");
  CHECK(parsed(Pickle().str("a").op("Q").done()) == "@'a'");
  CHECK(parsed(Pickle().global("collections", "OrderedDict").op(")RK\1K\2s").done()) == "{1: 2}");
  CHECK(parsed(Pickle().global("collections", "OrderedDict").op(")R}K\1K\2sb").done()) == "{}");
  CHECK(parsed(Pickle()
                   .global("collections", "defaultdict")
                   .global("__builtin__", "list")
                   .op("\x85RK\1K\2s")
                   .done()) == "{1: 2}");
  CHECK(parsed(Pickle().global("argparse", "Namespace").op(")\x81}K\1K\2sb").done()) ==
        "argparse.Namespace().{1: 2}");
  CHECK(parsed(Pickle().global("builtins", "set").op("](K\1e\x85R").done()) == "builtins.set([1])");
}

TEST_CASE("pickle: any other name is refused, by name") {
  const std::pair<const char*, const char*> hostile[]{{"os", "system"},
                                                      {"posix", "system"},
                                                      {"builtins", "eval"},
                                                      {"builtins", "getattr"},
                                                      {"builtins", "exec"},
                                                      {"__builtin__", "__import__"},
                                                      {"torch.serialization", "load"},
                                                      {"torch", "Size2"},
                                                      {"torch.Size", "x"},
                                                      {"subprocess", "Popen"}};
  for (const auto& [module, name] : hostile) {
    const std::string whole = std::string(module) + "." + name;
    const Bytes by_line = Pickle().global(module, name).str("x").op("\x85R").done();
    const Bytes by_stack = Pickle(4).str(module).str(name).op("\x93)R").done();
    const Bytes by_inst = Pickle().op("(i").op(module).op("\n").op(name).op("\n").done();
    for (const Bytes& bytes : {by_line, by_stack, by_inst}) {
      check_mentions(refusal(bytes), "'a.pkl'", "wants to build " + whole,
                     "could run code; do otherwise");
    }
  }
  // Split elsewhere it is another name.
  check_mentions(refusal(Pickle().global("torch._utils", "evil\x01").done()),
                 "torch._utils.evil\\x01");
  check_mentions(refusal(Pickle().global(std::string(300, 'm'), "n").done()), "mmm...");
  // A constant is no function, an object has no attributes to set but a call's.
  check_mentions(refusal(Pickle().global("torch", "float32").op(")R").done()),
                 "torch.float32, which is not a function");
  check_mentions(refusal(Pickle().global("torch", "Size").op(")\x81").done()), "bare torch.Size");
  check_mentions(refusal(Pickle().op("K\1)R").done()), "calls an int");
  check_mentions(refusal(Pickle().global("torch", "Size").op("]R").done()), "calls with a list");
  check_mentions(refusal(Pickle().op("]}b").done()), "attributes of a list");
  check_mentions(refusal(Pickle().global("collections", "OrderedDict").op("]\x85R").done()),
                 "OrderedDict gets 1 arguments");
  check_mentions(refusal(Pickle(4).op("K\1K\2\x93").done()), "made of an int and an int");
}

TEST_CASE("pickle: operations that are not read are named") {
  // INT, LONG, FLOAT, STRING, UNICODE, PUT, GET, LIST, DICT, PERSID, OBJ, EXT1, NEWOBJ_EX,
  // NEXT_BUFFER, READONLY_BUFFER, and no operation at all
  for (const std::string_view op : {"I", "L", "F", "S", "V", "p", "g", "l", "d", "P", "o", "\x82",
                                    "\x83", "\x84", "\x92", "\x97", "\x98", "\xff", "\n"}) {
    const std::string code = fmt::format("0x{:02x}", static_cast<unsigned char>(op[0]));
    check_mentions(refusal(Pickle(4).op("K\1").op(op).op("1\n").done()), "'a.pkl', byte 4",
                   "operation " + code, "do otherwise");
  }
}

TEST_CASE("pickle: what is damaged is an error wherever it is cut") {
  const Bytes whole = Pickle(4)
                          .op("}(")
                          .str("name")
                          .op("](K\1M\1\1J\1\1\1\1e")
                          .str("t")
                          .global("torch", "Size")
                          .op("K\2\x85\x85R\x94"
                              "C\3abcG\1\2\3\4\5\6\7\x08\x94u")
                          .done();
  CHECK(parsed(whole).starts_with("{'name': [1, 257, 16843009], 't': torch.Size((2)), b'abc': "));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    check_mentions(refusal(Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size))),
                   "a.pkl");
  }
  const std::string_view bad[]{
      "",  // nothing on the stack
      "0",
      "1",
      "t",
      "\x85",
      "\x86",
      "a",
      "e",
      "s",
      "u",
      "R",
      "b",
      "Q",
      "2",
      "\x90",
      "\x91",
      "\x93",
      "(K\1",      // a mark is left
      "K\1K\2",    // two values are left
      "(\x85",     // takes from below the mark
      "K\1(\x94",  // remembers what is below the mark
      "]K\1(a",
      "](K\1s",
      "K\1(K\1e",   // adds to an int
      "}(K\1u",     // a key without a value
      "h\1",        // never remembered
      "K\1q\2h\1",  // a hole in the memo
      "\x8c\x7f"
      "a",
  };
  for (const std::string_view operations : bad) {
    CAPTURE(operations);
    check_mentions(refusal(Pickle(4).op(operations).done()), "a.pkl");
  }
  check_mentions(refusal(Pickle(1).op("N").done()), "protocol 1, expected 2 to 5");
  check_mentions(refusal(Pickle(6).op("N").done()), "protocol 6");
  check_mentions(refusal(bytes_of("}.")), "expected 0x80");
  check_mentions(refusal(Bytes(kMaxPickle + 1)), "33554433 bytes, at most 33554432");
  check_mentions(refusal(Pickle(4).op("\x95").number(100, 8).op("N").done()), "frame of 100 bytes");
  check_mentions(refusal(Pickle().op("K\1").put(0xffffffff).done()), "number 4294967295");
  check_mentions(refusal(Pickle().op("K\1").put(100).done()), "number 100");
  check_mentions(refusal(Pickle().op("X").number(0xffffffff, 4).op("abc").done()),
                 "4294967295 bytes are expected, 4 follow");
  check_mentions(refusal(Pickle().op("\x8d").number(~std::uint64_t{0}, 8).done()), "ends early");
}

TEST_CASE("pickle: depth, sharing and cycles cost no more than their bytes") {
  constexpr int kDeep = 2'000'000;
  Pickle lists, tuples, marks;
  for (int i = 0; i < kDeep; ++i) {
    lists.op("]");
    tuples.op(i == 0 ? ")" : "\x85");
    marks.op("(");
  }
  for (int i = 1; i < kDeep; ++i) lists.op("a");
  CHECK(read(lists.done()).values.size() == 4u + kDeep);
  CHECK(read(tuples.done()).values.size() == 3u + kDeep);
  check_mentions(refusal(marks.done()), "not there");

  // Each list holds the one before ten times: 10^1000 leaves.
  Pickle laughs;
  laughs.op("]").put(0).op("0");
  for (std::uint64_t i = 1; i <= 1000; ++i) {
    laughs.op("](");
    for (int times = 0; times < 10; ++times) laughs.get(i - 1);
    laughs.op("e").put(i).op("0");
  }
  laughs.get(1000);
  CHECK(read(laughs.done()).values.size() < 1010);

  const PickleTree cycle = read(Pickle().op("]q\1h\1a").done());  // a list of itself
  CHECK(cycle.get<PickleList>(cycle.root)->items[0] == cycle.root);
}

TEST_CASE("pickle: the last of two equal keys counts") {
  const Bytes bytes = Pickle().op("}(").str("a").op("K\1").str("a").op("K\2u").done();
  const PickleTree tree = read(bytes);
  const auto& dict = *tree.get<PickleDict>(tree.root);
  CHECK(*tree.get<std::int64_t>(*tree.find(dict, "a")) == 2);
  CHECK(tree.find(dict, "b") == nullptr);
}
