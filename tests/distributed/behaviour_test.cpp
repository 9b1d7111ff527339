// SPDX-License-Identifier: Apache-2.0
// What a user of the engine may rely on: it trains as a plain loop would, whatever the model does.
#include <doctest/doctest.h>

#include "sharding_support.h"

#include <algorithm>
#include <cmath>

using namespace sherd;
using namespace sherd::test;

namespace {

using P = ShardingPolicy;
using doctest::Contains;

// Training without an engine: a tape, a model and an optimizer.
RunResult train_plainly(const Workload& work, const RunOptions& run) {
  Context context({.threads = run.threads, .seed = 3});
  const std::unique_ptr<Module> model = work.model();
  model->initialize(context, run.precision.master);
  const std::vector<Parameter*> parameters = model->parameters();
  const auto optimizer = make_adamw({.weight_decay = 0.1});
  optimizer->prepare(parameter_spans(parameters));
  RunResult result;
  for (int step = 0; step < run.steps; ++step) {
    if (work.before_step) work.before_step(*model, step);
    context.set_random_position({static_cast<std::uint64_t>(step), 0});
    const auto [images, labels] =
        make_batch(context, work, run.precision.master, step, 0, run.batch);
    Tape tape(context);
    Variable loss;
    {
      const TapeScope recording(tape);
      loss = cross_entropy((*model)(images), {labels, {}, 0.1}, run.batch);
    }
    tape.backward(loss);
    const auto spans = parameter_spans(parameters);
    result.losses.push_back(loss.tensor().item());
    result.norms.push_back(gradient_norm(spans));
    optimizer->step(spans, 3e-3, clip_factor(result.norms.back(), 0.5));
    model->clear_gradients();
  }
  for (const Parameter* parameter : parameters)
    RankTrainer::add_weights(*parameter, parameter->data(), result);
  return result;
}

bool near(const RunResult& result, const RunResult& expected) {
  const auto close = [](const std::vector<double>& a, const std::vector<double>& b) {
    return std::ranges::equal(a, b, [](double x, double y) { return std::abs(x - y) < 1e-9; });
  };
  return close(result.losses, expected.losses) && close(result.norms, expected.norms) &&
         std::ranges::equal(result.values, expected.values, [&](const auto& a, const auto& b) {
           return a.first == b.first && close(a.second, b.second);
         });
}

// On every rank: the weights before and after some steps.
struct BeforeAndAfter {
  RunResult before, after;
};

BeforeAndAfter train_watched(int ranks, const Workload& work, const RunOptions& run,
                             const std::function<void(RankTrainer&, int step)>& prepare = {}) {
  std::vector<BeforeAndAfter> all(static_cast<std::size_t>(ranks));
  on_threads(ranks, work, run, [&](RankTrainer& rank) {
    BeforeAndAfter& mine = all[static_cast<std::size_t>(rank.world.rank())];
    rank.weights_into(mine.before);
    for (int step = 0; step < run.steps; ++step) {
      if (prepare) prepare(rank, step);
      rank.step(step);
    }
    rank.weights_into(mine.after);
  });
  for (const BeforeAndAfter& one : all) CHECK(one.after == all.front().after);
  return all.front();
}

// A unit with a matrix that only some ranks use: the branch is inside the unit.
class HalfUsed : public Module {
 public:
  class Cell : public Module {
   public:
    Cell() {
      always_ = register_parameter("always", {5, 5}, Initializer::normal(0.3), true);
      sometimes_ = register_parameter("sometimes", {5, 5}, Initializer::normal(0.3), true);
    }
    bool both = false;

   protected:
    Variable forward(const Variable& x) override {
      const Variable y = matmul(x, always_->variable());
      return both ? add(y, matmul(x, sometimes_->variable())) : y;
    }

   private:
    std::shared_ptr<Parameter> always_, sometimes_;
  };

  HalfUsed() {
    const auto blocks = std::make_shared<Sequential>();
    blocks->append("0", std::make_shared<Cell>());
    blocks->append("1", cell = std::make_shared<Cell>());
    blocks_ = register_child("blocks", blocks);
    assign_names();
  }
  std::shared_ptr<Cell> cell;

 protected:
  Variable forward(const Variable& x) override { return blocks_(x); }

 private:
  Child blocks_;
};

Workload half_used() {
  return {[] { return std::make_unique<HalfUsed>(); }, {5}, 5, {}};
}

// Uses a matrix of its child outside of it, before or after.
class Borrower : public Module {
 public:
  enum class When { never, before, after };
  explicit Borrower(When when) : when_(when) {
    const auto blocks = std::make_shared<Sequential>();
    blocks->append("0", cell_ = std::make_shared<HalfUsed::Cell>());
    blocks_ = register_child("blocks", blocks);
    own_ = register_parameter("own", {5, 5}, Initializer::normal(0.3), true);
    assign_names();
  }

 protected:
  Variable forward(const Variable& x) override {
    Variable y = matmul(x, own_->variable());
    if (when_ == When::before) y = matmul(y, borrowed());
    y = blocks_(y);
    return when_ == When::after ? matmul(y, borrowed()) : y;
  }

 private:
  Variable borrowed() { return cell_->own_parameters().front().second->variable(); }

  When when_;
  Child blocks_;
  std::shared_ptr<HalfUsed::Cell> cell_;
  std::shared_ptr<Parameter> own_;
};

}  // namespace

TEST_CASE("engine: one rank trains as a plain loop without an engine, bit for bit") {
  for (const bool odd : {false, true}) {
    CAPTURE(odd);
    const Workload work = odd ? odd_net() : tied_vit();
    for (const DType dtype : {DType::f32, DType::f64}) {
      for (const P policy : kPolicies) {
        CAPTURE(name_of(policy));
        RunOptions run = run_of(policy, 1, odd);
        run.precision = dtype;
        run.steps = 10;
        const RunResult expected = train_plainly(work, run);
        const RunResult result = train_ranks(1, work, run);
        CHECK(result.losses == expected.losses);
        CHECK(result.norms == expected.norms);  // tied parameters counted once
        CHECK(result.weights == expected.weights);
      }
    }
  }
}

TEST_CASE("engine: parameters start as Module::initialize makes them, whoever keeps them") {
  for (const bool odd : {false, true}) {
    const Workload work = odd ? odd_net() : tied_vit();
    Context context({.seed = 3});
    const std::unique_ptr<Module> model = work.model();
    model->initialize(context, DType::f32);
    RunResult expected;
    for (const Parameter* parameter : model->parameters()) {
      RankTrainer::add_weights(*parameter, parameter->data(), expected);
    }
    for (const int ranks : {1, 3, 4, 8}) {
      CAPTURE(ranks);
      for (const P policy : kPolicies) {
        CAPTURE(name_of(policy));
        RunOptions run = run_of(policy, ranks, odd);
        run.steps = 0;
        CHECK(train_ranks(ranks, work, run).weights == expected.weights);
        if (!unit_policy(run.sharding).shard_parameters) continue;
        run.sharding.persist_below = 40;
        CHECK(train_ranks(ranks, work, run).weights == expected.weights);
      }
    }
  }
}

TEST_CASE("frozen: a unit is gathered and released both ways, and never changes") {
  for (const P policy : kPolicies) {
    CAPTURE(name_of(policy));
    const RunOptions run = run_of(policy, 4);
    const BeforeAndAfter weights = train_watched(4, tied_vit(), run, [&](RankTrainer& rank, int) {
      for (const ParameterSpan& span : rank.engine.spans()) {
        SHERD_CHECK(!span.name.starts_with("vit.blocks.1.attn"), "{} is updated", span.name);
      }
    });
    int frozen = 0;
    for (const auto& entry : weights.before.weights) {
      const auto& name = entry.first;  // clang 14 cannot capture bindings
      const auto& bytes = entry.second;
      CAPTURE(name);
      const bool fixed = name.starts_with("vit.blocks.1.attn");
      frozen += fixed;
      CHECK((weights.after.weights.at(name) == bytes) == fixed);
    }
    CHECK(frozen == 4);
    if (policy != P::zero3) continue;
    on_meta(0, 4, tied_vit(), run, [&](RankTrainer& rank) {
      rank.engine.record_events(true);
      rank.step(0);
      int gathers = 0, releases = 0;
      bool backward = false;
      for (const ShardingEvent& event : rank.engine.events()) {
        backward = backward || event.kind == ShardingEvent::Kind::backward;
        if (event.unit != "vit.blocks.1/frozen") continue;
        CHECK(event.kind != ShardingEvent::Kind::reduce);
        gathers += event.kind == ShardingEvent::Kind::prefetch;
        releases += backward && event.kind == ShardingEvent::Kind::reshard;
      }
      CHECK(gathers == 2);
      CHECK(releases == 1);
    });
  }
}

TEST_CASE("unused: a parameter without a gradient is not updated, nor decayed") {
  for (const int ranks : {1, 3, 4}) {
    CAPTURE(ranks);
    for (const P policy : kPolicies) {
      CAPTURE(name_of(policy));
      Workload work = odd_net();
      work.before_step = [](Module& module, int) {
        dynamic_cast<OddNet&>(module).take_branch = false;
      };
      const BeforeAndAfter weights = train_watched(ranks, work, run_of(policy, ranks, true));
      for (const auto& entry : weights.before.weights) {
        const auto& name = entry.first;  // clang 14 cannot capture bindings
        const auto& bytes = entry.second;
        CAPTURE(name);
        const bool unused = name == "unused" || name == "empty" || name.starts_with("branch");
        CHECK((weights.after.weights.at(name) == bytes) == unused);
      }
    }
  }
}

TEST_CASE("unused: a gradient of one rank alone updates the parameter on all") {
  for (const int ranks : {2, 3, 4}) {
    CAPTURE(ranks);
    for (const int user : {0, ranks - 1}) {
      CAPTURE(user);
      std::optional<BeforeAndAfter> expected;
      for (const P policy : kPolicies) {
        CAPTURE(name_of(policy));
        const auto choose = [&](RankTrainer& rank, int step) {
          const bool uses = rank.world.rank() == user && step == 1;
          dynamic_cast<HalfUsed&>(*rank.model).cell->both = uses;
        };
        RunOptions run = run_of(policy, ranks);
        run.steps = 1;
        BeforeAndAfter weights = train_watched(ranks, half_used(), run, choose);
        const std::string name = "blocks.1.sometimes";
        CHECK(weights.before.weights.at(name) == weights.after.weights.at(name));
        run.steps = 2;
        weights = train_watched(ranks, half_used(), run, choose);
        CHECK(weights.before.weights.at(name) != weights.after.weights.at(name));
        CHECK(weights.before.weights.at("blocks.0.sometimes") ==
              weights.after.weights.at("blocks.0.sometimes"));
        if (!expected) expected = weights;
        CHECK(weights.after.weights == expected->after.weights);
      }
    }
  }
}

TEST_CASE("evaluation: passes without a tape disturb no training, not even inside a step") {
  for (const bool odd : {false, true}) {
    const Workload work = odd ? odd_net() : tied_vit();
    for (const P policy : kPolicies) {
      CAPTURE(name_of(policy));
      const RunOptions run = run_of(policy, 2, odd);
      const RunResult expected = train_ranks(2, work, run);
      on_threads(2, work, run, [&](RankTrainer& rank) {
        RunResult result;
        for (int step = 0; step < run.steps; ++step) {
          work.before_step ? work.before_step(*rank.model, step) : void();
          const auto [from, to] = rank.samples(0);
          rank.loss_of(step, from, to);
          Tape tape(rank.context);
          Variable loss;
          {
            const TapeScope recording(tape);
            loss = rank.loss_of(step, from, to);
            const NoGradScope evaluation(rank.context);
            const Variable again = rank.loss_of(step, from, to);
            SHERD_CHECK(again.tensor().item() == loss.tensor().item(), "the loss has changed");
          }
          rank.loss_of(step, from, to);
          tape.backward(loss);
          rank.loss_of(step, from, to);
          const GlobalStep all = rank.engine.finish_backward(loss.tensor().item());
          rank.loss_of(step, from, to);
          rank.update(all);
          result.losses.push_back(all.loss);
          result.norms.push_back(all.grad_norm);
        }
        rank.weights_into(result);
        SHERD_CHECK(result == expected, "evaluation has changed the training");
      });
    }
  }
}

TEST_CASE("parameters: outside its unit a sharded one cannot be read, and the error names it") {
  for (const P policy : {P::grad_op, P::zero3, P::hybrid}) {
    CAPTURE(name_of(policy));
    on_threads(2, tied_vit(), run_of(policy, 2), [&](RankTrainer& rank) {
      rank.step(0);
      for (Parameter* parameter : rank.model->parameters()) {
        std::string message;
        try {
          parameter->data().raw_data();
        } catch (const Error& error) {
          message = error.what();
        }
        const bool named = message.find("unit ") != std::string::npos &&
                           message.find("resharded") != std::string::npos;
        SHERD_CHECK(named, "reading {}: '{}'", parameter->name(), message);
        const bool block = parameter->name().starts_with("vit.blocks.0");
        const bool right = message.find("unit vit.blocks.0:") != std::string::npos;
        SHERD_CHECK(block == right, "reading {}: '{}'", parameter->name(), message);
      }
    });
  }
}

TEST_CASE("parameters: one borrowed outside its unit is trained right, or it is an error") {
  using When = Borrower::When;
  for (const When when : {When::before, When::after}) {
    CAPTURE(static_cast<int>(when));
    const Workload work{[when] { return std::make_unique<Borrower>(when); }, {5}, 5, {}};
    RunOptions run = run_of(P::none, 1);
    run.precision = DType::f64;
    const RunResult expected = train_plainly(work, run);
    for (const P policy : kPolicies) {
      CAPTURE(name_of(policy));
      run.sharding = run_of(policy, 2).sharding;
      run.sharding.prefetch = 0;
      std::string message;
      try {
        const RunResult result = train_ranks(2, work, run);
        CHECK(near(result, expected));
      } catch (const Error& error) {
        message = error.what();
      }
      // What is kept can be read anywhere, but a gradient after its unit's backward would be lost.
      const bool gathered = policy == P::none || policy == P::zero1 || policy == P::zero2 ||
                            (policy == P::grad_op && when == When::after);
      const std::string unit =
          gathered ? "outside the forward of unit blocks.0," : "unit blocks.0: its";
      // zero1 sums when all of backward is done, so it comes in time there.
      const bool right = (when == When::after && gathered) || policy == P::zero1;
      CHECK((right ? message.empty() : message.find(unit) != std::string::npos));
    }
  }
}

TEST_CASE("modules: a part of the model can be trained by itself where its parameters are kept") {
  // The head's matrix is used inside and outside of the ViT, so the unit that holds it never runs.
  const Workload work = tied_vit();
  RunOptions run = run_of(P::none, 1);
  run.precision = DType::f64;
  const auto train_part = [&](int ranks) {
    std::vector<RunResult> results(static_cast<std::size_t>(ranks));
    on_threads(ranks, work, run, [&](RankTrainer& rank) {
      RunResult& result = results[static_cast<std::size_t>(rank.world.rank())];
      for (int step = 0; step < run.steps; ++step) {
        const auto [from, to] = rank.samples(0);
        rank.context.set_random_position({static_cast<std::uint64_t>(step), from});
        const auto [images, labels] =
            make_batch(rank.context, work, run.precision.master, step, from, to - from);
        Tape tape(rank.context);
        Variable loss;
        {
          const TapeScope recording(tape);
          loss = cross_entropy((*rank.model->child("vit"))(images), {labels, {}, 0.0}, run.batch);
        }
        tape.backward(loss);
        const GlobalStep all = rank.engine.finish_backward(loss.tensor().item());
        result.losses.push_back(all.loss);
        result.norms.push_back(all.grad_norm);
        rank.update(all);
      }
      rank.weights_into(result);
    });
    CHECK(results.front() == results.back());
    return results.front();
  };
  const RunResult start = train_ranks(1, work, [&] {
    RunOptions none = run;
    none.steps = 0;
    return none;
  }());
  const RunResult expected = train_part(1);
  CHECK(expected.weights.at("vit.pos_embed") != start.weights.at("vit.pos_embed"));
  for (const P policy : {P::none, P::zero1, P::zero2}) {
    CAPTURE(name_of(policy));
    run.sharding.policy = policy;
    CHECK(near(train_part(2), expected));
    CHECK(near(train_part(3), expected));
  }
}
