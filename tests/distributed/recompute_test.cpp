// SPDX-License-Identifier: Apache-2.0
// Recomputation and sharding: the bits of the run without, what is gathered for a second forward,
// and the peak of the plan.
#include <doctest/doctest.h>

#include "sharding_support.h"

#include <sstream>

using namespace sherd;
using namespace sherd::test;

namespace {

using P = ShardingPolicy;

constexpr Recompute kModes[] = {Recompute::none, Recompute::selective, Recompute::block};

// Attention and MLP of its blocks are units of their own by the rule "params:220".
Workload vit(Recompute mode, std::int64_t depth = 3, bool offload = false) {
  return {[mode, depth, offload]() -> std::unique_ptr<Module> {
            auto model = std::make_unique<VisionTransformer>(ViTSettings{.image_height = 4,
                                                                         .image_width = 6,
                                                                         .channels = 1,
                                                                         .patch = 2,
                                                                         .dim = 8,
                                                                         .depth = depth,
                                                                         .heads = 2,
                                                                         .mlp_ratio = 2.0,
                                                                         .classes = 3,
                                                                         .drop = 0.1,
                                                                         .drop_path = 0.3});
            model->set_recompute(mode, offload);
            return model;
          },
          {1, 4, 6},
          3,
          {}};
}

// OddNet, of which the cells run again: units inside units, one called twice, one left out by some
// steps.
Workload odd_net_recomputed(bool recomputed) {
  Workload work = odd_net();
  work.model = [recomputed] {
    auto model = std::make_unique<OddNet>();
    for (const auto& entry : model->children()) entry.second->set_recompute(recomputed);
    return model;
  };
  return work;
}

void check_equal(const RunResult& result, const RunResult& expected) {
  CHECK(result.losses == expected.losses);
  CHECK(result.norms == expected.norms);
  CHECK(result.weights == expected.weights);
}

std::string lines(const std::string& list) {
  std::string text;
  std::stringstream stream(list);
  for (std::string line; std::getline(stream, line);) {
    std::stringstream events(line);
    for (std::string event; std::getline(events, event, ',');) {
      const std::size_t begin = event.find_first_not_of(' ');
      if (begin != std::string::npos) text += event.substr(begin) + "\n";
    }
  }
  return text;
}

std::string events_of_step(RankTrainer& rank, int step) {
  rank.engine.record_events(true);
  rank.engine.clear_events();
  rank.step(step);
  std::string text;
  for (const ShardingEvent& event : rank.engine.events()) text += event.to_string() + "\n";
  return text;
}

void check_events(const Workload& work, const RunOptions& run, const std::string& expected) {
  on_meta(0, 2, work, run, [&](RankTrainer& rank) {
    for (int step = 0; step < 2; ++step) CHECK(events_of_step(rank, step) == lines(expected));
  });
  std::mutex mutex;
  on_threads(2, work, run, [&](RankTrainer& rank) {
    const std::string text = events_of_step(rank, 0);
    const std::lock_guard lock(mutex);
    CHECK(text == lines(expected));
  });
}

}  // namespace

TEST_CASE("recompute: every policy ends in the bits of the run without") {
  for (const int ranks : {1, 2, 3}) {
    CAPTURE(ranks);
    const RunResult expected = train_ranks(ranks, vit(Recompute::none), run_of(P::none, ranks));
    for (const P policy : kPolicies) {
      CAPTURE(name_of(policy));
      for (const char* units : {"block", "params:220", "params:20", "model"}) {
        CAPTURE(units);
        for (const Recompute mode : kModes) {
          CAPTURE(name_of(mode));
          RunOptions run = run_of(policy, ranks);
          run.sharding.units = UnitRule::parse(units);
          check_equal(train_ranks(ranks, vit(mode), run), expected);
        }
      }
    }
  }
}

TEST_CASE("recompute: prefetch, secondary copies, micro-batches and units that persist") {
  const auto check = [](int ranks, const std::function<void(RunOptions&)>& change) {
    RunOptions run = run_of(P::zero3, ranks);
    run.sharding.units = UnitRule::parse("params:220");
    change(run);
    const RunResult expected = train_ranks(ranks, vit(Recompute::none), run);
    check_equal(train_ranks(ranks, vit(Recompute::selective), run), expected);
    check_equal(train_ranks(ranks, vit(Recompute::block), run), expected);
  };
  check(2, [](RunOptions& run) { run.sharding.prefetch = 0; });
  check(3, [](RunOptions& run) { run.sharding.prefetch = 4; });
  check(2, [](RunOptions& run) { run.sharding.persist_below = 30; });
  check(4, [](RunOptions& run) {
    run.sharding.reshard_after_forward = ReshardAfterForward::parse("2");
  });
  check(3, [](RunOptions& run) { run.passes = 2; });
  check(2, [](RunOptions& run) {
    run.passes = 3;
    run.sync_each_pass = run.sharding.reduce_every_pass = true;
  });
  check(8, [](RunOptions& run) { run.steps = 2, run.batch = 5; });  // ranks without samples
}

TEST_CASE("recompute: units inside units, called twice and left out") {
  for (const int ranks : {1, 2, 3}) {
    CAPTURE(ranks);
    const RunResult expected =
        train_ranks(ranks, odd_net_recomputed(false), run_of(P::none, ranks, true));
    for (const P policy : kPolicies) {
      CAPTURE(name_of(policy));
      check_equal(train_ranks(ranks, odd_net_recomputed(true), run_of(policy, ranks, true)),
                  expected);
    }
  }
}

TEST_CASE("recompute: a second forward gathers what is not there and gives back only that") {
  RunOptions run = run_of(P::zero3, 2);
  run.sharding.units = UnitRule::parse("params:220");
  run.sharding.prefetch = 0;
  const std::string forward = R"(
    unshard (root), wait (root), forward (root)
    unshard blocks.0.attn, wait blocks.0.attn, forward blocks.0.attn, reshard blocks.0.attn
    unshard blocks.0.mlp, wait blocks.0.mlp, forward blocks.0.mlp, reshard blocks.0.mlp
    reshard (root)
    unshard (root), wait (root), backward (root)
    unshard blocks.0.mlp, wait blocks.0.mlp, backward blocks.0.mlp)";
  const std::string after_mlp = R"(
    reshard blocks.0.mlp, reduce blocks.0.mlp
    unshard blocks.0.attn, wait blocks.0.attn, backward blocks.0.attn, reshard blocks.0.attn
    wait_reduce blocks.0.mlp, reduce blocks.0.attn
    reshard (root)
    wait_reduce blocks.0.attn, reduce (root)
    wait_reduce (root))";
  // The attention is sharded when the MLP's backward begins: it is gathered for the second forward,
  // given back, and gathered again for its own backward. The MLP is there and stays.
  check_events(vit(Recompute::block, 1), run, forward + R"(
    unshard blocks.0.attn, wait blocks.0.attn, forward blocks.0.attn, reshard blocks.0.attn
    forward blocks.0.mlp)" + after_mlp);
  // Only the MLP's forward comes again.
  check_events(vit(Recompute::selective, 1), run, forward + R"(
    forward blocks.0.mlp)" + after_mlp);
  // Asked for ahead of its backward, the attention is there for the second forward too, and the
  // next forward pass does not take that for its order.
  run.sharding.prefetch = 1;
  check_events(vit(Recompute::block, 1), run, R"(
    unshard (root), prefetch blocks.0.attn, wait (root), forward (root)
    prefetch blocks.0.mlp, wait blocks.0.attn, forward blocks.0.attn, reshard blocks.0.attn
    wait blocks.0.mlp, forward blocks.0.mlp, reshard blocks.0.mlp
    reshard (root)
    unshard (root), prefetch blocks.0.mlp, wait (root), backward (root)
    prefetch blocks.0.attn, wait blocks.0.mlp, backward blocks.0.mlp
    wait blocks.0.attn, forward blocks.0.attn, forward blocks.0.mlp
    reshard blocks.0.mlp, reduce blocks.0.mlp
    backward blocks.0.attn, reshard blocks.0.attn
    wait_reduce blocks.0.mlp, reduce blocks.0.attn
    reshard (root)
    wait_reduce blocks.0.attn, reduce (root)
    wait_reduce (root))");
}

TEST_CASE("recompute: a step given up in the middle of a second forward leaves no trace") {
  RunOptions run = run_of(P::zero3, 2);
  run.sharding.units = UnitRule::parse("params:220");
  const RunResult expected = train_ranks(2, vit(Recompute::none), run);
  std::vector<RunResult> results(2);
  std::vector<std::string> messages(2);
  on_threads(2, vit(Recompute::block), run, [&](RankTrainer& rank) {
    const auto me = static_cast<std::size_t>(rank.world.rank());
    bool armed = true;
    const auto fc1 = rank.model->child("blocks")->child("1")->child("mlp")->child("fc1");
    fc1->add_pre_forward_hook([&](Module&, const Variable& x) {
      const Tape* tape = rank.context.tape();
      SHERD_CHECK(!armed || tape == nullptr || !tape->is_rerun(), "out of luck");
      return x;
    });
    try {
      rank.forward_backward(0);
    } catch (const Error& error) {
      messages[me] = error.what();
    }
    rank.engine.abandon_step();
    armed = false;
    for (int step = 0; step < run.steps; ++step) {
      const GlobalStep all = rank.step(step);
      results[me].losses.push_back(all.loss);
      results[me].norms.push_back(all.grad_norm);
    }
    rank.weights_into(results[me]);
  });
  for (std::size_t rank = 0; rank < 2; ++rank) {
    CHECK(messages[rank].find("running the forward of blocks.1 again: out of luck") !=
          std::string::npos);
    check_equal(results[rank], expected);
  }
}

TEST_CASE("recompute: the peak of a run is that of its plan") {
  for (const P policy : kPolicies) {
    CAPTURE(name_of(policy));
    for (const char* units : {"block", "params:220"}) {
      CAPTURE(units);
      for (const Recompute mode : kModes) {
        CAPTURE(name_of(mode));
        for (const int ranks : {1, 2, 3}) {
          CAPTURE(ranks);
          RunOptions run = run_of(policy, ranks);
          run.sharding.units = UnitRule::parse(units);
          const auto measure = [](RankTrainer& rank) {
            std::vector<MemoryBreakdown> all;
            for (int step = 0; step < 2; ++step) {
              rank.context.ledger().reset_peak();
              rank.step(step);
              all.push_back(rank.context.ledger().peaks());
              all.push_back(rank.context.ledger().at_peak());
            }
            return all;
          };
          std::vector<std::vector<MemoryBreakdown>> real(static_cast<std::size_t>(ranks)),
              plan(static_cast<std::size_t>(ranks));
          on_threads(ranks, vit(mode), run, [&](RankTrainer& rank) {
            real[static_cast<std::size_t>(rank.world.rank())] = measure(rank);
          });
          for (int rank = 0; rank < ranks; ++rank) {
            on_meta(rank, ranks, vit(mode), run, [&](RankTrainer& trainer) {
              plan[static_cast<std::size_t>(rank)] = measure(trainer);
            });
          }
          CHECK(real == plan);
        }
      }
    }
  }
}

TEST_CASE("recompute: with inputs on the host the bits are the same, and both peaks are planned") {
  for (const Recompute mode : {Recompute::selective, Recompute::block}) {
    CAPTURE(name_of(mode));
    for (const P policy : {P::none, P::zero3}) {
      CAPTURE(name_of(policy));
      for (const std::int64_t passes : {1, 2}) {
        CAPTURE(passes);
        RunOptions run = run_of(policy, 2);
        run.passes = passes;
        const Workload work = vit(mode, 3, true);
        check_equal(train_ranks(2, work, run), train_ranks(2, vit(Recompute::none), run));
        const auto measure = [](RankTrainer& rank) {
          std::vector<MemoryBreakdown> all;
          for (int step = 0; step < 2; ++step) {
            for (Ledger* ledger : {&rank.context.ledger(), &rank.context.host_ledger()}) {
              ledger->reset_peak();
            }
            rank.step(step);
            for (const Ledger* ledger : {&rank.context.ledger(), &rank.context.host_ledger()}) {
              all.push_back(ledger->peaks());
              all.push_back(ledger->at_peak());
              all.push_back(ledger->live());
            }
          }
          return all;
        };
        std::vector<std::vector<MemoryBreakdown>> real(2), plan(2);
        on_threads(2, work, run, [&](RankTrainer& rank) {
          real[static_cast<std::size_t>(rank.world.rank())] = measure(rank);
        });
        for (int rank = 0; rank < 2; ++rank) {
          on_meta(rank, 2, work, run, [&](RankTrainer& trainer) {
            plan[static_cast<std::size_t>(rank)] = measure(trainer);
          });
        }
        CHECK(real == plan);
        // Three inputs, each of one granule of the host's.
        const auto activations = static_cast<std::size_t>(MemoryCategory::activations);
        CHECK(real[0][3][activations] == 3 * 4096);
      }
    }
  }
}

TEST_CASE("recompute: a step given up while inputs are on the host leaves no trace") {
  const RunOptions run = run_of(P::zero3, 2);
  const RunResult expected = train_ranks(2, vit(Recompute::none), run);
  std::vector<RunResult> results(2);
  on_threads(2, vit(Recompute::block, 3, true), run, [&](RankTrainer& rank) {
    const auto me = static_cast<std::size_t>(rank.world.rank());
    bool armed = true;
    const auto fc1 = rank.model->child("blocks")->child("1")->child("mlp")->child("fc1");
    fc1->add_pre_forward_hook([&](Module&, const Variable& x) {
      const Tape* tape = rank.context.tape();
      SHERD_CHECK(!armed || tape == nullptr || !tape->is_rerun(), "out of luck");
      return x;
    });
    bool caught = false;
    try {
      rank.forward_backward(0);
    } catch (const Error&) {
      caught = true;
    }
    SHERD_CHECK(caught, "the second forward was to fail");
    rank.engine.abandon_step();
    SHERD_CHECK(rank.context.host_ledger().live_total() == 0, "inputs are still on the host");
    armed = false;
    for (int step = 0; step < run.steps; ++step) {
      const GlobalStep all = rank.step(step);
      results[me].losses.push_back(all.loss);
      results[me].norms.push_back(all.grad_norm);
    }
    rank.weights_into(results[me]);
  });
  for (const RunResult& result : results) check_equal(result, expected);
}
