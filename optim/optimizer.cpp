// SPDX-License-Identifier: Apache-2.0
#include <sherd/optim/optimizer.h>

#include <sherd/kernels/optimizer.h>
#include <sherd/kernels/reduce.h>

#include <algorithm>
#include <cmath>

namespace sherd {
namespace {

Tensor zero_state(const ParameterSpan& span) {
  return Tensor::zeros(span.value.context(), span.value.shape(), span.value.dtype(),
                       MemoryCategory::optimizer_state);
}

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

  void prepare(std::span<const ParameterSpan> spans) override {
    remember(spans);
    state_.clear();
    for (const ParameterSpan& span : spans) {
      state_.push_back({span.name, zero_state(span), zero_state(span)});
    }
  }

  void step(std::span<const ParameterSpan> spans, double lr, double grad_scale) override {
    check(spans);
    ++steps_;
    for (std::size_t i = 0; i < spans.size(); ++i) {
      const ParameterSpan& span = spans[i];
      if (!span.grad.defined()) continue;
      adamw_update(span.value, span.grad, state_[i].exp_avg, state_[i].exp_avg_sq,
                   {lr, settings_.beta1, settings_.beta2, settings_.eps,
                    span.weight_decay ? settings_.weight_decay : 0.0, steps_, grad_scale});
    }
  }

  std::vector<std::pair<std::string, Tensor>> state() const override {
    std::vector<std::pair<std::string, Tensor>> all;
    for (const State& s : state_) {
      all.emplace_back(s.name + ".exp_avg", s.exp_avg);
      all.emplace_back(s.name + ".exp_avg_sq", s.exp_avg_sq);
    }
    return all;
  }

 private:
  struct State {
    std::string name;
    Tensor exp_avg, exp_avg_sq;
  };
  AdamWSettings settings_;
  std::vector<State> state_;
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

  void prepare(std::span<const ParameterSpan> spans) override {
    remember(spans);
    state_.clear();
    for (const ParameterSpan& span : spans) {
      state_.emplace_back(span.name, settings_.momentum > 0.0 ? zero_state(span) : Tensor());
    }
  }

  void step(std::span<const ParameterSpan> spans, double lr, double grad_scale) override {
    check(spans);
    ++steps_;
    for (std::size_t i = 0; i < spans.size(); ++i) {
      const ParameterSpan& span = spans[i];
      if (!span.grad.defined()) continue;
      sgd_update(span.value, span.grad, state_[i].second,
                 {lr, settings_.momentum, span.weight_decay ? settings_.weight_decay : 0.0,
                  settings_.nesterov, grad_scale});
    }
  }

  std::vector<std::pair<std::string, Tensor>> state() const override {
    std::vector<std::pair<std::string, Tensor>> all;
    for (const auto& [name, momentum] : state_) {
      if (momentum.defined()) all.emplace_back(name + ".momentum", momentum);
    }
    return all;
  }

 private:
  SgdSettings settings_;
  std::vector<std::pair<std::string, Tensor>> state_;
};

}  // namespace

Optimizer::~Optimizer() = default;

void Optimizer::remember(std::span<const ParameterSpan> spans) {
  steps_ = 0;
  prepared_.clear();
  for (const ParameterSpan& span : spans) prepared_.emplace_back(span.name, span.value.shape());
}

void Optimizer::check(std::span<const ParameterSpan> spans) const {
  SHERD_CHECK(
      spans.size() == prepared_.size(),
      "optimizer: prepared for {} spans, stepped with {}; call prepare() with the same spans",
      prepared_.size(), spans.size());
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const auto& [name, shape] = prepared_[i];
    const bool grad_fits = !spans[i].grad.defined() || spans[i].grad.shape() == shape;
    SHERD_CHECK(spans[i].name == name && spans[i].value.shape() == shape && grad_fits,
                "optimizer: span {} was prepared as {} {}, stepped with {} {} and gradient {}", i,
                name, shape.to_string(), spans[i].name, spans[i].value.describe(),
                spans[i].grad.describe());
  }
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
