// SPDX-License-Identifier: Apache-2.0
#include "device_support.h"

#include <sherd/runtime/tensor.h>

using namespace sherd;
using test::device_context;

TEST_CASE("device: tensors live on the device, and travel to the host and back") {
  Context& context = device_context();
  const std::vector<float> values = test::random_values<float>(1000, "values");
  const Tensor x = Tensor::from_host<float>(context, {10, 100}, values);
  CHECK(x.device() == Device::cuda);
  CHECK(x.to_vector<float>() == values);
  CHECK(x.select(0, 3).slice(0, 7, 8).item() == values[307]);
  const Tensor zeros = Tensor::zeros(context, {17}, DType::f64);
  CHECK(zeros.to_vector<double>() == std::vector<double>(17, 0.0));
}

TEST_CASE("device: the host's pool is pinned memory that the host reads directly") {
  Context& context = device_context();
  const Tensor x =
      Tensor::zeros(context, {8}, DType::f32, MemoryCategory::optimizer_state, MemoryPool::host);
  CHECK(x.device() == Device::cpu);
  CHECK(x.data<float>()[7] == 0.f);
}

TEST_CASE("device: events of a stream, and waits between streams") {
  Context& context = device_context();
  const std::vector<float> ones(1 << 16, 1.f);
  const Tensor x = Tensor::from_host<float>(context, {1 << 16}, ones);
  const Tensor y = Tensor::zeros(context, {1 << 16}, DType::f32);
  const std::unique_ptr<Stream> side = context.make_stream("side");
  side->wait(context.compute_stream().record());
  cuda::copy(*side, y.raw_data(), x.raw_data(), ones.size() * sizeof(float));
  const Event copied = side->record();
  context.compute_stream().wait(copied);
  CHECK(y.to_vector<float>() == ones);
  copied.wait();
  CHECK(copied.done());
  CHECK(copied.wait_for(std::chrono::milliseconds(0)));
}

TEST_CASE("device: events that keep the time") {
  Context& context = device_context();
  Stream& stream = context.compute_stream();
  const Tensor x = Tensor::zeros(context, {1 << 22}, DType::f32);
  const auto timed = [&](int fills) {
    const Event start = cuda::record_time(stream);
    for (int i = 0; i < fills; ++i) cuda::fill_zero(stream, x.raw_data(), std::size_t{1} << 24);
    return cuda::seconds_between(start, cuda::record_time(stream));
  };
  timed(1);
  const double few = timed(2), many = timed(64);
  CHECK(few >= 0.0);
  CHECK(many > few);
  CHECK(many < 60.0);  // seconds, not milliseconds
}

TEST_CASE("device: a GPU that is not there is named") {
  CHECK_THROWS_WITH_AS(Context({.device = Device::cuda, .device_index = 1000}),
                       doctest::Contains("GPU 1000 was asked for"), Error);
}

TEST_CASE("device: a limit is kept where memory comes without pages") {
  constexpr std::size_t kMiB = 1 << 20;
  Context context({.device = Device::cuda, .memory_limit = 8 * kMiB});
  {
    const Tensor a = Tensor::empty(context, {3 << 20}, DType::u8);
    const Tensor b = Tensor::empty(context, {3 << 20}, DType::u8);
    CHECK(context.allocator().reserved_bytes() <= 8 * kMiB);
    CHECK_THROWS_AS(Tensor::empty(context, {3 << 20}, DType::u8), OutOfMemory);
  }
  // What is cached is given back for what does not fit beside it.
  const Tensor c = Tensor::empty(context, {7 << 20}, DType::u8);
  CHECK(context.allocator().reserved_bytes() <= 8 * kMiB);
}
