// SPDX-License-Identifier: Apache-2.0
// A training step on a GPU as graphs that are captured once and then replayed (--graph): one for
// each micro-batch, with forward, backward and the sums over ranks, and one for the update with
// what it gathers. Between them the host reads loss and norm and the ranks agree, as in any step,
// so nothing is updated by a gradient that is not finite.
#pragma once

#include <sherd/comm/sharding/engine.h>
#include <sherd/optim/optimizer.h>
#include <sherd/runtime/cuda/graph.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace sherd {

class CapturedStep {
 public:
  // Why no step of this engine and optimizer can be captured; empty where one can.
  static std::string refusal(const Context& context, const ShardingEngine& engine,
                             const Optimizer& optimizer);

  CapturedStep(Context& context, ShardingEngine& engine, Optimizer& optimizer);
  ~CapturedStep();
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;

  // Captures a micro-batch, whose loss `forward_backward` returns, and runs it; the last one with
  // what completes the gradient. Throws where it cannot be captured: nothing of it has run, and the
  // engine is in the middle of a step.
  void capture_pass(const std::function<Tensor()>& forward_backward, bool last);
  // After the last: captures the update and runs it.
  void capture_update(double lr, double grad_scale);

  bool complete() const { return update_ != nullptr; }
  // The same again, with what the buffers hold now.
  void replay_pass(std::size_t pass) { passes_.at(pass)->launch(context_.compute_stream()); }
  void replay_update(double lr, double grad_scale);

  // When all passes have run: what the ranks agree on.
  GlobalStep agree();

 private:
  std::unique_ptr<cuda::Graph> capture(const std::function<void()>& body);
  void end_private();
  void write_scalars(double lr, double grad_scale);

  Context& context_;
  ShardingEngine& engine_;
  Optimizer& optimizer_;
  Tensor scalars_;
  std::vector<std::unique_ptr<cuda::Graph>> passes_;
  std::unique_ptr<cuda::Graph> update_;
  std::vector<Tensor> losses_;
  std::optional<LocalGradient> gradient_;
};

}  // namespace sherd
