// SPDX-License-Identifier: Apache-2.0
// Tensors of a device context in the host's memory, beside those in the device's.
#include <sherd/kernels/activation.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/random.h>

#include "array_support.h"

using namespace sherd;

namespace {

constexpr std::int64_t kRows = 60, kCols = 50;

Tensor empty_in(Context& context, DType dtype, MemoryPool pool) {
  return Tensor::empty(context, {kRows, kCols}, dtype, MemoryCategory::activations, pool);
}

Tensor random_in(Context& context, DType dtype, MemoryPool pool, const char* name = "x") {
  const Tensor x = empty_in(context, dtype, pool);
  fill_normal(x, 0, 1, RandomStream(2, "test", name));
  return x;
}

// The bytes without to_vector(), whose copy waits for the stream by itself.
std::vector<float> read_in_place(const Tensor& x) {
  const float* const from = x.data<float>();
  return {from, from + x.numel()};
}

constexpr MemoryPool kPools[] = {MemoryPool::device, MemoryPool::host};

}  // namespace

TEST_CASE("cuda places: copies and conversions from everywhere to everywhere") {
  Context cpu_context;
  const Tensor plain = random_in(cpu_context, DType::f32, MemoryPool::device);
  const Tensor rounded = random_in(cpu_context, DType::bf16, MemoryPool::device);
  const auto check_all = [&](Context& context) {
    for (const MemoryPool from : kPools) {
      for (const MemoryPool to : kPools) {
        CAPTURE(static_cast<int>(from));
        CAPTURE(static_cast<int>(to));
        const Tensor x = random_in(context, DType::f32, from);
        const Tensor narrow = random_in(context, DType::bf16, from);
        const auto check = [&](const Tensor& source, const Tensor& expected) {
          const Tensor out =
              Tensor::zeros(context, source.shape(), DType::f32, MemoryCategory::activations, to);
          const std::uint64_t version = out.storage().version();
          copy(out, source);
          CHECK(out.storage().version() > version);
          const auto values = to == MemoryPool::host ? read_in_place(out) : out.to_vector<float>();
          CHECK(values == expected.to_vector<float>());
        };
        check(x, plain);
        check(x.permute({1, 0}), contiguous(plain.permute({1, 0})));
        check(x.slice(1, 3, 20), contiguous(plain.slice(1, 3, 20)));
        check(x.slice(0, 3, 20), contiguous(plain.slice(0, 3, 20)));
        check(narrow, cast(rounded, DType::f32));
        check(narrow.permute({1, 0}), cast(rounded.permute({1, 0}), DType::f32));
      }
    }
  };
  check_all(test::device_context());
  test::with_late_streams([&] {
    Context late({.device = Device::cuda});
    check_all(late);
  });
}

TEST_CASE("cuda places: a copy makes the host wait only when it reads") {
  test::with_late_streams([] {
    Context context({.device = Device::cuda});
    const Tensor x = random_in(context, DType::f32, MemoryPool::device);
    const std::vector<float> expected = x.to_vector<float>();
    const Tensor out = Tensor::zeros(context, x.shape(), DType::f32, MemoryCategory::activations,
                                     MemoryPool::host);
    for (const Tensor& source : {x, cast(x, DType::f64)}) {
      out.copy_from_host(std::vector<float>(expected.size()).data(), expected.size() * 4);
      copy(out, source);
      CHECK(read_in_place(out) == expected);
    }
    // Nor does it overwrite what the device still reads.
    const Tensor there = empty_in(context, DType::f32, MemoryPool::device);
    copy(there, out);
    fill(out, 1.0);
    CHECK(there.to_vector<float>() == expected);
  });
}

TEST_CASE("cuda places: sums in place, wherever either lies") {
  Context cpu_context;
  const Tensor expected = random_in(cpu_context, DType::f32, MemoryPool::device);
  add_inplace(expected, random_in(cpu_context, DType::f32, MemoryPool::device, "y"));
  test::with_late_streams([&] {
    Context context({.device = Device::cuda});
    for (const MemoryPool of_sum : kPools) {
      for (const MemoryPool of_x : kPools) {
        const Tensor sum = random_in(context, DType::f32, of_sum);
        add_inplace(sum, random_in(context, DType::f32, of_x, "y"));
        CHECK(sum.device() == (of_sum == MemoryPool::host ? Device::cpu : Device::cuda));
        const auto values =
            of_sum == MemoryPool::host ? read_in_place(sum) : sum.to_vector<float>();
        CHECK(values == expected.to_vector<float>());
      }
    }
    const Tensor filled = empty_in(context, DType::f32, MemoryPool::host);
    fill(filled, 3.0);
    CHECK(read_in_place(filled) == std::vector<float>(kRows * kCols, 3.f));
  });
}

TEST_CASE("cuda places: new tensors are the device's, also of inputs in the host's memory") {
  Context cpu_context;
  const Tensor a = random_in(cpu_context, DType::f32, MemoryPool::device);
  const Tensor b = random_in(cpu_context, DType::f32, MemoryPool::device, "y");
  Context& context = test::device_context();
  const Tensor x = random_in(context, DType::f32, MemoryPool::host);
  const Tensor y = random_in(context, DType::f32, MemoryPool::device, "y");
  const auto check = [](const Tensor& result, const Tensor& expected) {
    CHECK(result.device() == Device::cuda);
    CHECK(test::like_cpu(result.to_vector<float>(), expected.to_vector<float>()));
  };
  check(contiguous(x), a);
  check(clone(x), a);
  check(cast(cast(x, DType::f64), DType::f32), a);
  check(add(x, y), add(a, b));
  check(add(x.permute({1, 0}), y.permute({1, 0})), add(a.permute({1, 0}), b.permute({1, 0})));
  check(scale(x, 0.5), scale(a, 0.5));
  check(activation_forward(x, Activation::gelu_erf), activation_forward(a, Activation::gelu_erf));
}

TEST_CASE("cuda places: a plan on meta counts the bytes of the copies") {
  const auto peak = [](Context& context) {
    const Tensor x = random_in(context, DType::f32, MemoryPool::host);
    const Tensor y = random_in(context, DType::f32, MemoryPool::device);
    context.ledger().reset_peak();
    const Tensor z = add(x.permute({1, 0}), y.permute({1, 0}));
    copy(x, cast(y, DType::bf16));
    copy(y.reshape({kCols, kRows}), x.permute({1, 0}));
    add_inplace(x, y);
    const Tensor narrow = cast(x.permute({1, 0}), DType::f16);
    return context.ledger().peak_total();
  };
  Context device({.device = Device::cuda});
  Context meta({.device = Device::meta, .meta_of = Device::cuda});
  CHECK(peak(device) == peak(meta));
}
