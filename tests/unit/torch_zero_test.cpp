// SPDX-License-Identifier: Apache-2.0
// Checkpoints of DeepSpeed's ZeRO, beside what its own script makes of them.
#include <doctest/doctest.h>
#include <sherd/runtime/io/file.h>
#include <sherd/runtime/io/torch_zero.h>

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "io_support.h"

using namespace sherd;
using namespace sherd::test;
namespace fs = std::filesystem;

namespace {

// Of tests/golden/make_zero.py.
std::string golden(int stage) {
  return std::string(SHERD_TEST_DATA) + "/golden/distributed/zero" + std::to_string(stage);
}

std::vector<float> values(const TensorFile& file, const TensorEntry& entry, std::int64_t first,
                          std::int64_t count) {
  Bytes room;
  const auto bytes = file.read(entry, first, count, room);
  std::vector<float> found(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (*entry.dtype == DType::f32) {
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

TEST_CASE("torch zero: each stage as DeepSpeed itself puts it together") {
  for (const int stage : {1, 2, 3}) {
    CAPTURE(stage);
    CHECK(find_torch_zero(golden(stage)) == golden(stage) + "/step1");
    const auto file = open_torch_zero(find_torch_zero(golden(stage)));
    CHECK(find_torch_zero(file->path()) == file->path());
    const auto text = read_file(golden(stage) + ".json");
    const auto expected = nlohmann::json::parse(text);
    // Its script leaves the frozen weight of stage 1 out.
    CHECK(expected.size() == (stage == 1 ? 6 : 7));
    CHECK(file->entries().size() == 7 + 2 * 4);
    for (const auto& item : expected.items()) {
      const std::string name = item.key();
      const auto& weight = item.value();
      CAPTURE(name);
      const TensorEntry* entry = file->find(name);
      REQUIRE(entry != nullptr);
      CHECK(entry->dims == weight["shape"].get<std::vector<std::int64_t>>());
      const auto wanted = weight["values"].get<std::vector<float>>();
      CHECK(values(*file, *entry, 0, entry->numel) == wanted);
      for (std::int64_t first = 0; first < entry->numel; ++first) {
        CHECK(values(*file, *entry, first, 1)[0] == wanted[static_cast<std::size_t>(first)]);
      }
      if (name == "scale" || name == "frozen.weight" || name == "tied.weight") continue;
      for (const auto& [state, times] :
           {std::pair("exp_avg", 2.0f), std::pair("exp_avg_sq", 3.0f)}) {
        const TensorEntry* moments = file->find("optimizer." + name + "." + state);
        REQUIRE(moments != nullptr);
        CHECK(moments->dims == entry->dims);
        std::vector<float> scaled;
        for (const float value : wanted) scaled.push_back(times * value);
        CHECK(values(*file, *moments, 0, entry->numel) == scaled);
      }
    }
    const TensorEntry* frozen = file->find("frozen.weight");
    REQUIRE(frozen != nullptr);
    CHECK(frozen->dims == std::vector<std::int64_t>{5, 5});
    CHECK(frozen->dtype == DType::bf16);
  }
}

TEST_CASE("torch zero: what is missing or of another kind is said") {
  const TempDirectory folder;
  const std::string path = folder.path("z");
  const std::string rank_1 = "/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt";
  const auto fresh = [&](int stage) {
    fs::remove_all(path);
    fs::copy(golden(stage) + "/step1", path);
  };
  const auto refusal = [&] { return error_of([&] { open_torch_zero(path); }); };
  fresh(2);
  fs::remove(path + rank_1);
  check_mentions(refusal(), path, "of 2 ranks", "files of 1");
  fresh(2);
  fs::rename(path + rank_1, path + "/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt");
  check_mentions(refusal(), path, "rank 1 is missing");
  fresh(2);
  fs::remove(path + "/mp_rank_00_model_states.pt");
  check_mentions(refusal(), path, "_model_states.pt", "names and shapes");
  fresh(2);
  put_file(path + "/mp_rank_01_model_states.pt", {});
  check_mentions(refusal(), path, "model parallelism", "zero_to_fp32.py");
  fresh(3);
  fs::remove(path + "/zero_pp_rank_1_mp_rank_00_model_states.pt");
  check_mentions(refusal(), path, "frozen");
  // Vectors of another stage.
  fresh(3);
  fs::copy_file(golden(2) + "/step1" + rank_1, path + rank_1, fs::copy_options::overwrite_existing);
  check_mentions(refusal(), path, "rank 1 has 0 vectors");
  // Weights of another model.
  fresh(3);
  const std::string model = "/zero_pp_rank_0_mp_rank_00_model_states.pt";
  put_file(path + model, bytes_of("no archive"));
  check_mentions(refusal(), "model_states.pt");

  put_file(folder.path("latest"), bytes_of("z\n"));
  fresh(1);
  CHECK(find_torch_zero(folder.path()) == path);
  for (const char* tag : {"..", "", "../z", "none"}) {
    put_file(folder.path("latest"), bytes_of(tag));
    CHECK(find_torch_zero(folder.path()).empty());
  }
}
