// SPDX-License-Identifier: Apache-2.0
#include <sherd/optim/optimizer.h>

#include <sherd/kernels/optimizer.h>
#include <sherd/kernels/reduce.h>

#include <algorithm>
#include <cmath>

namespace sherd {
namespace {

class AdamW final : public Optimizer {
 public:
  explicit AdamW(const AdamWSettings& settings) : settings_(settings) {
    const auto is_rate = [](double beta) { return beta >= 0.0 && beta < 1.0; };
    SHERD_CHECK(is_rate(settings.beta1) && is_rate(settings.beta2),
                "AdamW: betas must be in [0, 1), got {} and {}", settings.beta1, settings.beta2);
    SHERD_CHECK(settings.eps > 0.0, "AdamW: eps must be positive, got {}", settings.eps);
    SHERD_CHECK(settings.weight_decay >= 0.0, "AdamW: weight decay must not be negative, got {}",
                settings.weight_decay);
  }

  std::vector<std::string> state_names() const override { return {"exp_avg", "exp_avg_sq"}; }
  std::int64_t scalar_count() const override { return kAdamWScalars; }
  std::vector<double> scalars(double lr, double grad_scale) const override {
    return adamw_scalars(step_of(lr, grad_scale, true));
  }
  bool update_flat(const FlatSpans& spans, double lr, double grad_scale) override {
    std::vector<AdamWPart> parts;
    for (const auto& [begin, decays] : spans.begins) {
      if (parts.empty() || parts.back().decays != decays) parts.push_back({begin, decays});
    }
    adamw_update(spans.value, spans.grad, spans.state[0], spans.state[1],
                 step_of(lr, grad_scale, true), scalars_place(), parts, spans.rounded);
    return true;
  }

 protected:
  void update_span(const ParameterSpan& span, std::span<const Tensor> state, double lr,
                   double grad_scale) override {
    adamw_update(span.value, span.grad, state[0], state[1],
                 step_of(lr, grad_scale, span.weight_decay), scalars_place());
  }

 private:
  AdamWStep step_of(double lr, double grad_scale, bool decays) const {
    return {lr,
            settings_.beta1,
            settings_.beta2,
            settings_.eps,
            decays ? settings_.weight_decay : 0.0,
            steps_done(),
            grad_scale};
  }

  AdamWSettings settings_;
};

class Sgd final : public Optimizer {
 public:
  explicit Sgd(const SgdSettings& settings) : settings_(settings) {
    SHERD_CHECK(settings.momentum >= 0.0 && settings.momentum < 1.0,
                "SGD: momentum must be in [0, 1), got {}", settings.momentum);
    SHERD_CHECK(!settings.nesterov || settings.momentum > 0.0,
                "SGD: Nesterov's method needs a momentum above 0");
    SHERD_CHECK(settings.weight_decay >= 0.0, "SGD: weight decay must not be negative, got {}",
                settings.weight_decay);
  }

  std::vector<std::string> state_names() const override {
    return settings_.momentum > 0.0 ? std::vector<std::string>{"momentum"}
                                    : std::vector<std::string>{};
  }

 protected:
  void update_span(const ParameterSpan& span, std::span<const Tensor> state, double lr,
                   double grad_scale) override {
    sgd_update(span.value, span.grad, state.empty() ? Tensor() : state[0],
               {lr, settings_.momentum, span.weight_decay ? settings_.weight_decay : 0.0,
                settings_.nesterov, grad_scale});
  }

 private:
  SgdSettings settings_;
};

}  // namespace

Optimizer::~Optimizer() = default;

bool Optimizer::update_flat(const FlatSpans&, double, double) {
  return false;
}

std::vector<double> Optimizer::scalars(double, double) const {
  return {};
}

void Optimizer::prepare(std::span<const ParameterSpan> spans, const StatePlace& place) {
  steps_ = 0;
  prepared_.clear();
  const std::size_t states = state_names().size();
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const Tensor& value = spans[i].value;
    Prepared& prepared = prepared_.emplace_back(Prepared{spans[i].name, value.shape(), {}});
    for (std::size_t k = 0; k < states; ++k) {
      prepared.state.push_back(place ? place(i, k)
                                     : Tensor::zeros(value.context(), value.shape(), value.dtype(),
                                                     MemoryCategory::optimizer_state));
    }
  }
}

void Optimizer::begin_step(std::span<const ParameterSpan> spans) {
  SHERD_CHECK(
      spans.size() == prepared_.size(),
      "optimizer: prepared for {} spans, stepped with {}; call prepare() with the same spans",
      prepared_.size(), spans.size());
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const Prepared& prepared = prepared_[i];
    const bool grad_fits = !spans[i].grad.defined() || spans[i].grad.shape() == prepared.shape;
    SHERD_CHECK(
        spans[i].name == prepared.name && spans[i].value.shape() == prepared.shape && grad_fits,
        "optimizer: span {} was prepared as {} {}, stepped with {} {} and gradient {}", i,
        prepared.name, prepared.shape.to_string(), spans[i].name, spans[i].value.describe(),
        spans[i].grad.describe());
  }
  ++steps_;
}

void Optimizer::update(std::size_t index, const ParameterSpan& span, double lr, double grad_scale) {
  if (span.grad.defined()) update_span(span, prepared_.at(index).state, lr, grad_scale);
}

void Optimizer::step(std::span<const ParameterSpan> spans, double lr, double grad_scale) {
  begin_step(spans);
  for (std::size_t i = 0; i < spans.size(); ++i) update(i, spans[i], lr, grad_scale);
}

std::vector<std::pair<std::string, Tensor>> Optimizer::state() const {
  std::vector<std::pair<std::string, Tensor>> all;
  const std::vector<std::string> names = state_names();
  for (const Prepared& prepared : prepared_) {
    for (std::size_t k = 0; k < names.size(); ++k) {
      all.emplace_back(prepared.name + "." + names[k], prepared.state[k]);
    }
  }
  return all;
}

std::vector<ParameterSpan> parameter_spans(std::span<Parameter* const> parameters) {
  std::vector<ParameterSpan> spans;
  for (const Parameter* parameter : parameters) {
    if (!parameter->requires_grad()) continue;
    spans.push_back(
        {parameter->name(), parameter->data(), parameter->grad(), parameter->weight_decay()});
  }
  return spans;
}

std::unique_ptr<Optimizer> make_adamw(const AdamWSettings& settings) {
  return std::make_unique<AdamW>(settings);
}

std::unique_ptr<Optimizer> make_sgd(const SgdSettings& settings) {
  return std::make_unique<Sgd>(settings);
}

double gradient_norm(std::span<const ParameterSpan> spans) {
  ExactSum total;
  bool meta = false;
  for (const ParameterSpan& span : spans) {
    if (!span.grad.defined()) continue;
    meta = meta || span.grad.context().is_meta();
    add_sum_of_squares(span.grad, total);
  }
  return meta ? 1.0 : std::sqrt(total.value());
}

double clip_factor(double norm, double max_norm) {
  return max_norm > 0.0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

}  // namespace sherd
