// SPDX-License-Identifier: Apache-2.0
// Context, ledger, allocator, storage, tensors and streams.
#include <doctest/doctest.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/matmul.h>
#include <sherd/runtime/tensor.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>

#ifdef _OPENMP
#include <omp.h>
#endif

using namespace sherd;

TEST_CASE("ledger: categories, peak and what it was made of") {
  Context context;
  Ledger& ledger = context.ledger();
  const std::int64_t granule = Allocator::kGranule;
  {
    const Tensor weights = Tensor::empty(context, {100}, DType::f32, MemoryCategory::parameters);
    CHECK(ledger.live(MemoryCategory::parameters) == granule);
    const Tensor a = Tensor::empty(context, {129}, DType::f32);
    CHECK(ledger.live(MemoryCategory::activations) == 2 * granule);
  }
  CHECK(ledger.live_total() == 0);
  CHECK(ledger.peak_total() == 3 * granule);
  CHECK(ledger.at_peak()[static_cast<std::size_t>(MemoryCategory::activations)] == 2 * granule);
  ledger.reset_peak();
  CHECK(ledger.peak_total() == 0);
}

TEST_CASE("ledger: a storage moves between categories") {
  Context context;
  const Tensor x = Tensor::empty(context, {1}, DType::f64);
  x.storage().set_category(MemoryCategory::gradients);
  CHECK(context.ledger().live(MemoryCategory::activations) == 0);
  CHECK(context.ledger().live(MemoryCategory::gradients) == Allocator::kGranule);
}

TEST_CASE("allocator: memory is reused, split, merged and aligned; zero bytes cost nothing") {
  Context context;
  const std::int64_t mib = 1 << 20;
  const void* first = nullptr;
  {
    const Tensor x = Tensor::empty(context, {8 * mib}, DType::u8);
    first = x.raw_data();
    CHECK(reinterpret_cast<std::uintptr_t>(first) % Allocator::kAlignment == 0);
  }
  {
    const Tensor a = Tensor::empty(context, {3 * mib}, DType::u8);
    const Tensor b = Tensor::empty(context, {5 * mib}, DType::u8);
    CHECK(a.raw_data() == first);
    CHECK(static_cast<std::byte*>(b.raw_data()) == static_cast<const std::byte*>(first) + 3 * mib);
  }
  const Tensor again = Tensor::empty(context, {8 * mib}, DType::u8);
  CHECK(again.raw_data() == first);
  CHECK(context.allocator().reserved_bytes() == static_cast<std::size_t>(64 * mib));
  const Tensor nothing = Tensor::empty(context, {0, 5}, DType::f32);
  CHECK(context.ledger().live_total() == 8 * mib);
}

TEST_CASE("allocator: random requests never overlap, and all memory comes back") {
  Context context;
  const RandomStream random(1, "test", "allocator");
  std::vector<Tensor> live;
  for (std::uint64_t i = 0; i < 3000; ++i) {
    if (!live.empty() && random.below(4 * i, 2) == 0) {
      const std::size_t victim = random.below(4 * i + 1, live.size());
      const auto* bytes = live[victim].data<std::uint8_t>();
      const std::int64_t n = live[victim].numel();
      bool intact = true;
      for (std::int64_t at = 0; at < n; at += 97) intact = intact && bytes[at] == bytes[0];
      REQUIRE(intact);
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(victim));
    } else {
      const std::int64_t bytes =
          1 + static_cast<std::int64_t>(random.below(4 * i + 2, i % 9 == 0 ? 900000 : 9000));
      live.push_back(Tensor::empty(context, {bytes}, DType::u8));
      std::memset(live.back().raw_data(), static_cast<int>(i % 251),
                  static_cast<std::size_t>(bytes));
    }
  }
  live.clear();
  CHECK(context.ledger().live_total() == 0);
  context.allocator().trim();
  CHECK(context.allocator().reserved_bytes() == 0);  // every piece was merged back into its segment
}

TEST_CASE("allocator: the limit is an error that names category and holdings") {
  Context context({.memory_limit = 1 << 20});
  const Tensor half = Tensor::empty(context, {1 << 19}, DType::u8, MemoryCategory::parameters);
  CHECK_THROWS_WITH_AS(Tensor::empty(context, {1 << 20}, DType::u8, MemoryCategory::gradients),
                       doctest::Contains("1.0 MiB more for gradients would exceed the limit of 1.0 "
                                         "MiB; in use: parameters 512.0 KiB"),
                       Error);
  CHECK(context.ledger().live_total() == 1 << 19);
}

TEST_CASE("allocator: cached memory is given back before the limit is an error") {
  Context context({.memory_limit = 1 << 20});
  { const Tensor x = Tensor::empty(context, {600 << 10}, DType::u8); }
  const Tensor y = Tensor::empty(context, {900 << 10}, DType::u8);
  CHECK(context.allocator().reserved_bytes() == 900 << 10);
}

TEST_CASE("allocator: near the limit everything that is not live can be given back") {
  // Pieces of all sizes, of which every second one is freed: no segment is whole, and what is free
  // comes in stretches too small for what follows.
  constexpr std::size_t kLimit = std::size_t{80} << 20;
  Context context({.memory_limit = kLimit});
  const RandomStream random(3, "test", "near the limit");
  std::vector<Tensor> kept;
  std::int64_t live = 0;
  for (std::uint64_t i = 0;; ++i) {
    const auto bytes = static_cast<std::int64_t>(
        1 + random.below(i, i % 3 == 0 ? std::size_t{3} << 20 : std::size_t{90} << 10));
    const Tensor freed = Tensor::empty(context, {bytes}, DType::u8);
    std::memset(freed.raw_data(), 1, static_cast<std::size_t>(bytes));
    if (live + bytes > std::int64_t{40} << 20) break;
    kept.push_back(Tensor::empty(context, {bytes}, DType::u8));
    std::memset(kept.back().raw_data(), static_cast<int>(i % 251), static_cast<std::size_t>(bytes));
    live = context.ledger().live_total() -
           static_cast<std::int64_t>(Allocator::rounded(static_cast<std::size_t>(bytes)));
  }
  REQUIRE(kept.size() > 20);
  live = context.ledger().live_total();
  for (int round = 0; round < 3; ++round) {
    // All that the limit leaves, but for the pages that pieces share.
    const auto rest = static_cast<std::int64_t>(kLimit) - live - (std::int64_t{2} << 20);
    const Tensor large = Tensor::empty(context, {rest / 2}, DType::u8);
    const Tensor second = Tensor::empty(context, {rest / 2}, DType::u8);
    std::memset(large.raw_data(), 7, static_cast<std::size_t>(rest / 2));
    std::memset(second.raw_data(), 8, static_cast<std::size_t>(rest / 2));
    CHECK(context.allocator().reserved_bytes() <= kLimit);
    CHECK_THROWS_AS(Tensor::empty(context, {std::int64_t{4} << 20}, DType::u8), OutOfMemory);
  }
  CHECK(context.allocator().peak_reserved_bytes() <= kLimit);
  bool intact = true;
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const std::vector<std::uint8_t> values = kept[i].to_vector<std::uint8_t>();
    intact = intact && values.front() == i % 251 && values.back() == i % 251;
  }
  CHECK(intact);
  kept.clear();
  context.allocator().trim();
  CHECK(context.allocator().reserved_bytes() == 0);
}

TEST_CASE("allocator: far from the limit nothing is given back") {
  Context context({.memory_limit = std::size_t{1} << 30});
  const auto work = [&] {
    const Tensor a = Tensor::empty(context, {40 << 20}, DType::u8);
    const Tensor b = Tensor::empty(context, {50 << 20}, DType::u8);
  };
  work();
  const std::size_t reserved = context.allocator().reserved_bytes();
  CHECK(reserved == std::size_t{128} << 20);
  for (int i = 0; i < 3; ++i) work();
  CHECK(context.allocator().reserved_bytes() == reserved);
}

TEST_CASE("out of memory: what was asked for, the limit and what lives can be read") {
  Context context({.memory_limit = 1 << 20, .host_memory_limit = 2 << 20});
  const Tensor half = Tensor::empty(context, {1 << 19}, DType::u8, MemoryCategory::parameters);
  { const Tensor more = Tensor::empty(context, {1 << 18}, DType::u8); }
  const auto refused = [&](MemoryPool pool) -> OutOfMemory {
    try {
      Tensor::empty(context, {3 << 20}, DType::u8, MemoryCategory::gradients, pool);
    } catch (const OutOfMemory& error) {
      return error;
    }
    fail("was not refused");
  };
  const OutOfMemory device = refused(MemoryPool::device), host = refused(MemoryPool::host);
  CHECK(device.pool() == MemoryPool::device);
  CHECK(device.category() == MemoryCategory::gradients);
  CHECK(device.bytes() == 3 << 20);
  CHECK(device.limit() == 1 << 20);
  CHECK(device.live() == context.ledger().live());
  CHECK(std::string(device.what()) ==
        "out of memory: 3.0 MiB more for gradients would exceed the limit of 1.0 MiB; in use: "
        "parameters 512.0 KiB; the most so far: 768.0 KiB. Raise the memory limit, or lower the "
        "batch size");
  CHECK(host.pool() == MemoryPool::host);
  CHECK(host.limit() == 2 << 20);
  CHECK(std::string(host.what()) ==
        "out of host memory: 3.0 MiB more for gradients would exceed the limit of 2.0 MiB; in use: "
        "nothing; the most so far: 0 B. Raise the host memory limit, or keep less there");
  CHECK_THROWS_WITH_AS(Tensor::empty(context, {std::int64_t{1} << 60}, DType::u8),
                       doctest::Contains("would exceed the limit of 1.0 MiB"), OutOfMemory);
  Context unlimited;  // the system refuses more than there are addresses
  CHECK_THROWS_WITH_AS(Tensor::empty(unlimited, {std::int64_t{1} << 60}, DType::u8),
                       doctest::Contains("the system refused 1024.0 PiB more for activations"),
                       OutOfMemory);
}

TEST_CASE("memory pools: each has its own bytes, ledger and limit") {
  Context context({.memory_limit = 1 << 20});
  Tensor state =
      Tensor::zeros(context, {5000}, DType::f32, MemoryCategory::optimizer_state, MemoryPool::host);
  const Tensor other =
      Tensor::empty(context, {1}, DType::u8, MemoryCategory::workspace, MemoryPool::host);
  CHECK(state.storage().pool() == MemoryPool::host);
  CHECK(Tensor::empty(context, {1}, DType::u8).storage().pool() == MemoryPool::device);
  CHECK(context.ledger().peak_total() == Allocator::kGranule);
  CHECK(context.host_ledger().live(MemoryCategory::optimizer_state) == 20480);
  CHECK(context.host_ledger().live(MemoryCategory::workspace) == 4096);
  for (const Tensor& tensor : {state, other})
    CHECK(reinterpret_cast<std::uintptr_t>(tensor.raw_data()) % 4096 == 0);
  CHECK(state.to_vector<float>() == std::vector<float>(5000));
  state.storage().set_category(MemoryCategory::parameters);
  CHECK(context.host_ledger().live(MemoryCategory::parameters) == 20480);
  state.storage().release();
  CHECK(context.host_ledger().live_total() == 4096);
  state.storage().restore();
  CHECK(context.host_ledger().live_total() == 24576);
  // The device's limit does not bound the host.
  const Tensor large = Tensor::empty(context, {8 << 20}, DType::u8, MemoryCategory::optimizer_state,
                                     MemoryPool::host);
  const Tensor released =
      Tensor::released(context, {3}, DType::f32, MemoryCategory::gradients, MemoryPool::host);
  released.storage().restore();
  CHECK(context.host_ledger().live(MemoryCategory::gradients) == 4096);
  CHECK(context.ledger().live_total() == 0);

  Context plan({.device = Device::meta});
  const Tensor on_paper =
      Tensor::empty(plan, {5000}, DType::f32, MemoryCategory::optimizer_state, MemoryPool::host);
  CHECK(plan.host_ledger().live_total() == 20480);
  CHECK(plan.ledger().live_total() == 0);
  CHECK_THROWS_WITH_AS(Allocator(make_process_memory(), 0, MemoryPool::host, 512, 4096),
                       doctest::Contains("got 4096 and 512"), Error);
}

TEST_CASE("storage: release and restore keep identity and version, a write does not") {
  Context context;
  const Tensor x = full(context, {4}, DType::f32, 2.0, MemoryCategory::gathered_parameters);
  const std::uint64_t version = x.storage().version();
  x.storage().set_owner("unit blocks.3");
  x.storage().release();
  CHECK(context.ledger().live_total() == 0);
  CHECK_THROWS_WITH_AS(x.data<float>(), doctest::Contains("unit blocks.3"), Error);
  x.storage().restore();
  CHECK(x.storage().version() == version);
  fill(x, 1.0);
  CHECK(x.storage().version() > version);
}

TEST_CASE("storage: from_blob uses the caller's bytes and runs the deleter last") {
  Context context;
  std::vector<float> values{1, 2, 3, 4};
  bool deleted = false;
  {
    const Tensor x = Tensor::from_blob(context, values.data(), {2, 2}, DType::f32,
                                       [&deleted] { deleted = true; });
    const Tensor row = x.select(0, 1);
    CHECK(row.data<float>() == values.data() + 2);
    CHECK(context.ledger().live_total() == 0);
    CHECK_FALSE(deleted);
  }
  CHECK(deleted);
}

TEST_CASE("tensor: views and their errors") {
  Context context;
  std::vector<float> values(24);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const Tensor x = Tensor::from_host<float>(context, {2, 3, 4}, values);
  CHECK(x.slice(1, 1, 3).select(2, 2).data<float>()[0] == 6.0f);
  const Tensor swapped = contiguous(x.permute({2, 0, 1}));
  CHECK(swapped.to_vector<float>()[1] == 4.0f);  // element (0, 0, 1) is x(0, 1, 0)
  CHECK(contiguous(x.select(0, 0).select(0, 0).reshape({1, 4}).expand({3, 4}))
            .to_vector<float>()[9] == 1.0f);
  CHECK_THROWS_WITH_AS(x.reshape({5, 5}), doctest::Contains("[2, 3, 4] to [5, 5]"), Error);
  CHECK_THROWS_AS(x.permute({0, 0, 1}), Error);
  CHECK_THROWS_AS(x.permute({2, 0, 1}).reshape({24}), Error);
  CHECK_THROWS_AS(x.slice(0, 1, 3), Error);
  CHECK_THROWS_AS(x.slice(-4, 0, 1), Error);
  CHECK_THROWS_AS(x.select(-4, 0), Error);
  CHECK_THROWS_AS(x.select(3, 0), Error);
  CHECK_THROWS_WITH_AS(Tensor::empty(context, {std::int64_t{1} << 62}, DType::f64),
                       doctest::Contains("more bytes than 64 bits"), Error);
  CHECK_THROWS_AS(Tensor::empty(context, {std::int64_t{1} << 40, std::int64_t{1} << 40}, DType::u8),
                  Error);
  CHECK(Tensor::empty(context, {0, std::int64_t{1} << 40, std::int64_t{1} << 40}, DType::f64)
            .numel() == 0);
  CHECK_THROWS_WITH_AS(x.data<double>(), doctest::Contains("f32 read as f64"), Error);
  CHECK_THROWS_AS(Tensor().shape().dim(0), Error);
  CHECK_THROWS_WITH_AS(Tensor().storage(), doctest::Contains("undefined"), Error);
}

TEST_CASE("meta: shapes and bytes are real, values are not") {
  Context context({.device = Device::meta});
  const Tensor x = Tensor::empty(context, {1 << 20, 1 << 20}, DType::f32);  // 4 TiB
  CHECK(context.ledger().live_total() == std::int64_t{4} << 40);
  CHECK_THROWS_WITH_AS(x.data<float>(), doctest::Contains("meta"), Error);
  CHECK(add(x, x).shape() == x.shape());
}

TEST_CASE("several contexts in one process do not know of each other") {
  Context a({.threads = 1, .seed = 1}), b({.threads = 2, .seed = 2}),
      plan({.device = Device::meta});
  const Tensor x = full(a, {64, 64}, DType::f32, 1.0), y = full(b, {64, 64}, DType::f32, 2.0);
  const Tensor z = full(plan, {64, 64}, DType::f32, 3.0);
  std::vector<float> from_thread;
  std::thread other([&] { from_thread = matmul(y, y).to_vector<float>(); });
  const std::vector<float> here = matmul(x, x).to_vector<float>();
  other.join();
  matmul(z, z);
  CHECK(here[5] == 64.0f);
  CHECK(from_thread[5] == 256.0f);
  CHECK(a.ledger().live_total() == b.ledger().live_total());
  CHECK(a.work().matmul_flops == 2 * 64 * 64 * 64);
  CHECK(plan.work().matmul_flops == 2 * 64 * 64 * 64);
}

#ifdef _OPENMP
TEST_CASE("threads: the caller's OpenMP setting is left as it was") {
  const int before = omp_get_max_threads();
  omp_set_num_threads(3);
  Context context({.threads = 1});
  const Tensor x = full(context, {32, 32}, DType::f32, 1.0);
  matmul(x, x);
  const Tensor y = full(context, {32, 32}, DType::f64, 1.0);
  matmul(y, y);
  CHECK(omp_get_max_threads() == 3);
  omp_set_num_threads(before);
}
#endif

TEST_CASE("streams: order, events, errors") {
  using namespace std::chrono_literals;
  Stream compute(Stream::Kind::in_place, "compute"), gather(Stream::Kind::worker, "gather");
  std::vector<int> order;
  std::atomic<bool> go{false};
  gather.enqueue([&] {
    while (!go) std::this_thread::sleep_for(1ms);
    order.push_back(1);
  });
  const Event first = gather.record();
  CHECK_FALSE(first.done());
  gather.enqueue([&] { order.push_back(2); });
  go = true;
  compute.wait(first);  // an in-place stream blocks its caller
  CHECK(first.done());
  gather.synchronize();
  CHECK(order == std::vector<int>{1, 2});

  gather.enqueue([] { fail("on the gather stream"); });
  bool ran_after_failure = false;
  gather.enqueue([&] { ran_after_failure = true; });
  const Event last = gather.record();
  // A failure never leaves a waiter hanging, nor lets it go on with half-made data.
  CHECK_THROWS_WITH_AS(last.wait(), "on the gather stream", Error);
  CHECK_THROWS_WITH_AS(compute.wait(last), "on the gather stream", Error);
  CHECK(last.wait_for(0ms));
  CHECK_THROWS_WITH_AS(gather.synchronize(), "on the gather stream", Error);
  CHECK_FALSE(ran_after_failure);
  CHECK_NOTHROW(gather.synchronize());

  // Work dropped while somebody waits for the end.
  for (int round = 0; round < 200; ++round) {
    gather.enqueue([] { fail("again"); });
    gather.enqueue([] {});
    CHECK_THROWS_AS(gather.synchronize(), Error);
  }
  // A stream that waits for a failed one fails with its reason.
  Stream reduce(Stream::Kind::worker, "reduce");
  gather.enqueue([] { fail("the gather failed"); });
  reduce.wait(gather.record());
  CHECK_THROWS_WITH_AS(reduce.record().wait(), "the gather failed", Error);
  CHECK_THROWS_AS(reduce.synchronize(), Error);
  CHECK_THROWS_AS(gather.synchronize(), Error);

  Stream meta(Stream::Kind::meta, "meta");
  meta.enqueue([] { fail("meta must not run work"); });
  CHECK(meta.record().done());
}

TEST_CASE("allocator: released bytes are reused only after their events") {
  using namespace std::chrono_literals;
  Context context;
  Stream gather(Stream::Kind::worker, "gather");
  std::atomic<bool> finished{false};
  const void* address = nullptr;
  {
    const Tensor x = Tensor::empty(context, {1000}, DType::f32);
    address = x.raw_data();
    auto* bytes = x.data<float>();
    gather.enqueue([&finished, bytes] {
      std::this_thread::sleep_for(20ms);
      bytes[0] = 1.0f;
      finished = true;
    });
    x.storage().record_use(gather.record());
  }
  CHECK(context.ledger().live_total() == 0);  // the release counts at once
  const Tensor y = Tensor::empty(context, {1000}, DType::f32);
  CHECK(y.raw_data() == address);
  CHECK(finished);
}

TEST_CASE("low-precision types round to nearest-even") {
  CHECK(static_cast<float>(bf16(1.00390625f)) == 1.0f);       // half way, to even
  CHECK(static_cast<float>(bf16(1.01171875f)) == 1.015625f);  // half way, to even above
  CHECK(static_cast<float>(f16(1.00048828125f)) == 1.0f);
  CHECK(static_cast<float>(f16(65519.0f)) == 65504.0f);
  CHECK(std::isinf(static_cast<float>(f16(65520.0f))));
  CHECK(static_cast<float>(f16(5.9604644775390625e-8f)) == 5.9604644775390625e-8f);
  CHECK(static_cast<float>(f16(2.98e-8f)) == 0.0f);
  CHECK(std::isnan(static_cast<float>(bf16(NAN))));
  CHECK(std::isnan(static_cast<float>(f16(NAN))));
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = f16::to_float(static_cast<std::uint16_t>(bits));
    if (std::isnan(value)) continue;
    if (f16::from_float(value) != bits) FAIL("f16 pattern ", bits, " does not survive");
  }
}

TEST_CASE("allocator: private memory serves nobody else until it is given up") {
  Context context;
  Allocator& allocator = context.allocator();
  constexpr std::int64_t kBytes = 3 << 20;
  const auto make = [&] { return Tensor::empty(context, {kBytes}, DType::u8); };
  const void* held = nullptr;
  const void* live = nullptr;
  std::optional<Tensor> kept;
  allocator.begin_private();
  {
    const Tensor x = make();
    held = x.raw_data();
    kept = make();
    live = kept->raw_data();
  }
  allocator.end_private();
  {
    const Tensor outside = make(), more = make();
    CHECK(outside.raw_data() != held);
    CHECK(more.raw_data() != held);
  }
  allocator.trim();  // nor does it go back to the system
  allocator.begin_private();
  CHECK(make().raw_data() == held);
  allocator.end_private();
  allocator.free_private();
  const Tensor first = make();
  CHECK(first.raw_data() == held);
  kept.reset();
  const Tensor second = make();
  CHECK(second.raw_data() == live);
}

TEST_CASE("allocator: segments by address, and who listens hears of each before it is freed") {
  Allocator allocator(make_process_memory(), 0);
  const auto allocate = [&](std::size_t bytes) {
    return allocator.allocate(bytes, MemoryCategory::workspace);
  };
  const auto release = [&](const MemoryBlock& block) {
    allocator.release(block, MemoryCategory::workspace, {});
  };
  const MemoryBlock small = allocate(1000), large = allocate(3 << 20), beside = allocate(5 << 20);
  const auto end_of = [](const MemoryBlock& block) {
    return static_cast<const std::byte*>(block.data) + block.bytes;
  };
  const std::span<std::byte> segment = allocator.segment_of(large.data);
  CHECK(segment.size() == std::size_t{64} << 20);
  CHECK(allocator.segment_of(end_of(beside) - 1).data() == segment.data());
  CHECK(allocator.segment_of(segment.data() + segment.size() - 1).data() == segment.data());
  CHECK(allocator.segment_of(segment.data() + segment.size()).data() != segment.data());
  CHECK(allocator.segment_of(small.data).size() == std::size_t{1} << 20);
  const int other = 0;
  CHECK(allocator.segment_of(&other).empty());
  CHECK(allocator.segment_of(nullptr).empty());

  std::vector<std::byte*> heard, ignored;
  const auto listener = allocator.before_segment_is_freed([&](std::span<std::byte> freed) {
    // It is still there.
    CHECK(allocator.segment_of(freed.data()).size() == freed.size());
    freed.back() = std::byte{1};
    heard.push_back(freed.data());
  });
  auto dropped = allocator.before_segment_is_freed(
      [&](std::span<std::byte> freed) { ignored.push_back(freed.data()); });
  release(large);
  allocator.trim();
  CHECK(heard.empty());  // its neighbour is in use
  dropped.reset();
  release(beside);
  allocator.trim();
  CHECK(heard == std::vector<std::byte*>{segment.data()});
  CHECK(ignored.empty());
  CHECK(allocator.segment_of(segment.data()).empty());
  release(small);
}
