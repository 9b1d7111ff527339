// SPDX-License-Identifier: Apache-2.0
// The order of calls on an engine: several tapes, old ones, steps given up, changes it must notice.
#include <doctest/doctest.h>

#include "sharding_support.h"

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
  for (const P policy : {P::none, P::zero1}) {
    CAPTURE(name_of(policy));
    on_threads(2, tied_vit(), run_of(policy, 2), [&](RankTrainer& rank) {
      Recorded first(rank, 0, {0, 2}), second(rank, 0, {2, 4});
      first.backward();
      if (policy == P::zero1) rank.engine.finish_backward(0.0);
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
