// SPDX-License-Identifier: Apache-2.0
// Every differentiable operation in bf16 and fp16: the error of its output against fp64 is at most
// twice, that of its gradients three times that of the plain computation, fp32 rounded once. And
// the gradients of parameters, which are fp32 to the last bits.
#include "../unit/cpu_kernel_test.h"
#include "operation_cases.h"

#include <sherd/autograd/tape.h>

using namespace sherd;
using namespace sherd::test;
using cpu::test::check_as_good_as;

namespace {

struct Result {
  Tensor output;
  std::vector<Tensor> gradients;
};

enum class Leaves { watched, parameters };

// The operation at `inputs` and `grad_output` (fp64), both taken in `dtype`.
Result run_in(DType dtype, const Case& test, std::span<const Tensor> inputs,
              const Tensor& grad_output, Leaves leaves = Leaves::watched) {
  Context& context = inputs[0].context();
  Tape tape(context);
  const TapeScope recording(tape);
  std::vector<Variable> variables;
  std::vector<std::unique_ptr<Parameter>> parameters;
  for (const Tensor& input : inputs) {
    const Tensor x = cast(input, dtype);
    if (leaves == Leaves::watched) {
      variables.push_back(tape.watch(x));
      continue;
    }
    parameters.push_back(std::make_unique<Parameter>(x.shape(), Initializer::zeros(), false));
    parameters.back()->set_data(x);
    variables.push_back(parameters.back()->variable());
  }
  const Variable output = test.f(variables);
  tape.backward(output, cast(grad_output, output.tensor().dtype()));
  Result result{contiguous(output.tensor()), {}};
  for (const auto& parameter : parameters) result.gradients.push_back(parameter->grad());
  if (leaves == Leaves::watched) {
    for (const Variable& x : variables) result.gradients.push_back(contiguous(tape.gradient(x)));
  }
  return result;
}

std::vector<double> values_of(const Tensor& x) {
  return cast(x, DType::f64).to_vector<double>();
}

// Numbers that every type here holds exactly, so that only operations round.
Tensor exact_in(DType dtype, const Tensor& x) {
  return cast(cast(x, dtype), DType::f64);
}

// The operations whose gradient of an input is a sum that stays fp32.
bool stays_wide(const std::string& name, std::size_t input) {
  if (input == 0) return false;
  return name == "linear" || name == "linear without bias" ||
         name == "linear with a convolution's weight" || name == "layer_norm" ||
         name == "layer_norm, 150 rows" || name.starts_with("patch_embed") ||
         name.starts_with("assemble_tokens");
}

template <typename T>
void check_operations(Device device) {
  constexpr DType dtype = dtype_of<T>::value;
  Context context({.device = device, .threads = 2, .seed = 5});
  CAPTURE(name_of(device));
  int wide = 0;
  for (const Case& test : cases(context)) {
    CAPTURE(test.name);
    CAPTURE(name_of(dtype));
    std::vector<Tensor> inputs;
    for (const Shape& shape : test.inputs) {
      const std::string name = test.name + std::to_string(inputs.size());
      inputs.push_back(exact_in(dtype, random_tensor(context, shape, name)));
    }
    const Shape out = test.f(std::vector<Variable>(inputs.begin(), inputs.end())).shape();
    const Tensor grad_output = exact_in(dtype, random_tensor(context, out, test.name + " out"));

    const Result exact = run_in(DType::f64, test, inputs, grad_output);
    const Result plain = run_in(DType::f32, test, inputs, grad_output);
    const Result result = run_in(dtype, test, inputs, grad_output);
    const Result leaf = run_in(dtype, test, inputs, grad_output, Leaves::parameters);
    const auto check = [](const Tensor& x, const Tensor& exact_x, const Tensor& plain_x,
                          double factor) {
      const std::vector<double> reference = values_of(exact_x);
      const Tensor rounded = cast(cast(plain_x, DType::f32), x.dtype());
      if (x.dtype() == dtype) {
        check_as_good_as<T>(x.to_vector<T>(), reference, rounded.to_vector<T>(), factor);
      } else if (x.dtype() == DType::f32) {
        check_as_good_as<float>(x.to_vector<float>(), reference, rounded.to_vector<float>(),
                                factor);
      }
    };
    check(result.output, exact.output, plain.output, 2);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      CAPTURE(i);
      CHECK(result.gradients[i].dtype() == dtype);
      check(result.gradients[i], exact.gradients[i], plain.gradients[i], 3);
      CHECK(leaf.gradients[i].dtype() == DType::f32);
      if (stays_wide(test.name, i)) {
        ++wide;
        check(leaf.gradients[i], exact.gradients[i], plain.gradients[i], 3);
      } else {
        CHECK(values_of(cast(leaf.gradients[i], dtype)) == values_of(result.gradients[i]));
      }
    }
  }
  CHECK(wide == 15);  // as many as the names above have
}

}  // namespace

TEST_SUITE("low precision") {
  TEST_CASE("every operation in bf16 against fp64") {
    for (const Device device : test_devices()) check_operations<bf16>(device);
  }
  TEST_CASE("every operation in fp16 against fp64") {
    for (const Device device : test_devices()) check_operations<f16>(device);
  }
}
