// SPDX-License-Identifier: Apache-2.0
// Checkpoints that are damaged, edited or of another kind: one clear error each, before any of it
// is used. What ranks write and read is in tests/distributed/checkpoint_test.cpp.
#include <doctest/doctest.h>
#include <sherd/comm/checkpoint/reader.h>
#include <sherd/comm/checkpoint/shard_writer.h>
#include <sherd/comm/checkpoint/store.h>

#include <functional>

#include "io_support.h"

using namespace sherd;
using namespace sherd::test;
namespace fs = std::filesystem;

namespace {

constexpr std::int64_t kPieces = 3;

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void put_text(const std::string& path, const std::string& text) {
  put_file(path, bytes_of(text));
}

Bytes numbers(std::int64_t bytes, int salt) {
  Bytes all(static_cast<std::size_t>(bytes));
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<std::uint8_t>(i * 7 + i / 251 + static_cast<std::size_t>(salt));
  }
  return all;
}

// "a" [2, 6] in three pieces of 4 in as many files, its state in the first file, "b" whole in the
// second.
CheckpointIndex write_checkpoint(const std::string& directory) {
  fs::create_directories(directory);
  std::vector<std::string> tables;
  for (int rank = 0; rank < kPieces; ++rank) {
    std::vector<CheckpointItem> items{{"a", "", DType::f32, Shape{2, 6}, rank * 4, 4}};
    if (rank == 0) items.push_back({"a", "exp_avg", DType::f32, Shape{2, 6}, 0, 12});
    if (rank == 1) items.push_back({"b", "", DType::bf16, Shape{5}, 0, 5});
    CheckpointShardWriter writer(directory, rank, kPieces, items, {});
    for (std::size_t i = 0; i < items.size(); ++i) {
      writer.write(i, numbers(static_cast<std::int64_t>(items[i].bytes()), rank));
    }
    tables.push_back(writer.commit());
  }
  CheckpointIndex index = merge_checkpoint_tables(tables);
  index.producer = "test";
  index.step = 7;
  index.run = R"({"steps":7})";
  put_text(directory + "/index.json", to_json(index));
  return index;
}

CheckpointIndex parse(const std::string& text) {
  return parse_checkpoint_index(text, "some/index.json");
}

// With the checksum that the text should have: what is refused is what it says.
std::string sealed(std::string text) {
  constexpr std::size_t kPlace = 9, kDigits = 16;
  text.replace(kPlace, kDigits, std::string(kDigits, '0'));
  return text.replace(kPlace, kDigits, fmt::format("{:016x}", checkpoint_checksum(bytes_of(text))));
}

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  const auto at = text.find(what);
  REQUIRE_MESSAGE(at != std::string::npos, what);
  return text.replace(at, what.size(), by);
}

void flip(const std::string& path, std::uint64_t at) {
  std::string text = text_of(path);
  REQUIRE(at < text.size());
  text[at] = static_cast<char>(text[at] ^ 1);
  put_text(path, text);
}

}  // namespace

TEST_CASE("checkpoint index: it is read as it was written") {
  const TempDirectory folder;
  const CheckpointIndex written = write_checkpoint(folder.path());
  const std::string text = to_json(written);
  const CheckpointIndex read = parse(text);
  CHECK(to_json(read) == text);
  CHECK(sealed(text) == text);
  CHECK(read.step == 7);
  CHECK(read.run == R"({"steps":7})");
  REQUIRE(read.find("a") != nullptr);
  CHECK(read.find("a")->pieces.size() == kPieces);
  CHECK(read.find("a", "exp_avg")->key() == "optimizer.a.exp_avg");
  CHECK(read.find("b")->dtype == DType::bf16);
  CHECK(read.find("b", "exp_avg") == nullptr);
  CHECK(read.find("c") == nullptr);
}

TEST_CASE("checkpoint index: what is no index, of a newer version or edited is refused") {
  const TempDirectory folder;
  const std::string text = to_json(write_checkpoint(folder.path()));
  const auto refuses = [](const std::string& bad, const auto&... pieces) {
    CAPTURE(bad);
    check_mentions(error_of([&] { parse(bad); }),
                   "checkpoint index 'some/index.json': ", pieces...);
  };
  for (const char* bad : {"", "this is no JSON", "{", "\x00\xff", "[1, 2"}) {
    refuses(bad, "it is damaged: ");
  }
  refuses(text.substr(0, text.size() - 1), "it is damaged: ");
  refuses(text + "}", "it is damaged: ");
  for (const char* other : {"[]", "null", "7", "{}", R"({"format":3})", R"({"format":"other"})"}) {
    refuses(other, "it is not the index of a Sherd checkpoint");
  }
  const std::string newer = replaced(text, R"("version":1)", R"("version":2)");
  for (const std::string& of : {newer, sealed(newer)}) {
    refuses(of, "it has format version 2, this program reads up to 1", "newer version of Sherd");
  }
  refuses(replaced(text, R"("version":1)", R"("version":"1")"), "'version' of the index");
  refuses(R"({"format":"sherd checkpoint"})", "the index has no 'version'");
  refuses(R"({"format":"sherd checkpoint","version":1})", "its checksum is wrong");
  // Any byte that is changed, if the rest still is the JSON of an index.
  refuses(replaced(text, R"("step":7)", R"("step":8)"), "damaged or was edited");
  refuses(replaced(text, R"("steps":7)", R"("steps":9)"), "damaged or was edited");
  refuses(text + " ", "damaged or was edited");
  refuses(replaced(text, R"({"xxh3")", R"({ "xxh3")"), "damaged or was edited");
  for (std::size_t at = 0; at < text.size(); ++at) {
    std::string bad = text;
    bad[at] = static_cast<char>(bad[at] ^ 1);
    CAPTURE(at);
    CHECK(!error_of([&] { parse(bad); }).empty());
  }
}

TEST_CASE("checkpoint index: pieces that do not make up a tensor are refused") {
  const TempDirectory folder;
  const CheckpointIndex good = write_checkpoint(folder.path());
  const auto refuses = [&](const std::function<void(CheckpointIndex&)>& edit,
                           const auto&... pieces) {
    CheckpointIndex bad = good;
    edit(bad);
    check_mentions(error_of([&] { parse(to_json(bad)); }),
                   "checkpoint index 'some/index.json': ", pieces...);
  };
  const auto a = [](CheckpointIndex& index) -> CheckpointTensor& { return index.tensors[0]; };
  REQUIRE(good.tensors[0].key() == "a");
  const char* tensor = "tensor \"a\" [2, 6]";
  refuses([&](auto& i) { a(i).pieces.erase(a(i).pieces.begin() + 1); }, tensor,
          "expected a piece from element 4 on, got 4 from 8 on");
  refuses([&](auto& i) { a(i).pieces.pop_back(); }, tensor, "no file has the elements from 8 on");
  refuses([&](auto& i) { a(i).pieces.clear(); }, tensor, "no file has the elements from 0 on");
  refuses([&](auto& i) { a(i).pieces[1].first = 3; }, tensor, "got 4 from 3 on");
  refuses([&](auto& i) { a(i).pieces[0].numel = 5; }, "element 5 on, got 4 from 4 on");
  refuses([&](auto& i) { std::swap(a(i).pieces[0], a(i).pieces[1]); }, tensor, "from 4 on");
  refuses([&](auto& i) { a(i).pieces[2].numel = 5; }, tensor, "got 5 from 8 on");
  refuses([&](auto& i) { a(i).pieces[1].numel = 0; }, tensor, "got 0 from 4 on");
  refuses([&](auto& i) { a(i).pieces[0].offset = i.files[0].bytes - 15; }, "\"a\" has 4 elements",
          "rank-00000-of-00003.safetensors");
  refuses([&](auto& i) { a(i).pieces[0].offset = i.files[0].bytes + 1; }, "\"a\" has 4 elements");
  refuses([&](auto& i) { a(i).pieces[0].offset = 8; }, "\"a\" has 4 elements at byte 8");
  refuses([&](auto& i) { a(i).pieces[0].file = 3; }, "a piece in file number 3 of 3");
  refuses([&](auto& i) { a(i).pieces[0].checksums.clear(); }, "0 checksums, expected 1");
  refuses([&](auto& i) { a(i).pieces[0].checksums.push_back(1); }, "2 checksums, expected 1");
  refuses([&](auto& i) { i.tensors.push_back(i.tensors[0]); }, "tensor \"a\" is there twice");
  for (const char* name : {"", ".", "..", "/etc/passwd", "../other.safetensors", "a/b"}) {
    refuses([&](auto& i) { i.files[1].name = name; }, "is not a file of this directory");
  }
  refuses([&](auto& i) { i.files[1].name = i.files[0].name; }, "is there twice");
  refuses([&](auto& i) { i.files[1].header_bytes = i.files[1].bytes + 1; }, "are its header's");
}

TEST_CASE("checkpoint index: fields that are missing or of another kind are refused") {
  const TempDirectory folder;
  const std::string text = to_json(write_checkpoint(folder.path()));
  const auto refuses = [&](const std::string& what, const std::string& by, const auto&... pieces) {
    CAPTURE(by);
    check_mentions(error_of([&] { parse(sealed(replaced(text, what, by))); }),
                   "checkpoint index 'some/index.json': ", pieces...);
  };
  refuses(R"("step":7)", R"("step":-7)", "'step' of the index", "got -7");
  refuses(R"("step":7)", R"("step":7.5)", "'step' of the index", "got 7.5");
  refuses(R"("step":7)", R"("step":9300000000000000000)", "'step' of the index");
  refuses(R"("step":7)", R"("steq":7)", "the index has no 'step'");
  refuses(R"("producer":"test")", R"("producer":[])", "'producer' of the index is not a text");
  refuses(R"("block":4194304)", R"("block":4096)", "blocks of 4096 bytes, expected 4194304");
  refuses(R"("files":[)", R"("files":{},"old":[)", "'files' of the index is not a list");
  refuses(R"("files":[{)", R"("files":[7,{)", "a file is not a JSON object");
  refuses(R"("tensors":[{)", R"("tensors":["a",{)", "a tensor is not a JSON object");
  refuses(R"("shape":[2,6])", R"("shape":[2,"6"])", "'shape' of tensor \"a\"");
  refuses(R"("shape":[2,6])", R"("shape":[4294967296,4294967296])", "tensor \"a\"", "overflows");
  refuses(fmt::format(R"("dtype":"{}")", name_of(DType::f32)), R"("dtype":"f31")", "tensor \"a\"",
          "f31");
  refuses(R"("numel":4)", R"("numel":-4)", "'numel' of tensor \"a\"", "got -4");
  refuses(R"("first":0)", R"("first":1e3)", "'first' of tensor \"a\"");
  const std::string sums = R"(,"xxh3":[")";
  refuses(sums, R"(,"xxh3":["0)", "a checksum of tensor \"a\" is not 16 hexadecimal digits");
  refuses(sums, R"(,"xxh3":[7,")", "a checksum of tensor \"a\"");
}

TEST_CASE("checkpoint index: what ranks say they wrote must be the whole of every tensor") {
  const CheckpointFile file{"rank-0.safetensors", 1000, 100, 1};
  const auto table = [&](int rank, std::int64_t first, std::int64_t numel) {
    CheckpointFile of = file;
    of.name = fmt::format("rank-{}.safetensors", rank);
    const CheckpointTensor tensor{"a", "", DType::f32, Shape{8}, {{0, first, numel, 100, {1}}}};
    return to_json(of, {&tensor, 1});
  };
  const auto merged = [](std::vector<std::string> tables) {
    return merge_checkpoint_tables(tables);
  };
  // In whatever order.
  CHECK(merged({table(0, 4, 4), table(1, 0, 4)}).tensors[0].pieces[0].file == 1);
  check_mentions(error_of([&] { merged({table(0, 0, 4), table(1, 5, 3)}); }), "from 5 on");
  check_mentions(error_of([&] { merged({table(0, 0, 5), table(1, 4, 4)}); }), "from 4 on");
  check_mentions(error_of([&] { merged({table(0, 0, 4)}); }), "no file has the elements from 4");
}

TEST_CASE("checkpoint: a file that is missing, cut or longer is found before anything is read") {
  const TempDirectory folder;
  const std::string path = folder.path("step-00000007");
  const std::string shard = path + "/rank-00001-of-00003.safetensors";
  const auto refused = [&](const auto&... pieces) {
    check_mentions(error_of([&] { CheckpointReader reader(path); }), path, pieces...);
    fs::remove_all(path);
    write_checkpoint(path);
  };
  write_checkpoint(path);
  fs::remove(shard);
  refused("rank-00001-of-00003.safetensors", "No such file", "use another checkpoint");
  const auto size = fs::file_size(shard);
  fs::resize_file(shard, size - 1);
  refused(fmt::format("rank-00001-of-00003.safetensors has {} bytes, expected {}", size - 1, size));
  fs::resize_file(shard, size + 1);
  refused(fmt::format("has {} bytes, expected {}", size + 1, size), "it is not whole");
  fs::remove(shard);
  fs::create_directory(shard);
  refused("rank-00001-of-00003.safetensors");
  fs::remove(path + "/index.json");
  refused("is not a checkpoint: it has no index.json");
  fs::remove(path + "/index.json");
  fs::create_directory(path + "/index.json");
  refused("index.json");
  CHECK_NOTHROW(CheckpointReader(path).verify());
}

TEST_CASE("checkpoint: every byte of the files is under a checksum") {
  const TempDirectory folder;
  const std::string path = folder.path("step-00000007");
  const CheckpointIndex index = write_checkpoint(path);
  for (const CheckpointFile& file : index.files) {
    for (std::uint64_t at = 0; at < file.bytes; ++at) {
      flip(path + "/" + file.name, at);
      const std::string error = error_of([&] { CheckpointReader(path).verify(); });
      flip(path + "/" + file.name, at);
      check_mentions(
          error, path, file.name,
          at < file.header_bytes ? "is damaged in its header" : "is damaged between bytes");
    }
  }
  CHECK_NOTHROW(CheckpointReader(path).verify());
  // Reading says it too, of what it reads.
  const CheckpointPiece& piece = index.find("a")->pieces[1];
  flip(path + "/" + index.files[1].name, piece.offset + 3);
  const CheckpointReader reader(path);
  Bytes four(16), whole(48);
  CHECK_NOTHROW(reader.read_bytes(*index.find("a"), 0, four));
  CHECK(four == numbers(16, 0));
  for (const std::int64_t first : {1, 4, 7}) {
    check_mentions(
        error_of([&] { reader.read_bytes(*index.find("a"), first, four); }), index.files[1].name,
        fmt::format("between bytes {} and {}", piece.offset, piece.offset + 16), "in tensor a");
  }
  CHECK_NOTHROW(reader.read_bytes(*index.find("a"), 8, four));
  check_mentions(error_of([&] { reader.read_bytes(*index.find("a"), 9, four); }),
                 "elements 9 to 13");
}

TEST_CASE("checkpoint: of a large piece no more is read than the blocks that are asked for") {
  const TempDirectory folder;
  const std::int64_t bytes = 2 * static_cast<std::int64_t>(CheckpointIndex::kBlock) + 4000;
  const std::int64_t numel = bytes / 4;
  const Bytes data = numbers(bytes, 3);
  CheckpointShardWriter writer(folder.path(), 0, 1, {{"w", "", DType::f32, {numel}, 0, numel}}, {});
  writer.write(0, data);
  const std::vector<std::string> tables{writer.commit()};
  const CheckpointIndex index = merge_checkpoint_tables(tables);
  put_text(folder.path("index.json"), to_json(index));
  const CheckpointTensor& w = *index.find("w");
  REQUIRE(w.pieces[0].checksums.size() == 3);
  const CheckpointReader reader(folder.path());
  const auto block = static_cast<std::int64_t>(CheckpointIndex::kBlock) / 4;
  for (const auto& [from, count] : {std::pair<std::int64_t, std::int64_t>{0, 1},
                                    {block - 1, 2},
                                    {block, block},
                                    {2 * block - 3, 1003},
                                    {numel - 1, 1},
                                    {0, numel}}) {
    const std::int64_t first = from;  // a binding cannot be captured
    CAPTURE(first);
    Bytes some(static_cast<std::size_t>(count) * 4);
    reader.read_bytes(w, first, some);
    CHECK(std::equal(some.begin(), some.end(), data.begin() + first * 4));
  }
  flip(folder.path(index.files[0].name), w.pieces[0].offset + CheckpointIndex::kBlock);
  Bytes some(4);
  for (const std::int64_t good : {std::int64_t{0}, block - 1, 2 * block, numel - 1}) {
    CHECK_NOTHROW(reader.read_bytes(w, good, some));
  }
  for (const std::int64_t bad : {block, 2 * block - 1}) {
    check_mentions(error_of([&] { reader.read_bytes(w, bad, some); }), "is damaged between bytes");
  }
}

TEST_CASE("checkpoint: what a path means") {
  const TempDirectory folder;
  const std::string run = folder.path("run"), all = run + "/checkpoints";
  for (const char* step : {"step-00000007", "step-00000010", "step-123456789"}) {
    write_checkpoint(all + "/" + step);
  }
  fs::create_directories(all + "/step-00000099");  // no index
  fs::create_directories(all + "/step-1x");
  write_checkpoint(all + "/.step-00000100.partial");
  fs::create_symlink("step-00000007", all + "/best");
  CHECK(find_checkpoints(all).size() == 3);
  CHECK(find_checkpoints(all).back().step == 123456789);
  CHECK(find_checkpoints(folder.path("none")).empty());
  for (const std::string& path : {run, all, run + "/", all + "/step-123456789"}) {
    CHECK(fs::equivalent(resolve_checkpoint(path), all + "/step-123456789"));
  }
  CHECK(fs::equivalent(resolve_checkpoint(all + "/best"), all + "/step-00000007"));
  check_mentions(error_of([&] { resolve_checkpoint(folder.path("none")); }),
                 "there is no checkpoint '" + folder.path("none") + "'");
  fs::create_symlink("nowhere", folder.path("dangling"));
  check_mentions(error_of([&] { resolve_checkpoint(folder.path("dangling")); }), "no checkpoint");
  for (const std::string& path : {folder.path(), all + "/step-00000099"}) {
    check_mentions(error_of([&] { resolve_checkpoint(path); }), path,
                   "is no checkpoint and has none", "index.json");
  }
}
