// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/optimizers.h>
#include <sherd/kernels/cuda/optimizers.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/optimizer.h>

#include "array_support.h"

using namespace sherd;
using arguments::AdamWArgs;
using arguments::AdamWScalars;
using arguments::SgdArgs;
using test::Placed;
using test::random_values;
using test::same_numbers;

namespace {

constexpr std::size_t kSizes[] = {0, 1, 5, 64, 2500};
// Of parameters, gradients and state: aligned, cut at one place, never aligned together.
constexpr std::size_t kOffsets[][3] = {{0, 0, 0}, {1, 1, 1}, {0, 1, 0}, {2, 0, 1}};
constexpr int kSteps = 3;

AdamWScalars scalars_of(int step) {
  return {3e-3, 1 - std::pow(0.9, step), std::sqrt(1 - std::pow(0.95, step)), 0.37};
}

// T: no rounded copy.
template <typename T, typename Rounded>
void check_adamw(std::size_t n, const std::size_t (&offsets)[3], bool scalars_on_device) {
  constexpr bool kRounds = !std::is_same_v<Rounded, T>;
  const auto size = static_cast<std::int64_t>(n);
  std::vector<T> param = random_values<T>(n, "param"), m(n), v(n);
  std::vector<Rounded> rounded(n);
  const Placed<T> device_param(param, offsets[0]), device_m(m, offsets[2]), device_v(v, offsets[2]);
  const Placed<Rounded> device_rounded(rounded, offsets[1]);
  for (int step = 1; step <= kSteps; ++step) {
    const auto grad = random_values<T>(n, step % 2 == 0 ? "even" : "odd");
    AdamWArgs<T> args;
    args.beta1 = 0.9;
    args.beta2 = 0.95;
    args.eps = 1e-8;
    args.weight_decay = 0.05;
    args.scalars = scalars_of(step);
    args.rounded_type = dtype_of<Rounded>::value;
    args.param = param.data();
    args.grad = grad.data();
    args.exp_avg = m.data();
    args.exp_avg_sq = v.data();
    if (kRounds) args.rounded = rounded.data();
    cpu::adamw<T>(1, size, args);

    const Placed<T> device_grad(grad, offsets[1]);
    const test::DeviceArray<AdamWScalars> current(std::vector<AdamWScalars>{args.scalars});
    args.param = device_param.data();
    args.grad = device_grad.data();
    args.exp_avg = device_m.data();
    args.exp_avg_sq = device_v.data();
    if (kRounds) args.rounded = device_rounded.data();
    if (scalars_on_device) {
      args.current = current.data();
      args.scalars = {};
    }
    cuda::adamw<T>(test::DeviceArray<T>::stream(), size, args);
    CHECK(same_numbers(device_grad.values(), grad));
  }
  CHECK(same_numbers(device_param.values(), param));
  CHECK(same_numbers(device_m.values(), m));
  CHECK(same_numbers(device_v.values(), v));
  if (kRounds) CHECK(same_numbers(device_rounded.values(), rounded));
}

template <typename T>
void check_sgd(std::size_t n, const std::size_t (&offsets)[3], int variant) {
  const auto size = static_cast<std::int64_t>(n);
  std::vector<T> param = random_values<T>(n, "param"), buffer(n);
  const Placed<T> device_param(param, offsets[0]), device_buffer(buffer, offsets[2]);
  SgdArgs<T> args;
  args.lr = 0.1;
  args.grad_scale = 0.25;
  args.weight_decay = variant % 2 == 0 ? 0 : 1e-2;
  args.momentum = variant / 2 == 0 ? 0 : 0.9;
  args.nesterov = variant / 2 == 2;
  for (int step = 1; step <= kSteps; ++step) {
    const auto grad = random_values<T>(n, step % 2 == 0 ? "even" : "odd");
    args.param = param.data();
    args.grad = grad.data();
    if (args.momentum != 0) args.momentum_buffer = buffer.data();
    cpu::sgd<T>(1, size, args);
    const Placed<T> device_grad(grad, offsets[1]);
    args.param = device_param.data();
    args.grad = device_grad.data();
    if (args.momentum != 0) args.momentum_buffer = device_buffer.data();
    cuda::sgd<T>(test::DeviceArray<T>::stream(), size, args);
  }
  CHECK(same_numbers(device_param.values(), param));
  CHECK(same_numbers(device_buffer.values(), buffer));
}

}  // namespace

TEST_CASE_TEMPLATE("cuda optimizers: the bits of the CPU's, wherever a span is cut", T, double,
                   float) {
  test::in_all_orders([] {
    for (const std::size_t n : kSizes) {
      for (const auto& offsets : kOffsets) {
        CAPTURE(n);
        CAPTURE(offsets[0]);
        CAPTURE(offsets[1]);
        for (const bool on_device : {false, true}) check_adamw<T, T>(n, offsets, on_device);
        check_adamw<T, bf16>(n, offsets, true);
        check_adamw<T, f16>(n, offsets, false);
        for (int variant = 0; variant < 6; ++variant) {
          CAPTURE(variant);
          check_sgd<T>(n, offsets, variant);
        }
      }
    }
  });
}

TEST_CASE("cuda optimizers: tensors are updated where they lie") {
  Context cpu_context;
  const auto updated = [](Context& context, MemoryPool pool) {
    constexpr std::int64_t n = 301;
    std::vector<Tensor> tensors;
    for (const char* name : {"param", "grad", "first", "second", "momentum"}) {
      tensors.push_back(
          Tensor::empty(context, {n}, DType::f32, MemoryCategory::optimizer_state, pool));
      auto values = random_values<float>(n, name);
      for (float& value : values) value = std::abs(value);
      tensors.back().copy_from_host(values.data(), n * sizeof(float));
    }
    const AdamWStep adamw{1e-3, 0.9, 0.999, 1e-8, 0.1, 4, 0.5};
    adamw_update(tensors[0], tensors[1], tensors[2], tensors[3], adamw);
    sgd_update(tensors[0], tensors[1], tensors[4], {0.1, 0.9, 0.01, true, 2.0});
    std::vector<std::vector<float>> values;
    for (const Tensor& tensor : tensors) values.push_back(tensor.to_vector<float>());
    return values;
  };
  const auto expected = updated(cpu_context, MemoryPool::device);
  CHECK(updated(test::device_context(), MemoryPool::device) == expected);
  CHECK(updated(test::device_context(), MemoryPool::host) == expected);

  // With what changes from step to step in a tensor.
  const auto updated_from = [](Context& context, bool from_tensor) {
    const Tensor param = Tensor::zeros(context, {5}, DType::f32), m = clone(param),
                 v = clone(param);
    const Tensor grad = full(context, {5}, DType::f32, 0.3);
    AdamWStep step{1e-3, 0.9, 0.999, 1e-8, 0.1, 4, 0.5};
    Tensor scalars;
    fill(param, 1.0);  // so that the decay shows, which depends on lr as well
    if (from_tensor) {
      scalars = Tensor::from_host<double>(context, {kAdamWScalars}, adamw_scalars(step));
      step.lr = 7;
      step.step = 1;
      step.grad_scale = 9;
    }
    adamw_update(param, grad, m, v, step, scalars);
    return param.to_vector<float>();
  };
  const std::vector<float> from_step = updated_from(cpu_context, false);
  CHECK(updated_from(cpu_context, true) == from_step);
  CHECK(updated_from(test::device_context(), true) == from_step);

  const Tensor here = Tensor::zeros(test::device_context(), {4}, DType::f32);
  const Tensor there = Tensor::zeros(test::device_context(), {4}, DType::f32,
                                     MemoryCategory::gradients, MemoryPool::host);
  CHECK_THROWS_WITH_AS(sgd_update(here, there, {}, {0.1, 0.0, 0.0, false}),
                       doctest::Contains("are updated where they lie together"), Error);
  const Tensor of_host = Tensor::zeros(test::device_context(), {kAdamWScalars}, DType::f64,
                                       MemoryCategory::workspace, MemoryPool::host);
  CHECK_THROWS_WITH_AS(adamw_update(here, here, here, here, {}, of_host),
                       doctest::Contains("where the parameter lies (cuda)"), Error);
}

TEST_CASE("cuda optimizers: a flat shard of many parts at once, rounded on the way") {
  std::vector<Device> devices{Device::cpu, Device::cuda};
  for (const Device device : devices) {
    CAPTURE(name_of(device));
    Context context({.device = device, .threads = 2});
    constexpr std::int64_t kParts = 150, kStride = 48;  // more than a launch takes
    const Shape flat{kParts * kStride};
    const auto make = [&](const char* name, bool positive) {
      std::vector<float> values =
          random_values<float>(static_cast<std::size_t>(flat.numel()), name);
      if (positive) std::ranges::for_each(values, [](float& v) { v = v * v; });
      return Tensor::from_host<float>(context, flat, values);
    };
    struct Arrays {
      Tensor value, grad, m, v;
    };
    const auto arrays = [&] {
      return Arrays{make("value", false), make("grad", false), make("m", false), make("v", true)};
    };
    const AdamWStep step{.lr = 0.01,
                         .beta1 = 0.9,
                         .beta2 = 0.99,
                         .eps = 1e-8,
                         .weight_decay = 0.3,
                         .step = 4,
                         .grad_scale = 0.7};
    const Arrays one = arrays(), many = arrays();
    std::vector<AdamWPart> parts;
    for (std::int64_t i = 0; i < kParts; ++i) {
      const bool decays = i % 3 != 1;
      parts.push_back({i * kStride, decays});
      const auto part = [&](const Tensor& x) { return x.slice(0, i * kStride, (i + 1) * kStride); };
      AdamWStep of_part = step;
      if (!decays) of_part.weight_decay = 0.0;
      adamw_update(part(one.value), part(one.grad), part(one.m), part(one.v), of_part);
    }
    for (const DType dtype : {DType::bf16, DType::f16}) {
      const Arrays flat_arrays = dtype == DType::bf16 ? many : arrays();
      const Tensor rounded = Tensor::zeros(context, flat, dtype);
      adamw_update(flat_arrays.value, flat_arrays.grad, flat_arrays.m, flat_arrays.v, step, {},
                   parts, rounded);
      CHECK(flat_arrays.value.to_vector<float>() == one.value.to_vector<float>());
      CHECK(flat_arrays.m.to_vector<float>() == one.m.to_vector<float>());
      CHECK(flat_arrays.v.to_vector<float>() == one.v.to_vector<float>());
      CHECK(cast(rounded, DType::f32).to_vector<float>() ==
            cast(cast(one.value, dtype), DType::f32).to_vector<float>());
    }
    const std::vector<AdamWPart> uneven{{0, true}, {8, false}};
    CHECK_THROWS_WITH_AS(adamw_update(one.value, one.grad, one.m, one.v, step, {}, uneven),
                         doctest::Contains("multiples of 16, got 8"), Error);
  }
}
