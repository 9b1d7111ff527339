// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sherd/comm/process_mesh.h>
#include <sherd/runtime/error.h>

#include <set>

using namespace sherd;

TEST_CASE("mesh: coordinates and groups") {
  const ProcessMesh mesh = ProcessMesh::parse("replicate=2,shard=4");
  CHECK(mesh.size() == 8);
  CHECK(mesh.to_string() == "replicate=2,shard=4");
  CHECK(mesh.coordinate(5, "replicate") == 1);
  CHECK(mesh.coordinate(5, "shard") == 1);
  CHECK(mesh.group(5, "shard") == std::vector<int>{4, 5, 6, 7});
  CHECK(mesh.group(5, "replicate") == std::vector<int>{1, 5});
}

TEST_CASE("mesh: the groups along each axis are a partition") {
  const ProcessMesh mesh({{"a", 3}, {"b", 1}, {"c", 4}, {"d", 2}});
  for (const ProcessMesh::Axis& axis : mesh.axes()) {
    std::set<std::vector<int>> groups;
    std::set<int> members;
    for (int rank = 0; rank < mesh.size(); ++rank) {
      const std::vector<int> group = mesh.group(rank, axis.name);
      CHECK(group[static_cast<std::size_t>(mesh.coordinate(rank, axis.name))] == rank);
      if (groups.insert(group).second) members.insert(group.begin(), group.end());
    }
    CHECK(members.size() == static_cast<std::size_t>(mesh.size()));
    CHECK(groups.size() == static_cast<std::size_t>(mesh.size() / axis.size));
  }
}

TEST_CASE("mesh: errors say what is wrong") {
  using doctest::Contains;
  CHECK_THROWS_WITH_AS(ProcessMesh::parse("replicate2"), Contains("--mesh replicate2: expected"),
                       Error);
  CHECK_THROWS_WITH_AS(ProcessMesh::parse("shard=2,"), Contains("got ''"), Error);
  CHECK_THROWS_WITH_AS(ProcessMesh::parse("shard=two"), Contains("shard=two"), Error);
  CHECK_THROWS_WITH_AS(ProcessMesh::parse("shard=0"), Contains("size 0"), Error);
  CHECK_THROWS_WITH_AS(ProcessMesh::parse("shard=2,shard=2"), Contains("there twice"), Error);
  CHECK_THROWS_WITH_AS(ProcessMesh::parse("a=65536,b=65536"), Contains("more ranks"), Error);
  const ProcessMesh mesh = ProcessMesh::parse("shard=2");
  CHECK_THROWS_WITH_AS(mesh.axis_size("shrad"), Contains("did you mean 'shard'"), Error);
  CHECK_THROWS_WITH_AS(mesh.coordinate(2, "shard"), Contains("rank 2 of 2"), Error);
}
