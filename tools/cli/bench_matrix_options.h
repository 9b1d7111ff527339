// SPDX-License-Identifier: Apache-2.0
// What `sherd bench matrix` was asked for.
#pragma once

#include "bench_matrix.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace sherd::cli {

// The flags as they were typed.
struct MatrixFlags {
  std::string models = "vit_large_patch16_224,vit_huge_patch14_224";
  std::string policies = "none,zero1,zero2,grad_op,zero3,hybrid";
  std::string micro_batches = "4,16", precisions = "fp32,bf16", ranks = "1,2";
  std::string peers = "auto", python = "python3", peer_script = SHERD_PEER_SCRIPT;
  std::string image_size = "3x224x224", device = "cpu", out, resume = "yes";
  std::int64_t threads = 0, steps = 10, warmup = 3, classes = 101, rounds = 1, product = 0;
  double timeout = 14400.0;
  bool list = false, python_given = false, script_given = false;
};

// Checks them, and asks --python which peers it has. Into `versions` go those that are measured, by
// name; into left_out those that are not here, which is an error where they were named. Throws for
// what is unknown, out of range or contradicts itself.
MatrixOptions matrix_options(const MatrixFlags& flags, nlohmann::ordered_json& versions,
                             std::vector<LeftOut>& left_out);

}  // namespace sherd::cli
