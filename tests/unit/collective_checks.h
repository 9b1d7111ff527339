// SPDX-License-Identifier: Apache-2.0
// Every collective and type against plain loops, for any backend.
#pragma once

#include <sherd/comm/communicator.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/philox.h>

#include <cstring>
#include <vector>

namespace sherd::test {

// Rank `rank`'s elements [0, count): small numbers, of both signs where the type has them, that
// 16-bit floats and bytes hold exactly enough to tell a wrong order of sums.
template <typename T>
std::vector<T> rank_values(int rank, std::int64_t count) {
  const RandomStream stream(9, "test", "collectives", static_cast<std::uint64_t>(rank));
  std::vector<T> all(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < all.size(); ++i) {
    const double x = stream.normal(i);
    if constexpr (std::is_same_v<T, double>) {
      all[i] = x;
    } else if constexpr (std::is_integral_v<T>) {
      all[i] = static_cast<T>(std::is_signed_v<T> ? 100.0 * x : x * x * 10.0);
    } else {
      all[i] = static_cast<T>(static_cast<float>(x));
    }
  }
  return all;
}

// The documented tree, written down again: values of all ranks, one reduced.
template <typename Wide>
Wide in_tree(const std::vector<Wide>& v, std::size_t first, std::size_t last, ReduceOp op) {
  if (last - first == 1) return v[first];
  std::size_t left = 1;
  while (left * 2 < last - first) left *= 2;
  const Wide a = in_tree(v, first, first + left, op), b = in_tree(v, first + left, last, op);
  return op == ReduceOp::max ? (b > a ? b : a) : static_cast<Wide>(a + b);
}

template <typename T>
T reduced(const std::vector<std::vector<T>>& ranks, std::size_t i, ReduceOp op) {
  using Wide = std::conditional_t<std::is_same_v<T, f16> || std::is_same_v<T, bf16>, float, T>;
  std::vector<Wide> all;
  for (const auto& values : ranks) all.push_back(static_cast<Wide>(values[i]));
  Wide result = in_tree(all, 0, all.size(), op);
  if constexpr (!std::is_integral_v<T>) {
    if (op == ReduceOp::average) result *= Wide(1) / static_cast<Wide>(all.size());
  }
  return static_cast<T>(result);
}

template <typename T>
void expect_same(const std::vector<T>& got, const std::vector<T>& expected, const char* what,
                 const Communicator& comm, DType dtype) {
  const bool same =
      got.size() == expected.size() &&
      (got.empty() || std::memcmp(got.data(), expected.data(), got.size() * sizeof(T)) == 0);
  SHERD_CHECK(same, "{} of {} {}: other bits on rank {} of {}", what, got.size(), name_of(dtype),
              comm.rank(), comm.size());
}

template <typename T>
void check_type(Communicator& comm, DType dtype, std::int64_t count) {
  const int size = comm.size();
  const auto ranks = static_cast<std::size_t>(size), n = static_cast<std::size_t>(count);
  std::vector<std::vector<T>> all;
  for (int r = 0; r < size; ++r) all.push_back(rank_values<T>(r, size * count));
  const std::vector<T>& mine = all[static_cast<std::size_t>(comm.rank())];
  const std::size_t own = static_cast<std::size_t>(comm.rank()) * n;

  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::average, ReduceOp::max}) {
    if (op == ReduceOp::average && std::is_integral_v<T>) continue;
    std::vector<T> data(mine.begin(), mine.begin() + count), expected(n), piece(n);
    for (std::size_t i = 0; i < n; ++i) expected[i] = reduced(all, i, op);
    comm.all_reduce(data.data(), count, dtype, op, "all_reduce");
    expect_same(data, expected, "all_reduce", comm, dtype);
    for (std::size_t i = 0; i < n; ++i) expected[i] = reduced(all, own + i, op);
    comm.reduce_scatter(mine.data(), piece.data(), count, dtype, op, "reduce_scatter");
    expect_same(piece, expected, "reduce_scatter", comm, dtype);
    data = mine;
    comm.reduce_scatter(data.data(), data.data() + own, count, dtype, op, "in place");
    expect_same(std::vector<T>(data.begin() + static_cast<std::ptrdiff_t>(own),
                               data.begin() + static_cast<std::ptrdiff_t>(own + n)),
                expected, "reduce_scatter in place", comm, dtype);
  }

  std::vector<T> gathered(ranks * n), in_place(ranks * n), expected, swapped(ranks * n), wanted;
  for (const auto& values : all) {
    expected.insert(expected.end(), values.begin(), values.begin() + count);
    const auto* from = values.data() + own;
    wanted.insert(wanted.end(), from, from + count);
  }
  std::copy(mine.begin(), mine.begin() + count, in_place.data() + own);
  comm.all_gather(mine.data(), gathered.data(), count, dtype, "all_gather");
  comm.all_gather(in_place.data() + own, in_place.data(), count, dtype, "all_gather in place");
  expect_same(gathered, expected, "all_gather", comm, dtype);
  expect_same(in_place, expected, "all_gather in place", comm, dtype);
  comm.all_to_all(mine.data(), swapped.data(), count, dtype, "all_to_all");
  expect_same(swapped, wanted, "all_to_all", comm, dtype);

  for (int root = 0; root < size; ++root) {
    std::vector<T> data = comm.rank() == root ? mine : std::vector<T>(mine.size());
    comm.broadcast(data.data(), size * count, dtype, root, "broadcast");
    expect_same(data, all[static_cast<std::size_t>(root)], "broadcast", comm, dtype);
  }
  comm.barrier("barrier");

  // Around the ring; rank 0 receives first.
  if (size == 1) return;
  const int next = (comm.rank() + 1) % size, last = (comm.rank() + size - 1) % size;
  std::vector<T> received(mine.size());
  if (comm.rank() == 0) comm.recv(received.data(), size * count, dtype, last, "ring");
  comm.send(mine.data(), size * count, dtype, next, "ring");
  if (comm.rank() != 0) comm.recv(received.data(), size * count, dtype, last, "ring");
  expect_same(received, all[static_cast<std::size_t>(last)], "message", comm, dtype);
}

// reduce_scatter_wide of a 16-bit type: the tree in fp32 of what each rank rounded, not rounded
// again. Others: reduce_scatter.
template <typename T>
void check_wide(Communicator& comm, DType dtype, std::int64_t count) {
  constexpr bool kNarrow = sizeof(T) == 2;
  using Result = std::conditional_t<kNarrow, float, T>;
  const auto n = static_cast<std::size_t>(count);
  const std::size_t own = static_cast<std::size_t>(comm.rank()) * n;
  std::vector<std::vector<T>> inputs;
  std::vector<std::vector<Result>> wide;
  for (int r = 0; r < comm.size(); ++r) {
    inputs.push_back(rank_values<T>(r, comm.size() * count));
    wide.emplace_back();
    for (const T x : inputs.back()) wide.back().push_back(static_cast<Result>(x));
  }
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::average, ReduceOp::max}) {
    std::vector<Result> piece(n + 1, Result(77)), expected(n + 1, Result(77));
    std::size_t rounded = 0;
    for (std::size_t i = 0; i < n; ++i) {
      expected[i] = reduced(wide, own + i, op);
      rounded += static_cast<Result>(reduced(inputs, own + i, op)) != expected[i];
    }
    comm.reduce_scatter_wide(inputs[static_cast<std::size_t>(comm.rank())].data(), piece.data(),
                             count, dtype, op, "reduce_scatter_wide");
    expect_same(piece, expected, "reduce_scatter_wide", comm, dtype);
    SHERD_CHECK(
        !kNarrow || op != ReduceOp::sum || count < 100 || comm.size() == 1 || rounded > n / 10,
        "only {} of {} sums in 16 bits differ: this checks nothing", rounded, count);
  }
}

// Four ranks' 60,000 is no fp16, but a sum in fp32.
inline void check_large_f16(Communicator& comm) {
  const std::vector<f16> input(static_cast<std::size_t>(comm.size()), f16(60000.0f));
  float sum = 0.0f;
  comm.reduce_scatter_wide(input.data(), &sum, 1, DType::f16, ReduceOp::sum, "large");
  const float expected = static_cast<float>(f16(60000.0f)) * static_cast<float>(comm.size());
  SHERD_CHECK(sum == expected, "expected {}, got {}", expected, sum);
}

// Throws at the first difference. `counts`: elements of a piece.
inline void check_collectives(Communicator& comm, const std::vector<std::int64_t>& counts) {
  for (const std::int64_t count : counts) {
    check_type<double>(comm, DType::f64, count);
    check_type<float>(comm, DType::f32, count);
    check_type<f16>(comm, DType::f16, count);
    check_type<bf16>(comm, DType::bf16, count);
    check_type<std::int64_t>(comm, DType::i64, count);
    check_type<std::int32_t>(comm, DType::i32, count);
    check_type<std::uint8_t>(comm, DType::u8, count);
    check_wide<f16>(comm, DType::f16, count);
    check_wide<bf16>(comm, DType::bf16, count);
    check_wide<float>(comm, DType::f32, count);
    check_wide<double>(comm, DType::f64, count);
  }
  check_large_f16(comm);
}

}  // namespace sherd::test
