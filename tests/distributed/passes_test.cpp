// SPDX-License-Identifier: Apache-2.0
// Several backward passes a step where gradients come at awkward times: before the backward of
// their unit, while the sum of the pass before is under way, or after their unit's sum.
#include <doctest/doctest.h>

#include "sharding_support.h"

#include <algorithm>
#include <cmath>
#include <optional>

using namespace sherd;
using namespace sherd::test;

namespace {

using P = ShardingPolicy;

// Two blocks, a matrix of the root, and a scale that the loss uses after the forward, as CLIP does.
class Clip : public Module {
 public:
  static constexpr std::int64_t kWidth = 5;

  class Block : public Module {
   public:
    Block() {
      weight = register_parameter("weight", {kWidth, kWidth}, Initializer::normal(0.4), true);
    }
    std::shared_ptr<Parameter> weight;

   protected:
    Variable forward(const Variable& x) override {
      return activate(matmul(x, weight->variable()), Activation::gelu_erf);
    }
  };

  Clip() {
    const auto blocks = std::make_shared<Sequential>();
    blocks->append("0", first_ = std::make_shared<Block>());
    blocks->append("1", std::make_shared<Block>());
    blocks_ = register_child("blocks", blocks);
    own_ = register_parameter("own", {kWidth, kWidth}, Initializer::normal(0.4), true);
    scale_ = register_parameter("scale", {1, 1}, Initializer::ones(), false);
    assign_names();
  }

  bool borrows = false;  // the first block's matrix, before that block

  Variable scaled(const Variable& y) const {
    const Variable column = reshape(y, {y.shape().numel(), 1});
    return reshape(matmul(column, scale_->variable()), y.shape());
  }

 protected:
  Variable forward(const Variable& x) override {
    Variable y = matmul(x, own_->variable());
    if (borrows) y = matmul(y, first_->weight->variable());
    return blocks_(y);
  }

 private:
  Child blocks_;
  std::shared_ptr<Block> first_;
  std::shared_ptr<Parameter> own_, scale_;
};

Workload clip() {
  return {[] { return std::make_unique<Clip>(); }, {Clip::kWidth}, Clip::kWidth, {}};
}

RunOptions clip_run(std::int64_t passes, bool each) {
  RunOptions run;
  run.precision = DType::f64;
  run.steps = 2;
  run.passes = passes;
  run.sync_each_pass = each;
  return run;
}

// The scale is kept, so that it can be read after the forward.
ShardingOptions clip_sharding(P policy, int ranks, bool each) {
  ShardingOptions sharding = run_of(policy, ranks).sharding;
  sharding.reduce_every_pass = each;
  if (policy == P::zero3 || policy == P::hybrid) sharding.persist_below = 2;
  return sharding;
}

Variable clip_loss(Context& context, Module& model, const RunOptions& run, int step,
                   std::int64_t from, std::int64_t to) {
  const auto [images, labels] =
      make_batch(context, clip(), run.precision.master, step, from, to - from);
  const Variable y = dynamic_cast<Clip&>(model).scaled(model(images));
  return cross_entropy(y, {labels, {}, 0.0}, run.batch);
}

// Whether pass `pass` of a step borrows.
using Borrows = std::function<bool(std::int64_t pass)>;
bool never(std::int64_t) {
  return false;
}

// The samples that all ranks have in each pass, on one rank without an engine.
RunResult train_plainly(int ranks, const RunOptions& run, const Borrows& borrows = never) {
  Context context({.seed = run.seed});
  Clip model;
  model.initialize(context, run.precision.master);
  const std::vector<Parameter*> parameters = model.parameters();
  const auto optimizer = make_adamw({.weight_decay = 0.1});
  optimizer->prepare(parameter_spans(parameters));
  RunResult result;
  for (int step = 0; step < run.steps; ++step) {
    double loss_sum = 0.0;
    for (int rank = 0; rank < ranks; ++rank) {
      const std::int64_t begin = run.batch * rank / ranks;
      const std::int64_t size = run.batch * (rank + 1) / ranks - begin;
      for (std::int64_t pass = 0; pass < run.passes; ++pass) {
        model.borrows = borrows(pass);
        const std::int64_t from = begin + size * pass / run.passes;
        const std::int64_t to = begin + size * (pass + 1) / run.passes;
        Tape tape(context);
        Variable loss;
        {
          const TapeScope recording(tape);
          loss = clip_loss(context, model, run, step, from, to);
        }
        tape.backward(loss);
        loss_sum += loss.tensor().item();
      }
    }
    const auto spans = parameter_spans(parameters);
    result.losses.push_back(loss_sum);
    result.norms.push_back(gradient_norm(spans));
    optimizer->step(spans, 3e-3, clip_factor(result.norms.back(), 0.5));
    model.clear_gradients();
  }
  for (const Parameter* parameter : parameters)
    RankTrainer::add_weights(*parameter, parameter->data(), result);
  return result;
}

RunResult train_clip(int ranks, const RunOptions& run, const std::vector<Fault>& faults = {},
                     const Borrows& borrows = never) {
  std::vector<RunResult> results(static_cast<std::size_t>(ranks));
  const Workload work = clip();
  const auto body = [&](Communicator& world) {
    RankTrainer rank(world, work, run);
    auto& model = dynamic_cast<Clip&>(*rank.model);
    RunResult& result = results[static_cast<std::size_t>(world.rank())];
    for (int step = 0; step < run.steps; ++step) {
      double loss_sum = 0.0;
      for (std::int64_t pass = 0; pass < run.passes; ++pass) {
        rank.engine.set_gradient_sync(run.sync_each_pass || pass + 1 == run.passes);
        model.borrows = borrows(pass);
        const auto [from, to] = rank.samples(pass);
        Tape tape(rank.context);
        Variable loss;
        {
          const TapeScope recording(tape);
          loss = clip_loss(rank.context, model, run, step, from, to);
        }
        tape.backward(loss);
        loss_sum += loss.tensor().item();
      }
      const GlobalStep all = rank.engine.finish_backward(loss_sum);
      result.losses.push_back(all.loss);
      result.norms.push_back(all.grad_norm);
      rank.update(all);
    }
    rank.weights_into(result);
  };
  run_rank_threads(ranks, [&](Communicator& world) {
    faults.empty() ? body(world) : with_faults(world, faults, body);
  });
  for (const RunResult& result : results) CHECK(result == results.front());
  return results.front();
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double most = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(a[i] - b[i]);
    most = std::isnan(difference) ? INFINITY : std::max(most, difference);
  }
  return most;
}

void check_equal(const RunResult& result, const RunResult& plain) {
  CHECK(distance(result.losses, plain.losses) < 1e-12);
  CHECK(distance(result.norms, plain.norms) < 1e-12);
  for (const auto& parameter : plain.values) {
    CAPTURE(parameter.first);
    CHECK(distance(result.values.at(parameter.first), parameter.second) < 1e-11);
  }
}

}  // namespace

TEST_CASE("passes: a parameter of the root that the loss uses is trained right") {
  // The sum of the unit with the scale is late, so that the next pass's gradient comes meanwhile.
  const auto late = [](bool persists) {
    return std::vector<Fault>{{.kind = Fault::Kind::delay,
                               .call = -1,
                               .delay_seconds = 0.02,
                               .label = persists ? "(root)/persistent reduce" : "(root) reduce"}};
  };
  for (const int ranks : {1, 2, 4}) {
    CAPTURE(ranks);
    for (const std::int64_t passes : {1, 2, 3}) {
      CAPTURE(passes);
      for (const bool each : {false, true}) {
        CAPTURE(each);
        RunOptions run = clip_run(passes, each);
        const RunResult plain = train_plainly(ranks, run);
        CHECK(plain.losses.front() != plain.losses.back());
        std::optional<RunResult> first;
        for (const P policy : kPolicies) {
          CAPTURE(name_of(policy));
          if (each && !unit_policy({.policy = policy}).shard_gradients) continue;
          run.sharding = clip_sharding(policy, ranks, each);
          for (const bool delayed : {false, true}) {
            CAPTURE(delayed);
            if (delayed && (ranks != 2 || passes == 1)) continue;
            const RunResult result = train_clip(
                ranks, run, delayed ? late(run.sharding.persist_below > 0) : std::vector<Fault>{});
            if (!first) first = result;
            check_equal(result, plain);
            CHECK(result.losses == first->losses);
            CHECK(result.norms == first->norms);
            CHECK(result.weights == first->weights);
          }
        }
      }
    }
  }
}

TEST_CASE("passes: a parameter of the root that is sharded when the loss uses it is an error") {
  for (const P policy : {P::zero3, P::hybrid}) {
    CAPTURE(name_of(policy));
    RunOptions run = clip_run(2, false);
    run.sharding = clip_sharding(policy, 2, false);
    run.sharding.persist_below = 0;
    CHECK_THROWS_WITH_AS(train_clip(2, run), doctest::Contains("unit (root): its"), Error);
    run.sharding.reshard_after_forward = ReshardAfterForward::parse("no");
    check_equal(train_clip(2, run), train_plainly(2, run));
  }
}

TEST_CASE("passes: what one pass borrows before its unit is trained right, or it is an error") {
  const std::vector<Fault> late{
      {.kind = Fault::Kind::delay, .call = -1, .delay_seconds = 0.02, .label = "blocks.0 reduce"}};
  for (const std::int64_t which : {0, 1}) {
    CAPTURE(which);
    const auto borrows = [which](std::int64_t pass) { return pass == which; };
    for (const bool each : {false, true}) {
      CAPTURE(each);
      RunOptions run = clip_run(2, each);
      const RunResult plain = train_plainly(2, run, borrows);
      CHECK(plain.norms != train_plainly(2, run).norms);
      for (const P policy : kPolicies) {
        if (each && !unit_policy({.policy = policy}).shard_gradients) continue;
        CAPTURE(name_of(policy));
        run.sharding = clip_sharding(policy, 2, each);
        run.sharding.prefetch = 0;
        // Sharded parameters are not there yet when they are borrowed.
        const bool kept = !unit_policy(run.sharding).shard_parameters;
        const bool summed = each || which == 1;  // by the unit's backward in that pass
        for (const bool delayed : {false, true}) {
          CAPTURE(delayed);
          std::string message;
          try {
            check_equal(train_clip(2, run, delayed ? late : std::vector<Fault>{}, borrows), plain);
          } catch (const Error& error) {
            message = error.what();
          }
          CAPTURE(message);
          const std::string expected = !kept ? "unit blocks.0: its"
                                       : summed && policy != P::zero1
                                           ? "outside the forward of unit blocks.0, which"
                                           : "";
          CHECK(message.empty() == expected.empty());
          CHECK(message.find(expected) != std::string::npos);
        }
      }
    }
  }
}

TEST_CASE("passes: a gradient that no pass through the model brings is an error once it is late") {
  std::optional<double> expected;
  for (const P policy : kPolicies) {
    CAPTURE(name_of(policy));
    RunOptions run = clip_run(1, false);
    run.sharding = clip_sharding(policy, 2, false);
    if (policy == P::grad_op) run.sharding.persist_below = 2;
    for (const bool agreed : {false, true}) {
      CAPTURE(agreed);
      std::vector<double> norms(2);
      const auto train = [&](Communicator& world) {
        const Workload work = clip();
        RankTrainer rank(world, work, run);
        const auto backward = [&](const std::function<Variable()>& make_loss) {
          Tape tape(rank.context);
          Variable loss;
          {
            const TapeScope recording(tape);
            loss = make_loss();
          }
          tape.backward(loss);
        };
        const auto range = rank.samples(0);
        const std::int64_t from = range.first, to = range.second;
        backward([&] { return clip_loss(rank.context, *rank.model, run, 0, from, to); });
        if (agreed) rank.engine.finish_backward(0.0);
        {
          const NoGradScope evaluation(rank.context);
          clip_loss(rank.context, *rank.model, run, 0, from, to);
        }
        const auto batch = make_batch(rank.context, work, run.precision.master, 0, from, to - from);
        backward([&] {
          const Variable x = dynamic_cast<Clip&>(*rank.model).scaled(Variable(batch.first));
          return cross_entropy(x, {batch.second, {}, 0.0}, run.batch);
        });
        norms[static_cast<std::size_t>(world.rank())] = rank.engine.finish_backward(0.0).grad_norm;
      };
      // Where gradients are sharded another sum may follow, until the norm is known.
      if (!agreed && policy != P::none) {
        run_rank_threads(2, train);
        if (!expected) expected = norms[0];
        CHECK(norms == std::vector(2, *expected));
      } else {
        CHECK_THROWS_WITH_AS(run_rank_threads(2, train),
                             doctest::Contains("after this step's gradients were summed"), Error);
      }
    }
  }
}
