// SPDX-License-Identifier: Apache-2.0
// `sherd bench kernels`, and the script that runs it on GPU machines.
#include <sherd/tools/cli/gpu_peaks.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "cli_support.h"

using namespace sherd;
using namespace sherd::test;
using json = nlohmann::json;

namespace {

const std::string kKernels =
    "bench kernels --models tiny --matrix 64 --buffer 64KiB --repeat 1 --threads 1 ";

Output gpu_check(const std::string& arguments) {
  return run("exec env CUDA_VISIBLE_DEVICES= " SHERD_SOURCE_ROOT "/tools/gpu_check " + arguments);
}

}  // namespace

TEST_CASE("cli: bench kernels times every kernel of a step, and counts its work") {
  const Output output = sherd_run(kKernels + "--dtype f32 --tokens 50 --json");
  REQUIRE_MESSAGE(output.status == 0, output.text);
  const json result = json::parse(output.out);
  CHECK(result["product_flops_per_second"].get<double>() > 0.0);
  CHECK(result["copy_bytes_per_second"].get<double>() > 0.0);
  CHECK(result["dtype"] == "f32");
  std::map<std::string, json> rows;  // the last of a name: attention's of 50 tokens
  for (const json& row : result["kernels"]) {
    CAPTURE(row.dump());
    rows[row["kernel"]] = row;
    CHECK(row["model"] == "tiny");
    CHECK(row["calls"] == 1);
    const bool product = row["limit"] == "product";
    for (const char* key : {"seconds", "seconds_fastest", "of_limit",
                            product ? "flops_per_second" : "bytes_per_second"}) {
      const double value = row[key];
      CHECK(std::isfinite(value));
      CHECK(value > 0.0);
    }
    const double limit =
        result[product ? "product_flops_per_second" : "copy_bytes_per_second"].get<double>();
    const double rate =
        row[product ? "flops" : "bytes"].get<double>() / row["seconds"].get<double>();
    CHECK(row["of_limit"].get<double>() == doctest::Approx(rate / limit));
  }
  std::set<std::string> expected{"attention forward",
                                 "attention backward",
                                 "layer norm forward",
                                 "layer norm backward",
                                 "GELU forward",
                                 "GELU backward",
                                 "dropout",
                                 "add",
                                 "patchify",
                                 "patch embedding",
                                 "patchify, product",
                                 "patch weight gradient",
                                 "patchify, weight gradient",
                                 "assemble tokens",
                                 "cross entropy forward",
                                 "cross entropy backward",
                                 "AdamW",
                                 "AdamW, rounded to bf16",
                                 "cast to bf16",
                                 "sum of squares, exact",
                                 "fc1 forward, bias, GELU"};
  for (const std::string layer : {"qkv", "proj", "fc1", "fc2"}) {
    for (const char* what :
         {" forward", " forward, bias", " input gradient", " weight gradient", " bias gradient"})
      expected.insert(layer + what);
  }
  std::set<std::string> found;
  for (const auto& [name, row] : rows) found.insert(name);
  CHECK(found == expected);

  // ViT-Ti/16: 197 tokens, width 192, 3 heads of 64; one image.
  CHECK(rows["qkv forward"]["flops"] == 2 * 197 * 576 * 192);
  CHECK(rows["fc2 weight gradient"]["flops"] == 2 * 197 * 768 * 192);
  for (const char* name : {"patch embedding", "patchify, product", "patch weight gradient"})
    CHECK(rows[name]["flops"] == 2 * 196 * 768 * 192);
  const std::int64_t pairs = std::int64_t{3} * 3 * 50 * 50;  // of 197 / 50 sequences
  CHECK(rows["attention forward"]["flops"] == 2 * 2 * pairs * 64);
  CHECK(rows["attention backward"]["flops"] == 5 * 2 * pairs * 64);
  CHECK(rows["AdamW"]["bytes"] == 7 * 4 * 12 * 192 * 192);
  CHECK(rows["AdamW, rounded to bf16"]["bytes"] == 30 * 12 * 192 * 192);
  CHECK(rows["GELU backward"]["bytes"] == 3 * 4 * 197 * 768);
  CHECK(rows["cast to bf16"]["bytes"] == 6 * 12 * 192 * 192);
}

TEST_CASE("cli: bench kernels of one kind, for people") {
  const Output table = sherd_run(kKernels + "--only attention");
  CHECK_MESSAGE(table.status == 0, table.text);
  for (const char* word : {"product limit", "64^3 bf16 product", "memory limit", "64.0 KiB",
                           "attention backward", "B 1, H 3, N 197, D 64", "GFLOP/s"})
    CHECK_MESSAGE(contains(table, word), table.text);
  CHECK(!contains(table, "GELU"));

  refuses("bench kernels --models giant", {"--models", "'giant'", "known: tiny, small, base"});
  refuses("bench kernels --device meta", {"--device meta", "use cpu or cuda"});
  refuses("bench kernels --attention fast", {"--attention", "auto, own or cudnn", "'fast'"});
  refuses("bench kernels --attention cudnn", {"computes on device cuda", "this is cpu"});
  refuses("bench kernels --dtype f64", {"--dtype", "bf16, f16 or f32", "got f64"});
  refuses("bench kernels --attention cudnn", {"cuDNN", "--attention own"});
  refuses("bench kernels --attention flash", {"--attention", "got 'flash'"});
  refuses(kKernels + "--only lstm", {"--only", "'lstm'"});
  refuses("bench kernels --buffer 12", {"--buffer", "4096"});
  refuses("bench kernels --batch-size -1", {"--batch-size", "negative"});
  refuses("bench kernels --tokens 0", {"--tokens: expected 1 to"});
}

TEST_CASE("cli: bench step compares with a product of the type that it computes in") {
  const Output step =
      sherd_run("bench step " + kTinyModel + "--steps 1 --matrix 64 --precision bf16");
  CHECK_MESSAGE(step.status == 0, step.text);
  CHECK(contains(step, "64^3 bf16 product"));
  CHECK(!contains(step, "MFU"));  // a peak belongs to a GPU
  const json line = json::parse(
      sherd_run("bench step " + kTinyModel + "--steps 1 --matrix 64 --precision bf16 --json").out);
  CHECK(line["device"] == "cpu");
  CHECK(line["precision"] == "bf16");
  CHECK(line["peak_flops_per_second"] == 0.0);
}

TEST_CASE("cli: peaks of GPUs by the names that CUDA gives") {
  CHECK(cli::peak_bf16_flops("NVIDIA A100-SXM4-80GB") == 312e12);
  CHECK(cli::peak_bf16_flops("NVIDIA A10") == 125e12);
  CHECK(cli::peak_bf16_flops("NVIDIA A10G") == 0.0);  // another chip
  CHECK(cli::peak_bf16_flops("NVIDIA H100 80GB HBM3") == 989e12);
  CHECK(cli::peak_bf16_flops("NVIDIA H100 PCIe") == 756e12);
  CHECK(cli::peak_bf16_flops("NVIDIA H200") == 989e12);
  CHECK(cli::peak_bf16_flops("NVIDIA L4") == 121e12);
  CHECK(cli::peak_bf16_flops("NVIDIA L40S") == 362e12);
  CHECK(cli::peak_bf16_flops("emulated") == 0.0);
}

TEST_CASE("gpu_check: what cannot be done is one clear error") {
  const auto refused = [](const std::string& arguments, int status, const std::string& piece) {
    const Output output = gpu_check(arguments);
    CAPTURE(output.text);
    CHECK(output.status == status);
    CHECK(output.err.find(piece) != std::string::npos);
    CHECK(output.err.find("Traceback") == std::string::npos);
  };
  const TempDirectory folder;
  put_file(folder.path("file"), {1});
  refused("", 1, "gpu_check: no GPU");
  refused("--rehears --fast", 2, "--fast");
  refused("--archs 90", 2, "--archs belongs to --build-only");
  refused("--minutes 0", 2, "--minutes must be above 0");
  refused("--json /no/such/folder/file", 2, "cannot be written");
  refused("--pack --quick", 2, "--pack goes alone");
  refused("--rehearse --build " + folder.path("no"), 2, folder.path("no"));
  refused("--pack " + folder.path(), 1, "is no pack");
  CHECK(std::filesystem::exists(folder.path("file")));
}

TEST_CASE("gpu_check: a part that fails is named, and the others still run") {
  const TempDirectory folder;
  const auto program = [&](const std::string& name, const std::string& body) {
    const std::filesystem::path path = folder.path(name);
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << "#!/bin/sh\n" << body << "\n";
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  };
  // One says nothing that is of use, one fails, one hangs.
  program("tools/cli/sherd", "echo nonsense");
  program("tests/test_device", "echo '[doctest] test cases: 3 | 2 passed | 1 failed'; exit 1");
  program("tests/test_gradcheck", "echo going; sleep 1000");
  const Output output = gpu_check("--rehearse --minutes 0.05 --build " + folder.path());
  CAPTURE(output.text);
  CHECK(output.status == 1);
  CHECK(output.seconds < 60.0);
  CHECK(output.err.empty());
  CHECK(contains(output, "1 failed"));
  CHECK(contains(output, "no time is left"));
  std::map<std::string, std::string> states;
  const auto read_states = [&](const std::string& path) {
    const json whole = json::parse(text_of(path));
    for (const json& part : whole["parts"]) states[part["part"]] = part["state"];
  };
  read_states(folder.path("check.json"));
  CHECK(states["test_device"] == "failed");
  CHECK(states["test_gradcheck"] == "failed");
  CHECK(states["kernels"] == "skipped");

  program("tests/test_gradcheck", "echo '[doctest] test cases: 5 | 5 passed | 0 failed'");
  const std::string numbers = folder.path("numbers.json");
  const Output second = gpu_check("--rehearse --build " + folder.path() + " --json " + numbers);
  CHECK(second.status == 1);
  CHECK(contains(second, "5 passed"));
  read_states(numbers);
  CHECK(states["test_gradcheck"] == "passed");
  CHECK(states["quick start"] == "failed");
  CHECK(states["kernels"] == "failed");
}

TEST_CASE("gpu_check: a pack answers what pkg-config is asked") {
  const TempDirectory folder;
  const std::string pack = folder.path("pack");
  const Output made = gpu_check("--pack " + pack);
  if (made.status != 0) {  // another distribution, or not all packages: said so
    const bool said = contains(made, "no dpkg") || contains(made, "not installed here");
    CHECK_MESSAGE(said, made.text);
    return;
  }
  const std::string moved = folder.path("moved");
  std::filesystem::rename(pack, moved);
  const auto answer = [&](const std::string& question) {
    return run("exec " + moved + "/pkg-config " + question);
  };
  CHECK(answer("--version").status == 0);
  CHECK(contains(answer("--cflags fmt"), "-I" + moved + "/include -DFMT_HEADER_ONLY"));
  CHECK(contains(answer("--modversion zlib"), "1."));
  CHECK(answer("--libs zlib").out == moved + "/lib/libz.a\n");
  CHECK(answer("--modversion mpich").status == 1);
  for (const char* file :
       {"/include/eigen3/Eigen/Core", "/include/doctest/doctest.h", "/lib/libz.a",
        "/meson/mesonbuild/mesonmain.py", "/licences/libeigen3-dev"})
    CHECK(std::filesystem::exists(moved + file));
  CHECK(contains(run("exec python3 " + moved + "/meson/meson.py --version"), "."));
  // An older pack is replaced.
  CHECK(gpu_check("--pack " + moved).status == 0);
}
