// SPDX-License-Identifier: Apache-2.0
// Files of torch.save: those of tests/golden/torch, and hostile ones made here.
#include <doctest/doctest.h>
#include <sherd/runtime/io/safetensors.h>
#include <sherd/runtime/io/torch_file.h>

#include <cstring>

#include "io_support.h"
#include "pickle_support.h"
#include "zip_support.h"

using namespace sherd;
using namespace sherd::test;

namespace {

std::string golden(const std::string& name) {
  return std::string(SHERD_TEST_DATA) + "/golden/torch/" + name;
}

template <typename T>
std::vector<T> values_of(const TensorFile& file, const std::string& name, std::int64_t first = 0,
                         std::int64_t count = -1) {
  const TensorEntry* entry = file.find(name);
  REQUIRE(entry != nullptr);
  Bytes room;
  const auto bytes = file.read(*entry, first, count < 0 ? entry->numel : count, room);
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

Bytes storage(int floats) {
  Bytes bytes(4 * static_cast<std::size_t>(floats));
  for (int i = 0; i < floats; ++i) {
    const auto value = static_cast<float>(i);
    std::memcpy(bytes.data() + 4 * i, &value, 4);
  }
  return bytes;
}

std::string refusal(const Bytes& file) {
  return error_of([&] { TorchArchive(file, "a.pt"); });
}
// Of an archive with one storage, "0", of 24 numbers.
std::string refusal_of(Pickle pickle) {
  return refusal(make_torch_zip(pickle.done(), {{"0", storage(24)}}));
}

using Dims = std::vector<std::int64_t>;

}  // namespace

TEST_CASE("torch file: views of every kind, whatever the pickle's protocol") {
  for (const char* name :
       {"views.pt", "views_protocol4.pt", "views_deflated_pickle.pt", "views_legacy.pt"}) {
    CAPTURE(name);
    const auto file = open_tensor_file(golden(name));
    CHECK(file->format() == "PyTorch");
    const bool legacy = std::string_view(name) == "views_legacy.pt";
    CHECK(file->entries().size() == (legacy ? 13 : 14));  // without an untyped storage
    CHECK(file->prefix().empty());
    std::vector<float> base(24);
    for (std::size_t i = 0; i < 24; ++i) base[i] = static_cast<float>(i);
    CHECK(values_of<float>(*file, "base") == base);
    CHECK(file->find("base")->dims == Dims{4, 6});
    CHECK(values_of<float>(*file, "cut") == std::vector<float>{8, 9, 10, 14, 15, 16});
    CHECK(values_of<float>(*file, "spread") ==
          std::vector<float>{0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2});
    CHECK(values_of<double>(*file, "scalar") == std::vector<double>{3.5});
    CHECK(file->find("scalar")->dims.empty());
    CHECK(values_of<float>(*file, "empty").empty());
    CHECK(file->find("empty")->dims == Dims{0, 4});
    const auto half = values_of<std::uint16_t>(*file, "half");
    CHECK(half == std::vector<std::uint16_t>{0x3c00, 0xc000, 0x3800});
    CHECK(values_of<std::uint16_t>(*file, "bfloat") == std::vector<std::uint16_t>{0x3f80, 0xc000});
    CHECK(file->find("bfloat")->dtype == DType::bf16);
    CHECK(values_of<std::int64_t>(*file, "long") ==
          std::vector<std::int64_t>{-1, std::int64_t{1} << 40});
    CHECK(values_of<std::uint8_t>(*file, "bytes") == std::vector<std::uint8_t>{7, 255});

    // Every range of what is not row-major.
    for (const auto& [view, at] :
         std::vector<std::pair<const char*, std::vector<int>>>{{"transposed", {}}, {"cube", {}}}) {
      std::vector<float> expected;
      if (std::string(view) == "transposed") {
        for (int i = 0; i < 6; ++i) {
          for (int j = 0; j < 4; ++j) expected.push_back(static_cast<float>(i + 6 * j));
        }
      } else {
        for (int i = 0; i < 2; ++i) {
          for (int j = 0; j < 3; ++j) {
            for (int k = 0; k < 4; ++k) expected.push_back(static_cast<float>(i + 8 * j + 2 * k));
          }
        }
      }
      for (std::int64_t first = 0; first <= 24; ++first) {
        for (std::int64_t count = 0; first + count <= 24; ++count) {
          const auto begin = expected.begin() + first;
          CHECK(values_of<float>(*file, view, first, count) ==
                std::vector<float>(begin, begin + count));
        }
      }
    }
    Bytes room;
    for (const auto& range : {std::pair{-1, 1}, {0, 25}, {24, 1}, {3, -1}}) {
      const auto read = [&] {
        (void)file->read(*file->find("base"), range.first, range.second, room);
      };
      check_mentions(error_of(read), name, "'base', which has 24");
    }
    for (const auto& [tensor, type] :
         {std::pair{"flags", "bool"}, {"complex", "complex64"}, {"small", "float8_e4m3fn"}}) {
      if (legacy && std::string_view(tensor) == "small") continue;
      const TensorEntry& entry = *file->find(tensor);
      CHECK(!entry.dtype);
      CHECK(entry.type == type);
      check_mentions(error_of([&] { (void)file->read(entry, 0, 1, room); }), name, tensor, type);
    }
  }
}

TEST_CASE("torch file: elements in row-major order are read where they lie") {
  const Bytes file =
      make_torch_zip(Pickle().tensor("0", 24, 8, {2, 4}, {4, 1}).done(), {{"0", storage(24)}});
  const TorchArchive archive(file, "a.pt");
  REQUIRE(archive.tensors().size() == 1);
  const TorchTensor& tensor = archive.tensors()[0];
  CHECK(tensor.name == "tensor");
  CHECK(tensor.contiguous());
  CHECK(tensor.storage.size() == 96);
  CHECK((tensor.storage.data() > file.data() && tensor.storage.data() < file.data() + file.size()));
}

TEST_CASE("torch file: a checkpoint's parts, and where the weights are") {
  const auto file = open_tensor_file(golden("checkpoint.pt"));
  CHECK(file->prefix() == "model.");
  CHECK(file->entries().size() == 25);
  CHECK(file->find("model.module._orig_mod.blocks.0.attn.qkv.weight")->dims == Dims{12, 4});
  CHECK(values_of<float>(*file, "optimizer.state.1.step") == std::vector<float>{3});
  CHECK(values_of<float>(*file, "scale") == std::vector<float>{2});
  const std::map<std::string, std::string> plain{
      {"best", "0.25"}, {"epoch", "3"}, {"name", "'vit'"}, {"nothing", "None"}};
  CHECK(file->metadata() == plain);

  // Most tensors win, of equals the outermost and then the first of the known keys.
  const auto chosen = [](const std::vector<std::pair<std::string, int>>& dicts, int outside) {
    Pickle pickle;
    pickle.op("}(");
    int number = 0;
    const auto tensors = [&](int count) {
      for (int i = 0; i < count; ++i) {
        pickle.str("t" + std::to_string(++number)).tensor("0", 24, 0, {2}, {1});
      }
    };
    for (const auto& [key, count] : dicts) {
      pickle.str(key).op("}(");
      tensors(count);
      pickle.op("u");
    }
    tensors(outside);
    const Bytes bytes = make_torch_zip(pickle.op("u").done(), {{"0", storage(24)}});
    return TorchArchive(bytes, "a.pt").state_dict();
  };
  CHECK(chosen({}, 2) == "");
  CHECK(chosen({{"state_dict", 3}}, 2) == "state_dict.");
  CHECK(chosen({{"state_dict", 2}}, 2) == "");
  CHECK(chosen({{"ema", 3}, {"model", 3}}, 0) == "model.");
  CHECK(chosen({{"ema", 4}, {"model", 3}, {"optimizer", 9}}, 0) == "ema.");
  CHECK(chosen({{"module", 1}}, 0) == "module.");
  CHECK(chosen({{"model_state_dict", 1}}, 0) == "model_state_dict.");
  CHECK(chosen({{"weights", 3}}, 0) == "");
}

TEST_CASE("torch file: a whole module and anything else that could run is refused") {
  check_mentions(error_of([] { open_tensor_file(golden("module.pt")); }), golden("module.pt"),
                 "wants to build torch.nn.modules.container.Sequential, which could run code",
                 "Save model.state_dict()", "safetensors");
  check_mentions(
      refusal_of(Pickle().op("}").str("x").global("os", "system").str("true").op("\x85Rs")),
      "'a.pt'", "os.system");
}

TEST_CASE("torch file: other files are told apart") {
  const TempDirectory directory;
  const std::string path = directory.path("w.pt");
  const auto opened = [&](const Bytes& bytes) {
    put_file(path, bytes);
    return error_of([&] { open_tensor_file(path); });
  };
  Bytes tar(512);
  std::memcpy(tar.data() + 257, "ustar", 5);
  check_mentions(opened(tar), path, "tar archive");
  check_mentions(opened(Pickle().op("N").done()), path, "bare pickle");
  check_mentions(
      opened(make_zip({{"a/code/x.py", {}}, {"a/data.pkl", {}}, {"a/constants.pkl", {}}})), path,
      "TorchScript", "torch.jit.load");
  check_mentions(opened(make_zip({{"a.npy", bytes_of("x")}})), path, "no entry NAME/data.pkl");
  check_mentions(opened(make_torch_zip(Pickle().op("N").done(), {}, "big")), path, "'big'",
                 "expected 'little'");
  check_mentions(opened(bytes_of("hello")), path, "not a safetensors file");
  check_mentions(opened({}), path, "not a safetensors file");
  put_file(path, make_torch_zip(Pickle().op("N").done(), {}, ""));  // no byte order: little
  CHECK(open_tensor_file(path)->entries().empty());
  put_file(path, make_zip({{"data.pkl", Pickle().op("N").done()}}));  // and no folder
  CHECK(open_tensor_file(path)->entries().empty());
  // A header's length that looks like zip's first bytes does not mislead.
  Bytes odd;
  put_number(odd, 0x04034b50, 8);
  odd.push_back('{');
  check_mentions(opened(odd), path, "safetensors", "truncated");
}

TEST_CASE("torch file: safetensors files as tensor files") {
  const TempDirectory directory;
  const std::string path = directory.path("w.safetensors");
  const Bytes bytes = storage(6);
  write_safetensors(path, std::vector<SafetensorsItem>{{"a", DType::f32, {2, 3}, bytes}},
                    {{"k", "v"}});
  const auto file = open_tensor_file(path);
  CHECK(file->format() == "safetensors");
  CHECK(file->metadata().at("k") == "v");
  CHECK(file->entries()[0].type == "f32");
  CHECK(file->entries()[0].bytes == 24);
  CHECK(values_of<float>(*file, "a", 2, 3) == std::vector<float>{2, 3, 4});
  CHECK(file->find("b") == nullptr);
}

TEST_CASE("torch file: tensors that do not fit their storage") {
  const auto tensor = [](const std::string& key, std::int64_t numel, std::int64_t offset,
                         const Dims& shape, const Dims& strides) {
    return refusal_of(Pickle().op("}").str("w").tensor(key, numel, offset, shape, strides).op("s"));
  };
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  check_mentions(tensor("0", 24, 0, {5, 5}, {5, 1}), "'a.pt'", "'w'", "[5, 5]", "element 24",
                 "storage of 24");
  check_mentions(tensor("0", 24, 1, {24}, {1}), "offset 1 reaches element 24");
  check_mentions(tensor("0", 20, 0, {24}, {1}), "storage of 20");
  check_mentions(tensor("0", 24, -1, {2}, {1}), "offset -1");
  check_mentions(tensor("0", 24, 24, {}, {}), "reaches element 24");
  check_mentions(tensor("0", 24, 0, {2}, {kHuge}), "reaches element");
  check_mentions(tensor("0", 24, kHuge, {2}, {kHuge}), "overflows 64 bits");
  check_mentions(tensor("0", 24, 0, {kHuge, 4}, {0, 1}), "overflows 64 bits");
  check_mentions(tensor("0", 24, 0, {kHuge}, {0}), "overflows 64 bits");  // in bytes
  check_mentions(tensor("0", 24, 0, {-2}, {1}), "has -2 among its shape");
  check_mentions(tensor("0", 24, 0, {2}, {-1}), "has -1 among its strides");
  check_mentions(tensor("0", 24, 0, {2, 2}, {1}), "2 dimensions and 1 strides");
  check_mentions(tensor("0", 24, 0, Dims(65, 1), Dims(65, 1)), "65 dimensions");
  check_mentions(tensor("0", 25, 0, {2}, {1}), "storage '0' of 25 elements of 4 bytes", "96 bytes");
  check_mentions(tensor("0", -1, 0, {2}, {1}), "of -1 elements");
  check_mentions(tensor("0", kHuge, 0, {2}, {1}), "4611686018427387904 elements");
  check_mentions(tensor("1", 24, 0, {2}, {1}), "storage '1', which the file lacks");
  check_mentions(tensor("../0", 24, 0, {2}, {1}), "which the file lacks");
  check_mentions(tensor(std::string(300, 'k'), 24, 0, {2}, {1}), "no usable key");
  // Spread out wide, but in reach; and without elements anywhere.
  const Bytes wide =
      make_torch_zip(Pickle()
                         .op("](")
                         .tensor("0", 24, 23, {1 << 20, 1 << 20}, {0, 0})
                         .tensor("0", 24, kHuge, {0, kHuge, kHuge}, {kHuge, kHuge, 1})
                         .tensor("0", 24, 0, {kHuge, kHuge, 0}, {0, kHuge, 1})
                         .op("e")
                         .done(),
                     {{"0", storage(24)}});
  const TorchArchive archive(wide, "a.pt");
  REQUIRE(archive.tensors().size() == 3);
  CHECK(archive.tensors()[0].numel == std::uint64_t{1} << 40);
  float last = 0;
  copy_elements(archive.tensors()[0], (std::uint64_t{1} << 40) - 1, 1,
                reinterpret_cast<std::uint8_t*>(&last));
  CHECK(last == 23);
  CHECK(archive.tensors()[1].numel == 0);
  CHECK((archive.tensors()[1].contiguous() && archive.tensors()[2].contiguous()));
}

TEST_CASE("torch file: tensors made of something else") {
  const auto made = [](const std::string& function, Pickle& arguments) {
    Pickle pickle;
    pickle.op("}").str("w").global("torch._utils", function);
    const Bytes all = arguments.done();
    pickle.op({reinterpret_cast<const char*>(all.data()) + 2, all.size() - 3}).op("Rs");
    return refusal_of(pickle);
  };
  const auto check = [&](const std::string& function, Pickle arguments, const std::string& said) {
    check_mentions(made(function, arguments), "'a.pt'", "'w'", said);
  };
  check("_rebuild_tensor_v2", Pickle().op(")"), "0 arguments, too few");
  check("_rebuild_tensor_v2", Pickle().op("(K\1K\1))t"), "has an int for a storage");
  check("_rebuild_tensor_v2", Pickle().op("(").str("x").op("QK\1))t"), "a reference for a storage");
  check("_rebuild_tensor_v2", Pickle().op("((K\1K\1K\1K\1K\1tQK\1))t"),
        "something else than a storage");
  check("_rebuild_tensor_v2", Pickle().op("(").storage("0", 24).op("N))t"), "None as its offset");
  check("_rebuild_tensor_v2", Pickle().op("(").storage("0", 24).op("K\1])t"),
        "a list as its shape");
  check("_rebuild_tensor_v2", Pickle().op("(").storage("0", 24).op("K\1N\x85)t"),
        "None as its shape");
  check("_rebuild_tensor_v2", Pickle().op("(").storage("0", 24, "float32").op("K\1))t"),
        "type 'torch.float32'");
  check("_rebuild_tensor_v3", Pickle().op("(").storage("0", 24).op("K\1))\x89Nt"), "too few");
  check("_rebuild_tensor_v3",
        Pickle().op("(").storage("0", 24).op("K\1))\x89N").global("torch", "uint16").op("t"),
        "which do not go together");
  check("_rebuild_parameter", Pickle().op(")"), "parameter of nothing");
  check("_rebuild_parameter", Pickle().op("K\1\x85"), "parameter of an int");
  check("_rebuild_parameter", Pickle().global("torch", "Size").op(")R\x85"),
        "made by 'torch.Size'");
}

TEST_CASE("torch file: a compressed storage, a damaged pickle and more after its end") {
  const Bytes pickle = Pickle().tensor("0", 24, 0, {24}, {1}).done();
  check_mentions(refusal(make_zip({{"a/data.pkl", pickle}, {"a/data/0", storage(24), true}})),
                 "'a.pt'", "'a/data/0' is compressed");
  check_mentions(refusal(make_zip({{"a/data.pkl", Bytes(5'000'000), true}})), "'a/data.pkl'",
                 "5000000 bytes", "4194304 allowed");
  Bytes longer = pickle;
  longer.push_back('.');
  check_mentions(refusal(make_torch_zip(longer, {{"0", storage(24)}})), "1 bytes follow");
  Bytes file = make_torch_zip(pickle, {{"0", storage(24)}});
  const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size());
  file[text.find("_rebuild_tensor_v2") + 2] ^= 1;
  check_mentions(refusal(file), "'archive/data.pkl' is damaged", "CRC-32");
}

TEST_CASE("torch file: names say the way, and what shares without end is an error") {
  Pickle pickle;
  pickle.op("}(").str("a").op("](").tensor("0", 24, 0, {1}, {1}).put(7).op("(").get(7).op("te");
  pickle.integer(-3).get(7).op("N").get(7).op("u");
  const Bytes file = make_torch_zip(pickle.done(), {{"0", storage(24)}});
  std::vector<std::string> names;
  const TorchArchive archive(file, "a.pt");
  for (const TorchTensor& tensor : archive.tensors()) names.push_back(tensor.name);
  CHECK(names == std::vector<std::string>{"a.0", "a.1.0", "-3", "#2"});

  // Each of 20 lists holds the one before ten times.
  Pickle laughs;
  laughs.op("](").tensor("0", 24, 0, {1}, {1}).op("e").put(0).op("0");
  for (std::uint64_t i = 1; i <= 20; ++i) {
    laughs.op("](");
    for (int times = 0; times < 10; ++times) laughs.get(i - 1);
    laughs.op("e").put(i).op("0");
  }
  laughs.get(20);
  check_mentions(refusal_of(laughs), "'a.pt'", "share so much");
  check_mentions(refusal_of(Pickle().op("]q\1h\1a")), "contain themselves");
  Pickle deep;
  for (int i = 0; i < 70; ++i) deep.op("]");
  for (int i = 1; i < 70; ++i) deep.op("a");
  check_mentions(refusal_of(deep), "more than 64 deep");
  // A long key above many tensors: their names together would be long.
  Pickle wide;
  wide.op("}").str(std::string(100'000, 'k')).op("}(").str("t").tensor("0", 24, 0, {1}, {1}).put(9);
  for (int i = 0; i < 1000; ++i) wide.integer(i).get(9);
  check_mentions(refusal_of(wide.op("us")), "share so much");
}

TEST_CASE("torch file: what is wrong with files from before version 1.6") {
  struct Parts {
    Pickle version = Pickle().integer(1001);
    Pickle machine = Pickle().op("}").str("little_endian").op("\x88s");
    Pickle objects = Pickle().tensor("k", 24, 0, {24}, {1});
    Pickle keys = Pickle().op("](").str("k").op("e");
    std::int64_t count = 24;
    bool counted = true;
    Bytes bytes = storage(24);
  };
  const auto file = [](Parts parts) {
    Bytes all{0x80, 2, 0x8a, 10, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, '.'};
    for (Pickle* pickle : {&parts.version, &parts.machine, &parts.objects, &parts.keys}) {
      const Bytes bytes = pickle->done();
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    if (parts.counted) put_number(all, static_cast<std::uint64_t>(parts.count), 8);
    all.insert(all.end(), parts.bytes.begin(), parts.bytes.end());
    return all;
  };
  const auto refused = [&](Parts parts, const std::string& said) {
    check_mentions(refusal(file(std::move(parts))), "'a.pt'", said);
  };
  const Bytes sound = file({});
  CHECK(TorchArchive(sound, "a.pt").tensors()[0].numel == 24);
  for (std::size_t size = 15; size < sound.size(); ++size) {
    const Bytes cut(sound.begin(), sound.begin() + static_cast<std::ptrdiff_t>(size));
    check_mentions(refusal(cut), "a.pt");
  }
  refused({.version = Pickle().integer(1002)}, "format other than 1001");
  refused({.machine = Pickle().op("}").str("little_endian").op("\x89s")}, "little-endian order");
  refused({.machine = Pickle().op("}")}, "little-endian order");
  refused({.objects = Pickle().global("os", "system")}, "wants to build os.system");
  refused({.keys = Pickle().op("}")}, "keys are a dict");
  refused({.keys = Pickle().op("](K\1e")}, "key is an int");
  refused({.keys = Pickle().op("](").str("x").op("e")}, "what lies in the storage 'x'");
  refused({.keys = Pickle().op("]"), .counted = false, .bytes = {}}, "'k', which the file lacks");
  refused({.keys = Pickle().op("](").str("k").str("k").op("e")},
          "truncated before its storage 'k'");
  refused({.count = 25}, "truncated: its storage 'k' has 25 elements of 4 bytes, 96 bytes");
  refused({.count = std::int64_t{1} << 62}, "truncated: its storage 'k' has 4611686018427387904");
  refused({.count = -1}, "truncated: its storage 'k' has 18446744073709551615");
  refused({.count = 23}, "4 bytes follow its last storage");
  Bytes twice = storage(24);
  put_number(twice, 0, 8);
  refused({.keys = Pickle().op("](").str("k").str("k").op("e"), .bytes = twice}, "appears twice");
  refused({.objects = Pickle()
                          .op("](")
                          .tensor("k", 24, 0, {24}, {1})
                          .tensor("k", 24, 0, {24}, {1}, "DoubleStorage")
                          .op("e")},
          "'k' has elements of different sizes");
  // A view of another storage, as versions before 0.4 had them.
  Pickle view;
  view.global("torch._utils", "_rebuild_tensor").op("((").str("storage");
  view.global("torch", "FloatStorage").str("k").str("cpu").integer(24).op("K\1\x85tQK\1))tR");
  refused({.objects = view}, "expected a reference with 5 parts");
}

TEST_CASE("torch file: two tensors of one name") {
  const TempDirectory directory;
  const std::string path = directory.path("w.pt");
  Pickle pickle;
  pickle.op("}(").str("a").op("}").str("b").tensor("0", 24, 0, {1}, {1}).op("s");
  pickle.str("a.b").tensor("0", 24, 0, {1}, {1}).op("u");
  put_file(path, make_torch_zip(pickle.done(), {{"0", storage(24)}}));
  check_mentions(error_of([&] { open_tensor_file(path); }), path, "called 'a.b'");
}
