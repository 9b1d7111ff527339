// SPDX-License-Identifier: Apache-2.0
#include <sherd/autograd/gradcheck.h>

#include <sherd/autograd/tape.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/random.h>

#include <algorithm>
#include <cmath>

namespace sherd {
namespace {

// Element i, in row-major order, of a possibly strided tensor: a view of it.
Tensor element(Tensor x, std::int64_t i) {
  while (x.rank() > 0) {
    const std::int64_t last = x.dim(-1);
    x = x.select(-1, i % last);
    i /= last;
  }
  return x;
}

void set(const Tensor& element, double value) {
  element.copy_from_host(&value, sizeof value);
}

double dot(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = contiguous(a).to_vector<double>(), y = b.to_vector<double>();
  double sum = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

}  // namespace

void gradcheck(const std::string& name, const std::function<Variable(std::span<const Variable>)>& f,
               std::span<const Tensor> inputs, const GradcheckOptions& options) {
  SHERD_CHECK(!inputs.empty(), "gradcheck of {}: no inputs", name);
  Context& context = inputs.front().context();
  for (const Tensor& input : inputs) {
    SHERD_CHECK(input.dtype() == DType::f64, "gradcheck of {}: inputs must be fp64, got {}", name,
                input.describe());
  }

  Tape tape(context);
  std::vector<Variable> variables;
  Variable output;
  {
    const TapeScope recording(tape);
    for (const Tensor& input : inputs) variables.push_back(tape.watch(input));
    output = f(variables);
  }
  const Tensor cotangent = Tensor::empty(context, output.shape(), DType::f64);
  fill_normal(cotangent, 0.0, 1.0, RandomStream(options.seed, "gradcheck", name));
  tape.backward(output, clone(cotangent));

  const std::vector<Variable> constants(inputs.begin(), inputs.end());
  const auto value = [&] {
    const NoGradScope no_grad(context);
    return dot(f(constants).tensor(), cotangent);
  };
  for (std::size_t which = 0; which < inputs.size(); ++which) {
    const Tensor& input = inputs[which];
    const Tensor gradient = tape.gradient(variables[which]);
    SHERD_CHECK(gradient.defined(), "gradcheck of {}: no gradient reached input {}", name, which);
    const std::vector<double> analytic = contiguous(gradient).to_vector<double>();
    const std::int64_t n = input.numel();
    const std::int64_t checked = std::min(n, options.max_elements);
    for (std::int64_t c = 0; c < checked; ++c) {
      const std::int64_t i = c * n / checked;
      const Tensor x = element(input, i);
      const double saved = x.item();
      set(x, saved + options.step);
      const double above = value();
      set(x, saved - options.step);
      const double below = value();
      set(x, saved);
      const double numeric = (above - below) / (2.0 * options.step);
      const double given = analytic[static_cast<std::size_t>(i)];
      // Written so that a NaN fails.
      const bool agrees =
          std::abs(given - numeric) <= options.absolute + options.relative * std::abs(numeric);
      SHERD_CHECK(agrees,
                  "gradcheck of {}: input {} ({}), element {}: backward gives {}, central "
                  "differences give {}",
                  name, which, input.describe(), i, given, numeric);
    }
  }
}

}  // namespace sherd
