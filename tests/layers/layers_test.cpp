// SPDX-License-Identifier: Apache-2.0
// The layer table: which folder may include which. Includes point down only.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

// A box of the picture and the boxes it may include besides itself; boxes below those come with
// them.
const std::map<std::string, std::set<std::string>>& direct() {
  static const std::map<std::string, std::set<std::string>> table{
      {"runtime", {}},
      {"runtime/cuda", {"runtime"}},
      {"runtime/io", {"runtime"}},
      {"runtime/data", {"runtime/io"}},
      {"kernels", {"runtime/cuda"}},
      {"kernels/arguments", {"runtime"}},
      {"kernels/cpu", {"kernels/arguments"}},
      {"kernels/cuda", {"kernels/arguments", "runtime/cuda"}},
      {"kernels/emulator", {}},
      {"comm", {"runtime/cuda"}},
      {"autograd", {"kernels"}},
      {"models", {"autograd", "models/layers", "runtime/io"}},
      {"models/layers", {"autograd"}},
      {"optim", {"autograd"}},
      {"comm/sharding", {"comm", "models", "optim"}},
      {"comm/checkpoint", {"comm", "models", "optim", "runtime/io"}},
      {"tools/trainer", {"comm/sharding", "comm/checkpoint", "runtime/data"}},
      {"tools/planner", {"tools/trainer"}},
      {"tools/cli", {"tools/planner"}},
  };
  return table;
}

// Pairs that belong together although neither is above the other: a public kernel dispatches to the
// backend's raw kernels, which share its small enums; layers derive from Module.
const std::set<std::pair<std::string, std::string>> kTogether{
    {"runtime", "runtime/cuda"},      {"kernels", "kernels/cpu"},  {"kernels/cpu", "kernels"},
    {"kernels/cuda", "kernels/cpu"},  {"kernels", "kernels/cuda"}, {"kernels/cuda", "kernels"},
    {"kernels", "kernels/arguments"}, {"models/layers", "models"}};

std::set<std::string> below(const std::string& box) {
  std::set<std::string> all;
  std::vector<std::string> open{box};
  while (!open.empty()) {
    const std::string current = open.back();
    open.pop_back();
    for (const std::string& next : direct().at(current)) {
      if (all.insert(next).second) open.push_back(next);
    }
  }
  return all;
}

// The longest box that is a folder of this path; empty for tests and peers.
std::string box_of(const std::string& path) {
  std::string found;
  for (const auto& [box, includes] : direct()) {
    if (path.starts_with(box + "/") && box.size() > found.size()) found = box;
  }
  return found;
}

struct Include {
  std::string file, box, target;
};

std::vector<std::string> project_files() {
  const fs::path root(SHERD_SOURCE_ROOT);
  std::vector<std::string> all;
  for (const char* top : {"runtime", "kernels", "comm", "autograd", "models", "optim", "tools"}) {
    for (const auto& entry : fs::recursive_directory_iterator(root / top)) {
      static const std::set<std::string> kSources{".h", ".cpp", ".cu", ".cuh"};
      if (kSources.contains(entry.path().extension().string())) {
        all.push_back(fs::relative(entry.path(), root).string());
      }
    }
  }
  return all;
}

std::string text_of(const std::string& file) {
  std::ifstream stream(fs::path(SHERD_SOURCE_ROOT) / file);
  return std::string((std::istreambuf_iterator<char>(stream)), {});
}

std::vector<Include> project_includes() {
  static const std::regex pattern("^\\s*#\\s*include\\s*(<sherd/([^>]+)>|\"([^\"]+)\")");
  std::vector<Include> all;
  for (const std::string& file : project_files()) {
    std::istringstream lines(text_of(file));
    for (std::string line; std::getline(lines, line);) {
      std::smatch match;
      if (!std::regex_search(line, match, pattern)) continue;
      // A quoted name is looked for beside the file.
      const fs::path beside = (fs::path(file).parent_path() / match[3].str()).lexically_normal();
      all.push_back({file, box_of(file), match[2].matched ? match[2].str() : beside.string()});
    }
  }
  return all;
}

}  // namespace

TEST_CASE("layers: includes point down only") {
  const std::vector<Include> includes = project_includes();
  CHECK(includes.size() > 200);
  for (const Include& include : includes) {
    const std::string target = box_of(include.target);
    CAPTURE(include.file);
    CAPTURE(include.target);
    REQUIRE_FALSE(include.box.empty());
    REQUIRE_FALSE(target.empty());
    const bool allowed = target == include.box || below(include.box).contains(target) ||
                         kTogether.contains({include.box, target});
    CHECK(allowed);
    CHECK(fs::exists(fs::path(SHERD_SOURCE_ROOT) / include.target));
  }
}

TEST_CASE("layers: device code stays where it may be") {
  static const std::regex device("cuda_runtime|cudaStream|cublas|nccl\\.h");
  for (const std::string& file : project_files()) {
    const bool may = file.starts_with("kernels/cuda/") || file.starts_with("runtime/cuda/") ||
                     file.starts_with("comm/nccl") || file.starts_with("kernels/emulator/");
    if (!may) CHECK_MESSAGE(!std::regex_search(text_of(file), device), file);
  }
}

TEST_CASE("layers: MPI stays in its files") {
  static const std::regex mpi("include\\s*[<\"](mpi\\.h|mpi\\.hpp)");
  for (const std::string& file : project_files()) {
    if (!file.starts_with("comm/mpi_")) CHECK_MESSAGE(!std::regex_search(text_of(file), mpi), file);
  }
}

TEST_CASE("layers: io_uring stays in its file") {
  static const std::regex uring("include\\s*[<\"]liburing");
  for (const std::string& file : project_files()) {
    if (file == "runtime/io/block_file_uring.cpp") continue;
    CHECK_MESSAGE(!std::regex_search(text_of(file), uring), file);
  }
}

TEST_CASE("layers: every header and source opens with its licence") {
  CHECK(project_files().size() > 100);
  for (const std::string& file : project_files()) {
    CHECK_MESSAGE(text_of(file).starts_with("// SPDX-License-Identifier: Apache-2.0\n"), file);
  }
}

TEST_CASE("layers: every public header is installed") {
  // meson.build lists them; a forgotten one would break programs that use the installed library.
  const fs::path root(SHERD_SOURCE_ROOT);
  for (const char* top : {"runtime", "kernels", "comm", "comm/sharding", "comm/checkpoint",
                          "autograd", "models", "optim", "tools/trainer"}) {
    std::ifstream stream(root / top / "meson.build");
    const std::string text((std::istreambuf_iterator<char>(stream)), {});
    for (const auto& entry : fs::recursive_directory_iterator(root / top)) {
      const std::string path = fs::relative(entry.path(), root / top).string();
      static const std::set<std::string> kPrivate{"autograd/add_node.h",
                                                  "comm/checkpoint/block_checksum.h",
                                                  "kernels/dispatch.h",
                                                  "comm/backoff.h",
                                                  "comm/disagreement.h",
                                                  "comm/mpi_group.h",
                                                  "comm/mpi_world.h",
                                                  "comm/nccl_communicator.h",
                                                  "comm/nccl_handle.h",
                                                  "comm/nccl_reduce.h",
                                                  "comm/nccl_registration.h",
                                                  "comm/reduce.h",
                                                  "comm/shared_communicator.h",
                                                  "comm/shared_region.h",
                                                  "comm/staged_communicator.h",
                                                  "comm/tcp_hello.h",
                                                  "comm/tcp_rendezvous.h",
                                                  "comm/tcp_rendezvous_file.h",
                                                  "comm/tcp_socket.h",
                                                  "comm/tcp_world.h",
                                                  "kernels/patch_shape.h",
                                                  "runtime/cuda/check.h",
                                                  "runtime/cuda/device_code.h",
                                                  "runtime/cuda/device_code_emulated.h",
                                                  "runtime/cuda/device_code_nvcc.h",
                                                  "runtime/cuda/watch.h",
                                                  "runtime/io/block_file_queue.h",
                                                  "runtime/io/system_error.h",
                                                  "runtime/io/quote.h",
                                                  "runtime/io/torch_legacy.h",
                                                  "runtime/io/torch_listing.h",
                                                  "runtime/io/torch_types.h",
                                                  "tools/trainer/run_files.h",
                                                  "tools/trainer/run_log.h"};
      static const std::regex internal("^(cpu|cuda|arguments|emulator)/");
      if (entry.path().extension() != ".h") continue;
      if (top == std::string("kernels") && std::regex_search(path, internal)) continue;
      if (top == std::string("comm") && path.find('/') != std::string::npos) continue;  // own lists
      if (kPrivate.contains(std::string(top) + "/" + path)) continue;
      CHECK_MESSAGE(text.find("'" + path + "'") != std::string::npos, top, "/", path);
    }
  }
}
