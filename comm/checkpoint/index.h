// SPDX-License-Identifier: Apache-2.0
// What a sharded checkpoint holds, and where. A checkpoint is a directory:
//
//   step-00001000/
//     index.json                          this description, in JSON
//     config.toml                         the run's settings, resolved
//     rank-00000-of-00004.safetensors     what each rank wrote: pieces of tensors
//
// A tensor is known by its parameter's name (and that of an optimizer's state) and has a global
// shape. A piece is a run of its elements in row-major order, so whatever ranks, units or policy
// wrote it, any others can find what they need. In its file a piece is a tensor of its own: with
// the whole shape where it is whole, else one-dimensional.
//
// Every byte is under a checksum (XXH3, 64 bits): those of a piece by blocks, so that what is read
// is checked without reading more than it and the ends of two blocks.
#pragma once

#include <sherd/runtime/api.h>
#include <sherd/runtime/dtype.h>
#include <sherd/runtime/shape.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sherd {

struct CheckpointPiece {
  std::size_t file = 0;  // in CheckpointIndex::files
  std::int64_t first = 0, numel = 0;
  std::uint64_t offset = 0;              // of its first byte in the file
  std::vector<std::uint64_t> checksums;  // one a block
};

struct CheckpointTensor {
  std::string parameter;
  std::string state;  // "exp_avg"; empty: the parameter itself
  DType dtype = DType::f32;
  Shape shape;
  std::vector<CheckpointPiece> pieces;  // by `first`; together every element once

  // Its name in the files: "head.weight", "optimizer.head.weight.exp_avg".
  SHERD_API std::string key() const;
};

struct CheckpointFile {
  std::string name;
  std::uint64_t bytes = 0;
  std::uint64_t header_bytes = 0;  // before the tensors
  std::uint64_t header_checksum = 0;
};

struct CheckpointIndex {
  static constexpr int kVersion = 1;
  static constexpr std::uint64_t kBlock = 4 << 20;  // bytes under one checksum

  std::string producer;               // "sherd 0.1.0"
  std::int64_t step = 0;              // optimizer steps done
  std::string run;                    // a JSON object of the program that wrote it
  std::uint64_t config_checksum = 0;  // of config.toml; 0: there is none
  std::vector<CheckpointFile> files;
  std::vector<CheckpointTensor> tensors;  // by name; a parameter before its states

  SHERD_API const CheckpointTensor* find(std::string_view parameter,
                                         std::string_view state = {}) const;
};

SHERD_API std::uint64_t checkpoint_checksum(std::span<const std::uint8_t> bytes);
SHERD_API std::uint64_t checkpoint_checksum(std::string_view text);

// JSON with a checksum over itself.
SHERD_API std::string to_json(const CheckpointIndex& index);
// Checks everything that can be checked without the files: `path` only serves messages. A newer
// version than this program's is an error that says so.
SHERD_API CheckpointIndex parse_checkpoint_index(std::string_view text, const std::string& path);

// What one rank's file holds, for the rank that writes the index; and all of them put together.
SHERD_API std::string to_json(const CheckpointFile& file,
                              std::span<const CheckpointTensor> tensors);
SHERD_API CheckpointIndex merge_checkpoint_tables(std::span<const std::string> tables);

}  // namespace sherd
