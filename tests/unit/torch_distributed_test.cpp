// SPDX-License-Identifier: Apache-2.0
// Checkpoints of torch.distributed.checkpoint: a real one, and each way in which one can be wrong.
#include <doctest/doctest.h>
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/io/torch_distributed.h>

#include <cstring>
#include <filesystem>
#include <functional>

#include "io_support.h"
#include "pickle_support.h"
#include "zip_support.h"

using namespace sherd;
using namespace sherd::test;
namespace fs = std::filesystem;

namespace {

constexpr const char* kModule = "torch.distributed.checkpoint.metadata";

// Of tests/golden/make_distributed.py.
std::string golden() {
  return std::string(SHERD_TEST_DATA) + "/golden/distributed/dcp";
}

struct Part {
  std::vector<std::int64_t> offsets, sizes;
  std::string file = "__0_0.distcp";
  std::int64_t at = 0, bytes = 0;
  std::vector<std::int64_t> place = {};  // by the storage; empty: offsets
};

class MetadataPickle : public Pickle {
 public:
  MetadataPickle& object(std::string_view name, std::string_view module = kModule) {
    global(module, name).op(")\x81");
    return *this;
  }
  MetadataPickle& size(const std::vector<std::int64_t>& values) {
    global("torch", "Size").op("(").integers(values).op("tR");
    return *this;
  }
};

// A .metadata of one tensor "w" of float32.
Bytes metadata(const std::vector<std::int64_t>& dims, const std::vector<Part>& parts,
               bool transformed = false) {
  MetadataPickle p;
  p.object("Metadata").op("}(").str("state_dict_metadata").op("}").str("w");
  p.object("TensorStorageMetadata").op("}(").str("properties");
  p.object("TensorProperties");
  p.op("(").global("torch", "float32").op("tb").str("size");
  p.size(dims).str("chunks").op("](");
  for (const Part& part : parts) {
    p.object("ChunkStorageMetadata").op("}(").str("offsets");
    p.size(part.offsets).str("sizes");
    p.size(part.sizes).op("ub");
  }
  p.op("eubs").str("storage_data").op("}(");
  for (const Part& part : parts) {
    p.object("MetadataIndex").op("}(").str("fqn").str("w").str("offset");
    p.size(part.place.empty() ? part.offsets : part.place).op("ub");
    p.object("_StorageInfo", "torch.distributed.checkpoint.filesystem").op("}(");
    p.str("relative_path").str(part.file).str("offset").integer(part.at);
    p.str("length").integer(part.bytes);
    if (transformed) p.str("transform_descriptors").op("]");
    p.op("ub");
  }
  return p.op("uub").done();
}

// What torch.save writes of one tensor of float32 that counts from `start` on.
Bytes saved(const std::vector<std::int64_t>& dims, float start) {
  std::int64_t numel = 1;
  std::vector<std::int64_t> strides(dims.size());
  for (std::size_t d = dims.size(); d-- > 0;) {
    strides[d] = numel;
    numel *= dims[d];
  }
  Bytes storage(static_cast<std::size_t>(4 * numel));
  for (std::size_t i = 0; i < storage.size(); i += 4) {
    std::memcpy(&storage[i], &start, 4);
    start += 1;
  }
  Pickle pickle;
  pickle.tensor("0", numel, 0, dims, strides);
  return make_torch_zip(pickle.done(), {{"0", storage}});
}

// Writes parts one after the other into their files.
void write(const TempDirectory& folder, const std::vector<std::int64_t>& dims,
           std::vector<Part> parts) {
  std::map<std::string, Bytes> files;
  float start = 0;
  for (Part& part : parts) {
    Bytes& file = files[part.file];
    const Bytes bytes = saved(part.sizes, start);
    part.at = std::ssize(file);
    part.bytes = std::ssize(bytes);
    file.insert(file.end(), bytes.begin(), bytes.end());
    start += 1000;
  }
  for (const auto& [name, bytes] : files) put_file(folder.path(name), bytes);
  put_file(folder.path(".metadata"), metadata(dims, parts));
}

std::vector<float> values(const TensorFile& file, const std::string& name, std::int64_t first,
                          std::int64_t count) {
  Bytes room;
  const TensorEntry* entry = file.find(name);
  REQUIRE(entry != nullptr);
  const auto bytes = file.read(*entry, first, count, room);
  std::vector<float> found(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (*entry->dtype == DType::f32) {
      std::memcpy(&found[i], &bytes[4 * i], 4);
    } else {
      bf16 narrow;
      std::memcpy(&narrow, &bytes[2 * i], 2);
      found[i] = static_cast<float>(narrow);
    }
  }
  return found;
}

}  // namespace

TEST_CASE("torch distributed: what two processes wrote") {
  CHECK(is_torch_distributed(golden()));
  CHECK_FALSE(is_torch_distributed(golden() + "/.."));
  const auto file = open_torch_distributed(golden());
  CHECK(file->prefix() == "model.");
  CHECK(file->entries().size() == 5);
  const std::tuple<const char*, std::vector<std::int64_t>, float, DType> expected[]{
      {"model.rows.weight", {5, 3}, 100, DType::f32},
      {"model.columns.weight", {2, 5}, 200, DType::bf16},
      {"model.scale", {2}, 300, DType::f32},
      {"optimizer.rows.weight.exp_avg", {5, 3}, 400, DType::f32},
      {"optimizer.state.rows.weight.step", {}, 7, DType::f32}};  // not of the weight's shape
  for (const auto& [name, dims, added, dtype] : expected) {
    const std::string text = name;
    CAPTURE(text);
    const TensorEntry* entry = file->find(text);
    REQUIRE(entry != nullptr);
    CHECK(entry->dims == dims);
    CHECK(entry->dtype == dtype);
    // Every range of elements.
    for (std::int64_t first = 0; first < entry->numel; ++first) {
      for (std::int64_t count = 0; first + count <= entry->numel; ++count) {
        std::vector<float> wanted;
        for (std::int64_t i = 0; i < count; ++i) {
          wanted.push_back(added + static_cast<float>(first + i));
        }
        CHECK(values(*file, text, first, count) == wanted);
      }
    }
  }
}

TEST_CASE("torch distributed: boxes of three dimensions, in any order and file") {
  const TempDirectory folder;
  // 2 x 3 x 4, cut into 2 x 2 x 1, one empty.
  const std::vector<Part> parts{{{0, 2, 0}, {2, 1, 4}, "b"},
                                {{0, 0, 3}, {2, 2, 1}, "a"},
                                {{2, 0, 0}, {0, 3, 4}, "a"},
                                {{0, 0, 0}, {2, 2, 3}, "b"}};
  write(folder, {2, 3, 4}, parts);
  const auto file = open_torch_distributed(folder.path());
  CHECK(file->prefix().empty());
  std::vector<float> expected(24);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    float next = 1000 * static_cast<float>(p);
    const auto& [offsets, sizes] = std::tie(parts[p].offsets, parts[p].sizes);
    for (std::int64_t i = 0; i < sizes[0]; ++i) {
      for (std::int64_t j = 0; j < sizes[1]; ++j) {
        for (std::int64_t k = 0; k < sizes[2]; ++k) {
          expected[static_cast<std::size_t>(((offsets[0] + i) * 3 + offsets[1] + j) * 4 +
                                            offsets[2] + k)] = next++;
        }
      }
    }
  }
  CHECK(values(*file, "w", 0, 24) == expected);
  for (std::int64_t first = 0; first < 24; ++first) {
    CHECK(values(*file, "w", first, 1)[0] == expected[static_cast<std::size_t>(first)]);
  }
}

TEST_CASE("torch distributed: each way in which a checkpoint can be wrong") {
  const TempDirectory folder;
  const auto refusal = [&] { return error_of([&] { open_torch_distributed(folder.path()); }); };
  const auto boxes = [&](const std::vector<std::int64_t>& dims, const std::vector<Part>& parts) {
    put_file(folder.path(".metadata"), metadata(dims, parts));
    return refusal();
  };
  const std::int64_t huge = std::int64_t{1} << 62;
  check_mentions(boxes({4}, {{{0}, {2}}}), "'w' [4]", "2 elements of 4");
  check_mentions(boxes({4}, {{{0}, {3}}, {{2}, {2}}}), "overlap", "[0] and [2]");
  check_mentions(boxes({2, 2}, {{{0, 0}, {2, 1}}, {{1, 0}, {1, 2}}}), "overlap");
  check_mentions(boxes({4}, {{{3}, {2}}}), "not inside");
  check_mentions(boxes({4}, {{{5}, {1}}}), "not inside");
  check_mentions(boxes({4}, {{{0, 0}, {4, 1}}}), "not inside");
  check_mentions(boxes({huge, 4}, {}), "64 bits");
  check_mentions(boxes({4}, {{{0}, {4}, "x", 0, 0, {1}}}), "at [0] which is in no file");
  check_mentions(boxes({4}, {{{0}, {4}}, {{0}, {4}}}), "is there twice");
  check_mentions(boxes({4}, {{{-1}, {4}}}), "whole numbers");
  for (const char* name : {"../x", "", "..", "/x", "a\\b"}) {
    check_mentions(boxes({4}, {{{0}, {4}, name}}), "expected a file of this directory");
  }
  check_mentions(boxes({4}, {{{0}, {4}, "none"}}), "'none' is missing");
  put_file(folder.path("none"), Bytes(10));
  check_mentions(boxes({4}, {{{0}, {4}, "none", 0, 11}}), "the file has 10");
  check_mentions(boxes({4}, {{{0}, {4}, "none", huge, huge}}), "the file has 10");
  check_mentions(boxes({4}, {{{0}, {4}, "none", -1, 1}}), "'offset'", "whole number");
  check_mentions(boxes({4}, {{{0}, {4}, "none", 0, 10}}), "none");
  const Bytes three = saved({3}, 0);
  put_file(folder.path("none"), three);
  check_mentions(boxes({4}, {{{0}, {4}, "none", 0, std::ssize(three)}}),
                 "not the part of 'w' that .metadata says");
  put_file(folder.path(".metadata"),
           metadata({3}, {{{0}, {3}, "none", 0, std::ssize(three)}}, true));
  check_mentions(refusal(), "compressed");
  // Names of anything else are refused, and so is what is no such object.
  put_file(folder.path(".metadata"), Pickle().global("os", "system").op(")\x81.").done());
  check_mentions(refusal(), "os.system", "torch.distributed.checkpoint.save");
  put_file(folder.path(".metadata"), Pickle().op("}").done());
  check_mentions(refusal(), "its root is", "Metadata");
  MetadataPickle bare;
  put_file(folder.path(".metadata"), bare.object("Metadata").done());
  check_mentions(refusal(), "no attributes");
  // Every cut of the real one.
  const Bytes whole = read_file(golden() + "/.metadata");
  for (std::size_t size = 0; size < whole.size(); size += 7) {
    put_file(folder.path(".metadata"),
             Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)));
    CHECK_FALSE(refusal().empty());
  }
}
