// SPDX-License-Identifier: Apache-2.0
// ProcessMesh: ranks arranged along named axes, the last one varying fastest: with
// "replicate=2,shard=4" rank 5 is replica 1, shard 1. A group along an axis is the ranks that
// differ in that coordinate alone. Pure arithmetic; Communicator::split makes the groups.
#pragma once

#include <sherd/runtime/api.h>

#include <string>
#include <string_view>
#include <vector>

namespace sherd {

class SHERD_API ProcessMesh {
 public:
  struct Axis {
    std::string name;
    int size = 1;
  };

  explicit ProcessMesh(std::vector<Axis> axes);
  // "replicate=2,shard=4"; throws with what is wrong in the text.
  static ProcessMesh parse(std::string_view text);

  const std::vector<Axis>& axes() const { return axes_; }
  int size() const { return size_; }  // ranks
  // By name; throws with the names there are.
  int axis_size(std::string_view axis) const;
  int coordinate(int rank, std::string_view axis) const;
  std::vector<int> group(int rank, std::string_view axis) const;  // ascending, with rank itself

  std::string to_string() const;  // "replicate=2,shard=4"

 private:
  std::size_t find(std::string_view axis) const;
  int stride(std::string_view axis) const;  // distance of neighbours along the axis

  std::vector<Axis> axes_;
  int size_ = 1;
};

}  // namespace sherd
