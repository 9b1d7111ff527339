// SPDX-License-Identifier: Apache-2.0
// `sherd bench matrix`: the same training steps by Sherd, PyTorch and DeepSpeed, each in a process
// of its own. See Note [A cell is a process] in bench_matrix.cpp.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace sherd::cli {

struct MatrixOptions {
  std::vector<std::string> models, policies, precisions;
  std::vector<std::int64_t> micro_batches, ranks;  // a micro-batch is of one rank: weak scaling
  std::int64_t threads = 0;                        // of a rank
  std::int64_t steps = 0, warmup = 0, classes = 0, rounds = 0, product = 0;
  std::string image_size, device;
  // Which peers are measured, of "torch" and "deepspeed"; and how.
  std::vector<std::string> peers;
  std::string python, peer_script;
  std::string out;  // the folder of everything that is written
};

// What is measured at once: an engine at one point of the matrix.
struct Cell {
  std::string model, policy, precision;
  std::string engine;  // "sherd", or one of cell.py's
  std::int64_t micro_batch = 0, ranks = 0;

  std::string system() const;  // "sherd", "torch" or "deepspeed"
  std::string name()
      const;  // unlike any other's, and fit for a file: "vit_tiny...-b4-fp32-r2-zero3-sherd"
  // The engines of one place take turns.
  bool same_place(const Cell& other) const;
};

// Points of the matrix that mean nothing, and why.
struct LeftOut {
  std::string what, reason;
};

struct MatrixCells {
  std::vector<Cell> cells;  // in the order they are measured; engines of a place side by side
  std::vector<LeftOut> left_out;
};

// Throws where the lists leave nothing.
MatrixCells list_cells(const MatrixOptions& options);

// The command line that measures it. `inputs`: of its model, for peers.
std::vector<std::string> command_of(const Cell& cell, const MatrixOptions& options,
                                    const std::string& program, const std::string& inputs);
// The one that writes the inputs of a model.
std::vector<std::string> inputs_command(const std::string& model, const MatrixOptions& options,
                                        const std::string& program, const std::string& inputs);

// One line of results.jsonl.
struct CellRun {
  std::string cell;  // its name
  std::int64_t round = 0;
  std::string status;     // "ok", "failed", or "unavailable" where there is no such program
  std::string reason;     // of what is not ok
  double seconds = 0.0;   // of the whole process
  nlohmann::json result;  // what it printed; null where it is not ok
};

nlohmann::ordered_json to_json(const CellRun& run);
CellRun run_from_json(const nlohmann::json& line);

// A cell over its rounds. NaN: not known.
struct CellSummary {
  Cell cell;
  std::string status, reason;    // "ok" where any round was; "not run" where none was
  int rounds = 0;                // that were ok
  double seconds, lower, upper;  // a step: median of the rounds' medians; their farthest quartiles
  double images_per_second;      // by the median
  double peak_bytes;             // of a rank: Sherd's own count, or what PyTorch allocated on a GPU
  double resident_bytes;         // of all processes together
  double base_resident_bytes;    // of these, what PyTorch itself holds; 0 for Sherd
  double sent_bytes;             // by a rank in a step: counted by Sherd, by formula for peers
  double exposed_seconds;        // a step; Sherd's only
  double product_rate;           // FLOP/s; the lowest of the rounds
  double step_flops;             // of all ranks; Sherd's count of the model's products
  double efficiency;             // one rank's step without sharding / this step
  double against_sherd;          // this step / Sherd's of the same place
  double loss_difference;        // largest relative difference from Sherd's losses, over the steps
  bool equal_losses = false;     // bit for bit those of Sherd's first policy at the same point
  std::vector<double> losses;
  std::string version;
};

std::vector<CellSummary> summarize(const std::vector<Cell>& cells,
                                   const std::vector<CellRun>& runs);

// A table of all cells by RFC 4180: CRLF, a header, empty where a number is not known.
std::string matrix_csv(const std::vector<CellSummary>& summaries);

}  // namespace sherd::cli
