// SPDX-License-Identifier: Apache-2.0
// Optimizers work on spans: flat pieces of parameters with their gradients. A whole model is one
// span per parameter; a shard of it is one span per ShardSegment. Update rules are elementwise, so
// both give an element the same bits.
#pragma once

#include <sherd/autograd/parameter.h>
#include <sherd/runtime/tensor.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace sherd {

struct ParameterSpan {
  std::string name;    // of the parameter
  Tensor value, grad;  // contiguous, same shape and type; grad undefined: no update, as in PyTorch
  bool weight_decay = true;
};

// One span per trainable parameter, with its current gradient.
SHERD_API std::vector<ParameterSpan> parameter_spans(std::span<Parameter* const> parameters);

// Spans of one shard, one after the other in flat tensors: all of them, each with a gradient.
struct FlatSpans {
  Tensor value, grad;
  std::vector<Tensor> state;
  Tensor rounded;  // where the new values are wanted in 16 bits; or undefined
  // Where each begins, a multiple of 16 elements, and whether it decays.
  std::vector<std::pair<std::int64_t, bool>> begins;
};

class SHERD_API Optimizer {
 public:
  virtual ~Optimizer();

  // Names of the state tensors that a span has, each of the span's shape and type.
  virtual std::vector<std::string> state_names() const = 0;

  // Where a state tensor of a span lies, set to zero: by default in memory of its own.
  using StatePlace = std::function<Tensor(std::size_t span, std::size_t state)>;
  // Makes the state for these spans and starts counting steps anew. Updates must be called with the
  // same spans (names and shapes) in the same order.
  void prepare(std::span<const ParameterSpan> spans, const StatePlace& place = {});

  // One update. Gradients are multiplied by grad_scale first (clipping and loss scaling).
  void step(std::span<const ParameterSpan> spans, double lr, double grad_scale);
  // The same in parts, each span once, whatever is in memory together: begin_step() checks all and
  // changes nothing yet.
  void begin_step(std::span<const ParameterSpan> spans);
  void update(std::size_t index, const ParameterSpan& span, double lr, double grad_scale);
  // All spans of a shard at once, with the same bits. False where the rule does not know how.
  virtual bool update_flat(const FlatSpans& spans, double lr, double grad_scale);

  // For updates that are captured into a CUDA graph: while a tensor of scalar_count() f64 on the
  // parameters' device is set, they read from there what changes from step to step. 0: this rule
  // cannot be captured. scalars(): what must stand there for the step that steps_done() counts.
  virtual std::int64_t scalar_count() const { return 0; }
  void read_scalars_from(const Tensor& place) { scalars_place_ = place; }
  virtual std::vector<double> scalars(double lr, double grad_scale) const;
  void count_replayed_step() { ++steps_; }

  // State tensors by name, such as "head.weight.exp_avg".
  std::vector<std::pair<std::string, Tensor>> state() const;
  std::int64_t steps_done() const { return steps_; }
  // Goes on from a checkpoint, whose state was put in place after prepare().
  void set_steps_done(std::int64_t steps) { steps_ = steps; }

 protected:
  // For a span that has a gradient.
  virtual void update_span(const ParameterSpan& span, std::span<const Tensor> state, double lr,
                           double grad_scale) = 0;
  const Tensor& scalars_place() const { return scalars_place_; }

 private:
  struct Prepared {
    std::string name;
    Shape shape;
    std::vector<Tensor> state;
  };
  std::vector<Prepared> prepared_;
  std::int64_t steps_ = 0;
  Tensor scalars_place_;
};

struct AdamWSettings {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double weight_decay = 0.05;  // times lr, on spans with weight_decay only (PyTorch's meaning)
};
SHERD_API std::unique_ptr<Optimizer> make_adamw(const AdamWSettings& settings);

struct SgdSettings {
  double momentum = 0.9;
  bool nesterov = false;
  double weight_decay = 0.0;
};
SHERD_API std::unique_ptr<Optimizer> make_sgd(const SgdSettings& settings);

// 2-norm over all gradients, from an exact sum, so that no split into tensors, shards or ranks can
// change a bit of it. NaN if a gradient is not finite. On meta it reads 1.
SHERD_API double gradient_norm(std::span<const ParameterSpan> spans);
// The factor that brings gradients of this norm to at most max_norm (PyTorch's clip_grad_norm_):
// min(1, max_norm / (norm + 1e-6)); 1 when max_norm is 0, meaning no clipping.
SHERD_API double clip_factor(double norm, double max_norm);

}  // namespace sherd
