// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/process_mesh.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/suggest.h>

#include <charconv>

namespace sherd {

ProcessMesh::ProcessMesh(std::vector<Axis> axes) : axes_(std::move(axes)) {
  SHERD_CHECK(!axes_.empty(), "a mesh needs at least one axis");
  for (std::size_t i = 0; i < axes_.size(); ++i) {
    const Axis& axis = axes_[i];
    SHERD_CHECK(!axis.name.empty() && axis.size >= 1,
                "mesh: axis '{}' has size {}, expected 1 or more", axis.name, axis.size);
    for (std::size_t j = 0; j < i; ++j) {
      SHERD_CHECK(axes_[j].name != axis.name, "mesh: the axis '{}' is there twice", axis.name);
    }
    SHERD_CHECK(!__builtin_mul_overflow(size_, axis.size, &size_),
                "mesh: more ranks than can be counted");
  }
}

ProcessMesh ProcessMesh::parse(std::string_view text) {
  std::vector<Axis> axes;
  for (std::string_view rest = text;;) {
    const std::string_view part = rest.substr(0, rest.find(','));
    const std::size_t equals = part.find('=');
    Axis axis;
    bool valid = equals != std::string_view::npos;
    if (valid) {
      const std::string_view number = part.substr(equals + 1);
      const auto [end, error] =
          std::from_chars(number.data(), number.data() + number.size(), axis.size);
      valid = error == std::errc() && end == number.data() + number.size();
      axis.name = part.substr(0, equals);
    }
    SHERD_CHECK(valid, "--mesh {}: expected axes such as replicate=2,shard=4{}", text,
                part == text ? std::string() : fmt::format(", got '{}'", part));
    axes.push_back(std::move(axis));
    if (part.size() == rest.size()) break;
    rest.remove_prefix(part.size() + 1);
  }
  return ProcessMesh(std::move(axes));
}

std::size_t ProcessMesh::find(std::string_view axis) const {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < axes_.size(); ++i) {
    if (axes_[i].name == axis) return i;
    names.push_back(axes_[i].name);
  }
  fail("mesh {}: no axis '{}'{}", to_string(), axis, did_you_mean(axis, names));
}

int ProcessMesh::stride(std::string_view axis) const {
  int stride = 1;
  for (std::size_t i = find(axis) + 1; i < axes_.size(); ++i) stride *= axes_[i].size;
  return stride;
}

int ProcessMesh::axis_size(std::string_view axis) const {
  return axes_[find(axis)].size;
}

int ProcessMesh::coordinate(int rank, std::string_view axis) const {
  SHERD_CHECK(rank >= 0 && rank < size_, "mesh {}: rank {} of {} ranks", to_string(), rank, size_);
  return rank / stride(axis) % axis_size(axis);
}

std::vector<int> ProcessMesh::group(int rank, std::string_view axis) const {
  const int step = stride(axis), first = rank - coordinate(rank, axis) * step;
  std::vector<int> ranks;
  for (int i = 0; i < axis_size(axis); ++i) ranks.push_back(first + i * step);
  return ranks;
}

std::string ProcessMesh::to_string() const {
  std::string text;
  for (const Axis& axis : axes_) {
    text += fmt::format("{}{}={}", text.empty() ? "" : ",", axis.name, axis.size);
  }
  return text;
}

}  // namespace sherd
