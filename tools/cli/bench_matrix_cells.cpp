// SPDX-License-Identifier: Apache-2.0
// Which cells a matrix has, and the commands that measure them.
#include "bench_matrix.h"

#include <sherd/runtime/error.h>

#include <algorithm>
#include <map>

namespace sherd::cli {
namespace {

// Engines that do what a policy of ours does.
const std::map<std::string, std::vector<std::string>>& peers_of_policies() {
  static const std::map<std::string, std::vector<std::string>> kPeers{
      {"none", {"ddp"}},
      {"zero1", {"deepspeed1"}},
      {"zero2", {"deepspeed2"}},
      {"grad_op", {"fsdp2_grad_op"}},
      {"zero3", {"fsdp2_full", "deepspeed3"}},
      {"hybrid", {"fsdp2_hybrid"}}};
  return kPeers;
}

// Why this policy means nothing on so many ranks; empty where it does.
std::string nonsense(const std::string& policy, std::int64_t ranks) {
  if (policy == "none") return {};
  if (ranks == 1) return "one rank has nothing to share, so it is the same as none";
  if (policy == "hybrid" && (ranks < 4 || ranks % 2 != 0))
    return "two groups that shard inside need an even number of ranks from 4 on";
  return {};
}

// The shape of the images and the classes, which all commands share.
void add_model(std::vector<std::string>& command, const std::string& model,
               const MatrixOptions& options) {
  for (const std::string& word :
       {std::string("--preset"), model, std::string("--dataset"), std::string("synthetic"),
        std::string("--image-size"), options.image_size, std::string("--classes"),
        fmt::format("{}", options.classes), std::string("--steps"),
        fmt::format("{}", options.steps), std::string("--warmup"),
        fmt::format("{}", options.warmup)})
    command.push_back(word);
}

}  // namespace

std::string Cell::system() const {
  if (engine == "sherd") return engine;
  return engine.starts_with("deepspeed") ? "deepspeed" : "torch";
}

std::string Cell::name() const {
  return fmt::format("{}-b{}-{}-r{}-{}-{}", model, micro_batch, precision, ranks, policy, engine);
}

bool Cell::same_place(const Cell& other) const {
  return model == other.model && policy == other.policy && precision == other.precision &&
         micro_batch == other.micro_batch && ranks == other.ranks;
}

MatrixCells list_cells(const MatrixOptions& options) {
  MatrixCells list;
  for (const std::int64_t ranks : options.ranks) {
    for (const std::string& policy : options.policies) {
      const std::string reason = nonsense(policy, ranks);
      if (!reason.empty()) {
        list.left_out.push_back(
            {fmt::format("{} on {} rank{}", policy, ranks, ranks == 1 ? "" : "s"), reason});
      }
    }
  }
  const auto measured = [&](const std::string& system) {
    return system == "sherd" || std::ranges::find(options.peers, system) != options.peers.end();
  };
  for (const std::string& model : options.models) {
    for (const std::string& precision : options.precisions) {
      for (const std::int64_t micro_batch : options.micro_batches) {
        for (const std::int64_t ranks : options.ranks) {
          for (const std::string& policy : options.policies) {
            if (!nonsense(policy, ranks).empty()) continue;
            std::vector<std::string> engines{"sherd"};
            const auto& peers = peers_of_policies().at(policy);
            engines.insert(engines.end(), peers.begin(), peers.end());
            for (const std::string& engine : engines) {
              const Cell cell{model, policy, precision, engine, micro_batch, ranks};
              if (measured(cell.system())) list.cells.push_back(cell);
            }
          }
        }
      }
    }
  }
  if (list.cells.empty()) {
    std::string reasons;
    for (const LeftOut& left : list.left_out)
      reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", left.what, left.reason);
    fail("--shards and --ranks leave no cell ({}); add none to --shards, or more to --ranks",
         reasons);
  }
  return list;
}

std::vector<std::string> command_of(const Cell& cell, const MatrixOptions& options,
                                    const std::string& program, const std::string& inputs) {
  const std::string ranks = fmt::format("{}", cell.ranks);
  const std::string threads = fmt::format("{}", options.threads);
  if (cell.engine != "sherd") {
    std::vector<std::string> command{options.python,  options.peer_script,
                                     "--engine",      cell.engine,
                                     "--inputs",      inputs,
                                     "--device",      options.device,
                                     "--ranks",       ranks,
                                     "--threads",     threads,
                                     "--micro-batch", fmt::format("{}", cell.micro_batch),
                                     "--precision",   cell.precision,
                                     "--steps",       fmt::format("{}", options.steps),
                                     "--warmup",      fmt::format("{}", options.warmup)};
    if (options.product > 0) {
      command.push_back("--product");
      command.push_back(fmt::format("{}", options.product));
    }
    return command;
  }
  std::vector<std::string> command{program, "bench", "step", "--json"};
  add_model(command, cell.model, options);
  for (const std::string& word :
       {std::string("--batch-size"), fmt::format("{}", cell.ranks * cell.micro_batch),
        std::string("--precision"), cell.precision, std::string("--shard"), cell.policy,
        std::string("--threads"), threads, std::string("--device"), options.device})
    command.push_back(word);
  if (cell.ranks > 1) command.insert(command.end(), {"--ranks", ranks});
  if (cell.policy == "hybrid")
    command.insert(command.end(), {"--mesh", fmt::format("replicate=2,shard={}", cell.ranks / 2)});
  if (options.product > 0)
    command.insert(command.end(), {"--matrix", fmt::format("{}", options.product)});
  return command;
}

std::vector<std::string> inputs_command(const std::string& model, const MatrixOptions& options,
                                        const std::string& program, const std::string& inputs) {
  std::vector<std::string> command{program, "bench", "step", "--write-inputs", inputs};
  add_model(command, model, options);
  const std::int64_t batch = std::ranges::max(options.ranks) *  // smaller cells take a part of it
                             std::ranges::max(options.micro_batches);
  command.insert(command.end(), {"--batch-size", fmt::format("{}", batch)});
  return command;
}

}  // namespace sherd::cli
