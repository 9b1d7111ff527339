// SPDX-License-Identifier: Apache-2.0
// The order of calls on an engine: several tapes, old ones, steps given up, changes it must notice.
#include <doctest/doctest.h>

#include "sharding_support.h"

#include <atomic>

using namespace sherd;
using namespace sherd::test;

namespace {

using P = ShardingPolicy;

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A forward on a tape of its own, for a backward later.
struct Recorded {
  Tape tape;
  Variable loss;

  Recorded(RankTrainer& rank, int step, std::pair<std::int64_t, std::int64_t> samples)
      : tape(rank.context) {
    const TapeScope recording(tape);
    loss = rank.loss_of(step, samples.first, samples.second);
  }
  void backward() { tape.backward(loss); }
};

// Two passes a step, of which both forwards come before both backwards.
RunResult train_two_tapes(int ranks, const Workload& work, const RunOptions& run,
                          bool last_first = false) {
  std::vector<RunResult> results(static_cast<std::size_t>(ranks));
  on_threads(ranks, work, run, [&](RankTrainer& rank) {
    RunResult& result = results[static_cast<std::size_t>(rank.world.rank())];
    for (int step = 0; step < run.steps; ++step) {
      if (work.before_step) work.before_step(*rank.model, step);
      Recorded first(rank, step, rank.samples(0)), second(rank, step, rank.samples(1));
      rank.engine.set_gradient_sync(run.sync_each_pass);
      (last_first ? second : first).backward();
      rank.engine.set_gradient_sync(true);
      (last_first ? first : second).backward();
      const GlobalStep all =
          rank.engine.finish_backward(first.loss.tensor().item() + second.loss.tensor().item());
      result.losses.push_back(all.loss);
      result.norms.push_back(all.grad_norm);
      rank.update(all);
    }
    rank.weights_into(result);
  });
  for (const RunResult& result : results) CHECK(result == results.front());
  return results.front();
}

}  // namespace

TEST_CASE("tapes: two forwards, then two backwards, are two passes, under every policy") {
  for (const bool odd : {false, true}) {
    CAPTURE(odd);
    const Workload work = odd ? odd_net() : tied_vit();
    for (const int ranks : {1, 3, 4}) {
      CAPTURE(ranks);
      std::optional<RunResult> expected_reversed;
      for (const P policy : kPolicies) {
        CAPTURE(name_of(policy));
        RunOptions run = run_of(policy, ranks, odd);
        run.passes = 2;
        run.steps = 2;
        CHECK(train_two_tapes(ranks, work, run) == train_ranks(ranks, work, run));
        const RunResult reversed = train_two_tapes(ranks, work, run, true);
        if (!expected_reversed) expected_reversed = reversed;
        CHECK(reversed == *expected_reversed);
        if (policy == P::zero3 && ranks % 2 == 0) {
          run.sharding.reshard_after_forward = ReshardAfterForward::parse("2");
          CHECK(train_two_tapes(ranks, work, run) == train_ranks(ranks, work, run));
        }
        if (!unit_policy(run.sharding).shard_gradients) continue;
        run.sync_each_pass = run.sharding.reduce_every_pass = true;
        CHECK(train_two_tapes(ranks, work, run) == train_ranks(ranks, work, run));
      }
    }
  }
}

TEST_CASE("tapes: a second backward on gradients that are summed already is an error") {
  for (const P policy : kPolicies) {
    CAPTURE(name_of(policy));
    on_threads(2, tied_vit(), run_of(policy, 2), [&](RankTrainer& rank) {
      Recorded first(rank, 0, {0, 2}), second(rank, 0, {2, 4});
      first.backward();
      if (policy != P::none) rank.engine.finish_backward(0.0);
      const std::string message = message_of([&] { second.backward(); });
      SHERD_CHECK(contains(message,
                           "after this step's gradients were summed over the ranks; call "
                           "set_gradient_sync(false) for all passes of a step but the last"),
                  "got '{}'", message);
    });
  }
}

TEST_CASE("tapes: a backward of an old tape after the update is an error under every policy") {
  for (const P policy : kPolicies) {
    CAPTURE(name_of(policy));
    const RunOptions run = run_of(policy, 2);
    const RunResult expected = train_ranks(2, tied_vit(), run);
    on_threads(2, tied_vit(), run, [&](RankTrainer& rank) {
      RunResult result;
      for (int step = 0; step < run.steps; ++step) {
        Recorded old(rank, step, {0, 2});
        const GlobalStep all = rank.step(step);
        result.losses.push_back(all.loss);
        result.norms.push_back(all.grad_norm);
        const std::string message = message_of([&] { old.backward(); });
        SHERD_CHECK(contains(message, "saved for backward was written in place since"), "got '{}'",
                    message);
        // All ranks have caught it.
        rank.engine.abandon_step();
      }
      rank.weights_into(result);
      SHERD_CHECK(result == expected, "the error has changed the training");
    });
  }
}

TEST_CASE("tapes: one that is given up without a backward leaves nothing behind") {
  for (const P policy : kPolicies) {
    CAPTURE(name_of(policy));
    const RunOptions run = run_of(policy, 2, true);
    const RunResult expected = train_ranks(2, odd_net(), run);
    on_threads(2, odd_net(), run, [&](RankTrainer& rank) {
      RunResult result;
      for (int step = 0; step < run.steps; ++step) {
        { const Recorded forgotten(rank, step, {0, 2}); }
        const GlobalStep all = rank.step(step);
        result.losses.push_back(all.loss);
        result.norms.push_back(all.grad_norm);
        SHERD_CHECK(rank.context.ledger().live(MemoryCategory::gathered_parameters) == 0,
                    "parameters stay gathered after step {}", step);
      }
      rank.weights_into(result);
      SHERD_CHECK(result == expected, "a forward without a backward has changed the training");
    });
  }
}

TEST_CASE("steps: one given up after an exception on all ranks can be done anew") {
  // Where the exception comes: in forward before a module or after it, or in its backward.
  enum class Place { before_forward, after_forward, backward };
  for (const bool odd : {false, true}) {
    const Workload work = odd ? odd_net() : tied_vit();
    const std::vector<std::string> path = odd ? std::vector<std::string>{"nested", "inner"}
                                              : std::vector<std::string>{"vit", "blocks", "1"};
    for (const Place place : {Place::before_forward, Place::after_forward, Place::backward}) {
      CAPTURE(static_cast<int>(place));
      for (const P policy : kPolicies) {
        CAPTURE(name_of(policy));
        RunOptions run = run_of(policy, 3, odd);
        // In the second pass while the first one's sums are there, or being taken.
        run.passes = 2;
        run.steps = 3;
        run.sync_each_pass = unit_policy(run.sharding).shard_gradients;
        const RunResult expected = train_ranks(3, work, run);
        on_threads(3, work, run, [&](RankTrainer& rank) {
          bool armed = false;
          int passes = 0;
          Module* module = rank.model.get();
          for (const std::string& name : path) module = module->child(name).get();
          const auto hook = [&](Module&, const Variable& x) {
            if (!armed || ++passes < 2) return x;
            SHERD_CHECK(place == Place::backward, "armed");
            rank.context.tape()->on_backward("bomb", [] { fail("armed"); });
            return x;
          };
          if (place == Place::after_forward) {
            module->add_post_forward_hook(hook);
          } else {
            module->add_pre_forward_hook(hook);
          }
          RunResult result;
          for (int step = 0; step < run.steps; ++step) {
            for (int tries = 0; tries < step; ++tries) {
              armed = true;
              passes = 0;
              const std::string message = message_of([&] { rank.step(step); });
              SHERD_CHECK(contains(message, "armed"), "got '{}'", message);
              rank.engine.abandon_step();
              armed = false;
            }
            const Ledger& ledger = rank.context.ledger();
            SHERD_CHECK(ledger.live_total() == ledger.live(MemoryCategory::parameters) +
                                                   ledger.live(MemoryCategory::optimizer_state),
                        "memory is left behind: {}", format_breakdown(ledger.live()));
            const GlobalStep all = rank.step(step);
            result.losses.push_back(all.loss);
            result.norms.push_back(all.grad_norm);
          }
          rank.weights_into(result);
          SHERD_CHECK(result == expected, "the steps after it differ");
        });
      }
    }
  }
}

TEST_CASE("steps: freezing or unfreezing after the engine was made is an error") {
  for (const bool freeze : {false, true}) {
    on_meta(0, 2, tied_vit(), run_of(P::zero3, 2), [&](RankTrainer& rank) {
      rank.step(0);
      for (Parameter* parameter : rank.model->parameters()) {
        if (parameter->requires_grad() == freeze && parameter->name().ends_with("qkv.weight")) {
          parameter->set_requires_grad(!freeze);
        }
      }
      const std::string message = message_of([&] { rank.step(1); });
      CHECK(message.find(freeze ? "parameter vit.blocks.0.attn.qkv.weight was trainable when"
                                : "parameter vit.blocks.1.attn.qkv.weight was frozen when") == 0);
    });
  }
}

TEST_CASE("steps: the engine forgets its model, which can be sharded again in another way") {
  const std::unique_ptr<Communicator> world = make_meta_communicator(0, 4);
  Context context({.device = Device::meta});
  TiedViT model;
  for (const P policy : {P::zero3, P::none, P::zero1}) {
    RunOptions run = run_of(policy, 4);
    {
      ShardingEngine engine(model, context, *world, DType::f32, run.sharding);
      engine.initialize();
      CHECK(engine.spans().front().value.defined());
    }
    for (Parameter* parameter : model.parameters()) {
      CHECK_FALSE(parameter->grad().defined());
      CHECK_FALSE(parameter->grad_place().defined());
    }
  }
}

TEST_CASE("steps: after an exception in evaluation a step is given up, or it is an error") {
  for (const bool in_post_hook : {false, true}) {
    CAPTURE(in_post_hook);
    for (const P policy : kPolicies) {
      CAPTURE(name_of(policy));
      for (const int prefetch : {0, 1, 3}) {
        RunOptions run = run_of(policy, 2);
        run.sharding.prefetch = prefetch;
        const RunResult expected = train_ranks(2, tied_vit(), run);
        on_threads(2, tied_vit(), run, [&](RankTrainer& rank) {
          RunResult result;
          std::vector<ShardingEvent> usual;
          for (int step = 0; step < run.steps; ++step) {
            if (step == 2) {
              Module& block = *rank.model->child("vit")->child("blocks")->child("1");
              const auto throws = [](Module&, const Variable&) -> Variable { fail("no more"); };
              const int hook = in_post_hook ? block.add_post_forward_hook(throws)
                                            : block.add_pre_forward_hook(throws);
              const auto evaluate = [&] {
                const NoGradScope evaluation(rank.context);
                rank.loss_of(step, 0, 2);
              };
              SHERD_CHECK(contains(message_of(evaluate), "no more"), "nothing was thrown");
              block.remove_hook(hook);
              for (const auto& go_on :
                   std::vector<std::function<void()>>{evaluate, [&] { rank.step(step); },
                                                      [&] { rank.engine.finish_backward(0.0); }}) {
                const std::string message = message_of(go_on);
                SHERD_CHECK(contains(message, "has not come to its end in (root)") &&
                                contains(message, "call abandon_step()"),
                            "got '{}'", message);
              }
              rank.engine.abandon_step();
            }
            rank.engine.record_events(true);
            rank.engine.clear_events();
            const GlobalStep all = rank.step(step);
            result.losses.push_back(all.loss);
            result.norms.push_back(all.grad_norm);
            if (step == 1) usual = rank.engine.events();
            SHERD_CHECK(step == 0 || rank.engine.events() == usual, "step {} goes otherwise", step);
            const std::int64_t gathered =
                rank.context.ledger().live(MemoryCategory::gathered_parameters);
            SHERD_CHECK(gathered == 0, "{} bytes stay gathered", gathered);
          }
          rank.weights_into(result);
          SHERD_CHECK(result == expected, "the exception has changed the training");
        });
      }
    }
  }
}

namespace {

// A unit with a parameter, which hands its input on.
class HandsOn : public Module {
 public:
  HandsOn() { weight_ = register_parameter("weight", {5}, Initializer::zeros(), true); }

 protected:
  Variable forward(const Variable& x) override { return x; }

 private:
  std::shared_ptr<Parameter> weight_;
};

class HandsOnTwice : public Module {
 public:
  HandsOnTwice() {
    const auto blocks = std::make_shared<Sequential>();
    blocks->append("0", std::make_shared<HandsOn>());
    blocks->append("1", std::make_shared<HandsOn>());
    blocks_ = register_child("blocks", blocks);
    assign_names();
  }

 protected:
  Variable forward(const Variable& x) override { return blocks_(x); }

 private:
  Child blocks_;
};

}  // namespace

TEST_CASE("evaluation: a unit may return its input unchanged, also one of a tape") {
  const Workload work{[] { return std::make_unique<HandsOnTwice>(); }, {5}, 5, {}};
  for (const P policy : kPolicies) {
    CAPTURE(name_of(policy));
    on_threads(2, work, run_of(policy, 2), [&](RankTrainer& rank) {
      Tape tape(rank.context);
      const Variable x =
          tape.watch(Tensor::zeros(rank.context, {2, 5}, DType::f32, MemoryCategory::inputs));
      {
        const NoGradScope evaluation(rank.context);
        SHERD_CHECK((*rank.model)(x).requires_grad(), "another variable came back");
      }
      (*rank.model)(x);  // without a tape
      const std::int64_t gathered = rank.context.ledger().live(MemoryCategory::gathered_parameters);
      SHERD_CHECK(gathered == 0, "{} bytes stay gathered", gathered);
    });
  }
}

TEST_CASE("steps: a rank knows when it has the whole model to itself, up to date") {
  for (const int ranks : {1, 2, 4}) {
    for (const P policy : kPolicies) {
      CAPTURE(ranks);
      CAPTURE(name_of(policy));
      RunOptions run = run_of(policy, ranks);
      on_threads(ranks, tied_vit(), run, [&](RankTrainer& rank) {
        const bool kept = policy == P::none || policy == P::zero1 || policy == P::zero2;
        const auto check = [&](bool expected, const char* when) {
          SHERD_CHECK(rank.engine.holds_whole_model() == expected, "{}: holds {}", when, !expected);
        };
        check(kept, "before the first step");
        for (int step = 0; step < 2; ++step) {
          const auto [from, to] = rank.samples(0);
          Tape tape(rank.context);
          Variable loss;
          {
            const TapeScope recording(tape);
            loss = rank.loss_of(step, from, to);
          }
          check(kept, "after forward");
          tape.on_backward("in backward", [&] { check(kept, "in backward"); });
          tape.backward(loss);
          check(kept, "after backward");
          const GlobalStep all = rank.engine.finish_backward(loss.tensor().item());
          check(false, "before the update");
          rank.optimizer->step(rank.engine.spans(), 3e-3, clip_factor(all.grad_norm, 0.5));
          check(false, "after the update");
          rank.engine.finish_step();
          check(kept, "after the step");
        }
        rank.forward_backward(2);
        check(false, "in a step that will be given up");
        rank.engine.abandon_step();
        check(kept, "in a step given up");
      });
    }
  }
}

TEST_CASE("steps: a rank that others have left has the whole model where it is kept") {
  for (const char* label : {"vit.blocks.1 reduce", "(root) reduce", "step:"}) {
    CAPTURE(label);
    for (const P policy : kPolicies) {
      CAPTURE(name_of(policy));
      RunOptions run = run_of(policy, 4);
      run.steps = 2;
      const RunResult expected = train_ranks(4, tied_vit(), run);
      std::atomic<int> saved = 0, lost = 0;
      const auto train = [&](Communicator& world) {
        RankTrainer rank(world, tied_vit(), run);
        try {
          for (int step = 0; step < 4; ++step) rank.step(step);
        } catch (const Error& error) {
          world.abort(error.what());
          if (rank.engine.holds_whole_model()) {
            RunResult result;
            for (const Parameter* parameter : rank.model->parameters()) {
              RankTrainer::add_weights(*parameter, parameter->data(), result);
            }
            saved += result.weights == expected.weights;
          } else {
            ++lost;
          }
          throw;
        }
      };
      CHECK_THROWS_WITH_AS(run_rank_threads(4,
                                            [&](Communicator& world) {
                                              std::vector<Fault> faults;
                                              if (world.rank() == 2) {
                                                faults.push_back({.kind = Fault::Kind::fail,
                                                                  .call = 2,
                                                                  .reason = "the cable came out",
                                                                  .label = label});
                                              }
                                              with_faults(world, faults, train);
                                            }),
                           doctest::Contains("the cable came out"), Error);
      const bool kept = policy == P::none || policy == P::zero1 || policy == P::zero2;
      CHECK(saved == (kept ? 4 : 0));
      CHECK(lost == (kept ? 0 : 4));
    }
  }
}

TEST_CASE("engines: those that are gone leave no group of ranks behind") {
  run_rank_threads(4, [](Communicator& world) {
    RunOptions run = run_of(P::hybrid, 4);
    run.sharding.reshard_after_forward = ReshardAfterForward::parse("2");
    int before = -1;
    for (int i = 0; i < 20; ++i) {
      {
        RankTrainer rank(world, odd_net(), run);
        rank.step(0);
      }
      world.barrier("all engines are gone");
      if (before < 0) before = thread_groups();
      SHERD_CHECK(thread_groups() == before, "{} groups after {} engines, {} after one",
                  thread_groups(), i + 1, before);
      world.barrier("all have counted");
    }
  });
}
