// SPDX-License-Identifier: Apache-2.0
// Collectives between devices, against those of threads; with as many ranks as there are devices.
#include "device_support.h"

#include "nccl_support.h"
// After doctest.
#include <sherd/comm/nccl_reduce.h>
#include <sherd/comm/reduce.h>

#include "../unit/collective_checks.h"

using namespace sherd;
using test::DeviceRank;

namespace {

std::vector<int> sizes() {
  std::vector<int> all;
  for (int size = 1; size <= std::min(4, cuda::device_count()); ++size) all.push_back(size);
  return all;
}

NcclOptions exact(std::size_t staging_bytes = 1 << 20) {
  NcclOptions options;
  options.exact_sums = true;
  options.staging_bytes = staging_bytes;
  return options;
}

template <typename T>
bool is_nan(T x) {
  if constexpr (sizeof(T) == 2) {
    return std::isnan(static_cast<float>(x));
  } else {
    return x != x;
  }
}

template <typename T>
std::vector<T> values_of_rank(int rank, std::int64_t count) {
  std::vector<T> values = test::rank_values<T>(rank, count);
  if constexpr (!std::is_integral_v<T>) {
    // What order and rounding matter for, and what a maximum may forget.
    if (count > 40) {
      values[3] = T(rank == 0 ? INFINITY : 1.0f);
      values[5] = T(rank == 1 ? -INFINITY : INFINITY);
      values[7] = T(rank == 2 ? NAN : 7.0f);
      values[11] = T(rank % 2 == 0 ? -0.0f : 0.0f);
      values[13] = T(rank == 0 ? 60000.0f : 1e-7f);
    }
  }
  return values;
}

template <typename T, typename Result>
void check_kernel(DType dtype, DType result, int ranks, std::int64_t count) {
  std::vector<std::vector<T>> all;
  std::vector<const void*> sources;
  for (int r = 0; r < ranks; ++r) all.push_back(values_of_rank<T>(r, count));
  for (const auto& one : all) sources.push_back(one.data());
  const std::int64_t stride = count + (count % 2 == 0 ? 0 : 3);
  const int mine = ranks / 2;
  std::vector<T> received(static_cast<std::size_t>(stride * (ranks - 1)));
  for (int r = 0, place = 0; r < ranks; ++r) {
    if (r != mine)
      std::ranges::copy(all[static_cast<std::size_t>(r)], received.begin() + stride * place++);
  }
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::average, ReduceOp::max}) {
    if (op == ReduceOp::average && std::is_integral_v<T>) continue;
    std::vector<Result> expected(static_cast<std::size_t>(count));
    reduce_in_tree(sources, expected.data(), count, dtype, result, op);
    const test::DeviceArray<T> others(received), own(all[static_cast<std::size_t>(mine)]);
    const test::DeviceArray<Result> output(expected.size());
    reduce_in_tree(test::device_context().compute_stream(),
                   {own.data(), others.data(), stride, mine, ranks}, output.data(), count, dtype,
                   result, op);
    const std::vector<Result> got = output.values();
    std::size_t different = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      // NaNs may have any bits.
      const bool nan = is_nan(got[i]) && is_nan(expected[i]);
      different += !nan && std::memcmp(&got[i], &expected[i], sizeof(Result)) != 0;
    }
    CAPTURE(name_of(dtype));
    CAPTURE(ranks);
    CAPTURE(count);
    CAPTURE(static_cast<int>(op));
    CHECK(different == 0);
  }
}

}  // namespace

TEST_CASE("nccl: the kernel that adds has the bits of the tree on the host") {
  test::in_all_orders([] {
    for (const int ranks : {1, 2, 3, 4, 5, 6, 7, 8, 13}) {
      for (const std::int64_t count : {1, 64, 999}) {
        check_kernel<double, double>(DType::f64, DType::f64, ranks, count);
        check_kernel<float, float>(DType::f32, DType::f32, ranks, count);
        check_kernel<f16, f16>(DType::f16, DType::f16, ranks, count);
        check_kernel<bf16, bf16>(DType::bf16, DType::bf16, ranks, count);
        check_kernel<f16, float>(DType::f16, DType::f32, ranks, count);
        check_kernel<bf16, float>(DType::bf16, DType::f32, ranks, count);
        check_kernel<std::int64_t, std::int64_t>(DType::i64, DType::i64, ranks, count);
        check_kernel<std::int32_t, std::int32_t>(DType::i32, DType::i32, ranks, count);
        check_kernel<std::uint8_t, std::uint8_t>(DType::u8, DType::u8, ranks, count);
      }
    }
  });
}

TEST_CASE("nccl: with exact sums every collective and type has the bits of threads") {
  for (const int size : sizes()) {
    CAPTURE(size);
    test::on_devices(size, exact(), [](DeviceRank& rank) {
      CHECK(rank.nccl.backend() == "NCCL");
      test::check_collectives(rank.comm, {0, 1, 5, 1030});
      test::check_type<float>(rank.comm, DType::f32, 2'051);
    });
    // A staging memory that holds little: many pieces.
    test::on_devices(size, exact(4096), [](DeviceRank& rank) {
      test::check_collectives(rank.comm, {2'001});
      test::check_wide<bf16>(rank.comm, DType::bf16, 3'333);
    });
  }
}

TEST_CASE("nccl: without exact sums all but the order of sums is the same") {
  NcclOptions options;
  options.staging_bytes = 8192;
  for (const int size : sizes()) {
    CAPTURE(size);
    std::int64_t different = 0;
    test::on_devices(size, options, [&](DeviceRank& rank) {
      Communicator& comm = rank.comm;
      // Sums of two are the same in every order.
      if (size <= 2) test::check_collectives(comm, {0, 1, 5, 1030});
      test::check_wide<bf16>(comm, DType::bf16, 1'001);
      test::check_wide<f16>(comm, DType::f16, 1'001);
      test::check_type<std::int64_t>(comm, DType::i64, 77);
      test::check_type<std::int32_t>(comm, DType::i32, 77);
      test::check_type<std::uint8_t>(comm, DType::u8, 77);
      std::vector<float> nan{rank.host.rank() == 1 ? NAN : 7.0f, 1.0f};
      comm.all_reduce(nan.data(), 2, DType::f32, ReduceOp::max, "nan");
      SHERD_CHECK(size == 1 || std::isnan(nan[0]), "a NaN was lost in a max");
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::average}) {
        std::vector<float> data = test::rank_values<float>(comm.rank(), 5'000), exact_data = data;
        comm.all_reduce(data.data(), 5'000, DType::f32, op, "sum");
        rank.host.all_reduce(exact_data.data(), 5'000, DType::f32, op, "exact sum");
        for (std::size_t i = 0; i < data.size(); ++i) {
          SHERD_CHECK(std::abs(data[i] - exact_data[i]) < 1e-5f, "{} and {}", data[i],
                      exact_data[i]);
          if (rank.host.rank() == 0) different += data[i] != exact_data[i];
        }
      }
    });
    // Else the tests of exact sums would pass without them.
    if (cuda::build_name() == "emulated CUDA") CHECK((different > 100) == (size > 2));
  }
}

TEST_CASE("nccl: groups, which talk one after the other on one stream") {
  if (cuda::device_count() < 4) return;
  test::on_devices(4, exact(), [](DeviceRank& rank) {
    const int me = rank.host.rank();
    const std::vector<int> everybody{0, 1, 2, 3}, pair{me % 2, me % 2 + 2};
    const auto all = rank.comm.split(everybody, "all");
    const auto pairs = rank.comm.split(pair, "pairs");
    const auto alone = pairs->split(std::vector<int>{pairs->rank()}, "alone");
    CHECK(pairs->size() == 2);
    CHECK(pairs->rank() == me / 2);
    for (int i = 0; i < 3; ++i) {
      test::check_type<float>(*all, DType::f32, 100 * i);
      test::check_type<double>(*pairs, DType::f64, 50 * i);
      test::check_type<float>(*alone, DType::f32, 10);
    }
  });
}

TEST_CASE("nccl: calls are counted as everywhere, and the staging memory in the ledger") {
  for (const int size : sizes()) {
    NcclOptions options = exact(123'456);
    test::on_devices(size, options, [&](DeviceRank& rank) {
      const auto& ledger = rank.context.ledger();
      CHECK(ledger.live(MemoryCategory::communication) ==
            static_cast<std::int64_t>(size == 1 ? 0 : Allocator::rounded(123456)));
      std::vector<float> data(static_cast<std::size_t>(size) * 12);
      rank.comm.all_reduce(data.data(), 12, DType::f32, ReduceOp::sum, "a");
      rank.comm.reduce_scatter(data.data(), data.data(), 3, DType::f32, ReduceOp::sum, "b");
      rank.comm.barrier("c");
      const std::int64_t others = size - 1;
      CHECK(rank.nccl.counters().total_bytes() == 2 * 48 * others / size + 12 * others);
      CHECK(rank.nccl.counters().calls[static_cast<std::size_t>(Collective::barrier)] == 1);
    });
  }
}

TEST_CASE("nccl: ranks that disagree get the errors of threads, and no work is left behind") {
  if (cuda::device_count() < 3) return;
  const std::vector<std::function<void(Communicator&)>> mistakes{
      [](Communicator& comm) { comm.barrier(comm.rank() == 1 ? "b" : "a"); },
      [](Communicator& comm) {
        std::vector<float> data(40);
        comm.all_gather(data.data(), data.data() + 20, comm.rank() == 2 ? 4 : 5, DType::f32, "u");
      },
      [](Communicator& comm) {
        const std::vector<bf16> input(30);
        float output[10] = {};
        if (comm.rank() == 0)
          comm.reduce_scatter(input.data(), output, 10, DType::bf16, ReduceOp::sum, "unit");
        else
          comm.reduce_scatter_wide(input.data(), output, 10, DType::bf16, ReduceOp::sum, "unit");
      },
      [](Communicator& comm) {
        float x[2] = {};
        if (comm.rank() == 0) comm.send(x, 1, DType::f32, 1, "a");
        if (comm.rank() == 1) comm.recv(x, 1, DType::i32, 0, "a");
        comm.barrier("end");
      },
      [](Communicator& comm) {
        float x[2] = {};
        if (comm.rank() == 0) comm.send(x, 1, DType::f32, 1, "a");
        comm.barrier("end");
      },
  };
  // What goes before them differs: the number of the collective. Which rank says it is chance.
  const auto words = [](std::string text) {
    if (text.starts_with("rank ") && text.substr(6, 2) == ": ") text = text.substr(8);
    const std::size_t number = text.find("collective number ");
    if (number != std::string::npos) text.erase(number, text.find(':', number) - number);
    return text;
  };
  for (const auto& mistake : mistakes) {
    std::string threads;
    try {
      run_rank_threads(3, mistake);
    } catch (const Error& error) {
      threads = error.what();
    }
    const std::string error =
        test::error_on_devices(3, exact(), [&](DeviceRank& rank) { mistake(rank.comm); });
    CHECK(threads != "");
    CHECK(words(error) == words(threads));
  }
  const std::string error = test::error_on_devices(2, exact(), [&](DeviceRank& rank) {
    std::int32_t one = 1;
    rank.comm.all_reduce(&one, 1, DType::i32, ReduceOp::average, "a");
  });
  CHECK(error.find("an average of i32 is not defined") != std::string::npos);
}

TEST_CASE("nccl: what it cannot work with is one message") {
  Context& context = test::device_context();
  const auto self = make_self_communicator();
  const auto refused = [&](int device, const NcclOptions& options, const char* piece) {
    CHECK_THROWS_WITH_AS(make_nccl_communicator(*self, device, context.compute_stream(), options),
                         doctest::Contains(piece), Error);
  };
  refused(0, {}, "needs an allocator");
  NcclOptions options;
  options.allocator = context.shared_allocator(MemoryPool::device);
  refused(1, options, "the stream is of GPU 0, and GPU 1 was asked for");
  options.staging_bytes = 63;
  refused(0, options, "63 bytes of staging memory are too few for 1 ranks");
}
