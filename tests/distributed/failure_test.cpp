// SPDX-License-Identifier: Apache-2.0
// Ranks that fail, disagree or come late: a message in time, or the same bits.
#include <doctest/doctest.h>

#include "sharding_support.h"

#include <chrono>
#include <condition_variable>
#include <random>
#include <thread>

using namespace sherd;
using namespace sherd::test;

namespace {

using P = ShardingPolicy;
using doctest::Contains;

// Ends a group that hangs, so that the test fails instead.
class Watchdog {
 public:
  explicit Watchdog(Communicator& world)
      : thread_([this, &world] {
          std::unique_lock lock(mutex_);
          const bool in_time =
              changed_.wait_for(lock, std::chrono::seconds(5), [&] { return done_; });
          if (!in_time) world.abort("HANG: the watchdog ended the group");
        }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_;
};

struct Failure {
  std::string message;                // of the run
  std::vector<std::string> of_ranks;  // empty: that rank ended well
};

Failure fail_on_threads(int ranks, const std::function<void(Communicator&)>& body) {
  Failure failure;
  failure.of_ranks.resize(static_cast<std::size_t>(ranks));
  try {
    run_rank_threads(ranks, [&](Communicator& world) {
      const Watchdog watchdog(world);
      try {
        body(world);
      } catch (const Error& error) {
        failure.of_ranks[static_cast<std::size_t>(world.rank())] = error.what();
        throw;
      }
    });
  } catch (const Error& error) {
    failure.message = error.what();
  }
  return failure;
}

// A rank that is late by a random time in every call.
std::vector<Fault> delays(const Communicator& world, unsigned seed) {
  std::mt19937 random(seed * 1000U + static_cast<unsigned>(world.rank()));
  std::exponential_distribution<double> seconds(1.0 / 2e-4);
  std::vector<Fault> faults;
  for (const char* label : {"unshard", "reduce", "update", "step:"}) {
    for (int call = 0; call < 40; ++call) {
      faults.push_back({.kind = Fault::Kind::delay,
                        .call = call,
                        .delay_seconds = seconds(random),
                        .label = label});
    }
  }
  return faults;
}

Module& module_at(Module& root, std::initializer_list<const char*> path) {
  Module* module = &root;
  for (const char* name : path) module = module->child(name).get();
  return *module;
}

// Three units one after another and a root without parameters of its own.
class Chain : public Module {
 public:
  Chain() {
    for (int i = 0; i < 3; ++i) {
      links_.push_back(register_child(std::to_string(i), std::make_shared<OddNet::Cell>(nullptr)));
    }
    assign_names();
  }
  int skipped = -1;

 protected:
  Variable forward(const Variable& x) override {
    Variable y = x;
    for (int i = 0; i < 3; ++i) {
      if (i != skipped) y = links_[static_cast<std::size_t>(i)](y);
    }
    return y;
  }

 private:
  std::vector<Child> links_;
};

Workload chain() {
  return {[] { return std::make_unique<Chain>(); }, {OddNet::kWidth}, OddNet::kWidth, {}};
}

}  // namespace

TEST_CASE("failure: an exception on one rank ends all ranks in time, with its message") {
  for (const bool late : {false, true}) {
    CAPTURE(late);
    for (const bool in_backward : {false, true}) {
      CAPTURE(in_backward);
      for (const P policy : kPolicies) {
        CAPTURE(name_of(policy));
        for (const int ranks : {2, 4}) {
          const auto train = [&](Communicator& world) {
            RankTrainer rank(world, tied_vit(), run_of(policy, ranks));
            int step = 0;
            module_at(*rank.model, {"vit", "blocks", "1"})
                .add_pre_forward_hook([&](Module&, const Variable& x) {
                  if (world.rank() != 1 || step != 2) return x;
                  if (!in_backward) fail("the data ran out");
                  rank.context.tape()->on_backward("user", [] { fail("the data ran out"); });
                  return x;
                });
            for (; step < 4; ++step) rank.step(step);
          };
          const Failure failure = fail_on_threads(ranks, [&](Communicator& world) {
            late ? with_faults(world, delays(world, 7), train) : train(world);
          });
          CAPTURE(failure.message);
          CHECK(failure.message.starts_with("rank 1: "));
          CHECK(failure.message.ends_with("the data ran out"));
          for (const std::string& message : failure.of_ranks) {
            CAPTURE(message);
            CHECK((message.find("rank 1") != std::string::npos ||
                   message.ends_with("the data ran out")));
          }
        }
      }
    }
  }
}

TEST_CASE("failure: a collective that fails in the background ends all ranks with its reason") {
  for (const char* label : {"vit.blocks.1 unshard", "vit.blocks.1 reduce", "step:"}) {
    CAPTURE(label);
    const Failure failure = fail_on_threads(3, [&](Communicator& world) {
      std::vector<Fault> faults;
      if (world.rank() == 2) {
        faults.push_back(
            {.kind = Fault::Kind::fail, .call = 1, .reason = "the cable came out", .label = label});
      }
      with_faults(world, faults, [&](Communicator& all) {
        RankTrainer rank(all, tied_vit(), run_of(P::zero3, 3));
        for (int step = 0; step < 4; ++step) rank.step(step);
      });
    });
    CHECK(failure.message.find("the cable came out") != std::string::npos);
    CHECK(failure.message.find("rank 2") != std::string::npos);
  }
}

TEST_CASE("failure: a unit that only some ranks run is an error that names ranks and units") {
  for (const P policy : kPolicies) {
    CAPTURE(name_of(policy));
    for (const int prefetch : {0, 1}) {
      CAPTURE(prefetch);
      for (const int skipped : {0, 1, 2}) {
        CAPTURE(skipped);
        for (const int step : {0, 1}) {
          const Failure failure = fail_on_threads(2, [&](Communicator& world) {
            RunOptions run = run_of(policy, 2, true);
            if (policy == P::hybrid) run.sharding.mesh = ProcessMesh::parse("replicate=1,shard=2");
            run.sharding.prefetch = prefetch;
            RankTrainer rank(world, chain(), run);
            for (int i = 0; i < 3; ++i) {
              const bool skips = world.rank() == 1 && i == step;
              dynamic_cast<Chain&>(*rank.model).skipped = skips ? skipped : -1;
              rank.step(i);
            }
          });
          CAPTURE(failure.message);
          CHECK(failure.message.find("HANG") == std::string::npos);
          CHECK(failure.message.find("rank 0") != std::string::npos);
          CHECK(failure.message.find("rank 1") != std::string::npos);
          const bool names = failure.message.find("'0 ") != std::string::npos ||
                             failure.message.find("'1 ") != std::string::npos ||
                             failure.message.find("'2 ") != std::string::npos;
          CHECK(names);
        }
      }
    }
  }
}

TEST_CASE("failure: ranks with different models or options are told the first difference") {
  struct Case {
    std::string name;
    std::function<void(Communicator&, ViTSettings&, RunOptions&)> change;  // on the last rank
    std::string first, other;
  };
  const std::vector<Case> cases{
      {"a shape", [](auto&, ViTSettings& s, auto&) { s.classes = 4; },
       "rank 0 has 'head.weight' [3, 8] in unit (root)", "has 'head.weight' [4, 8] in unit (root)"},
      {"fewer blocks", [](auto&, ViTSettings& s, auto&) { s.depth = 1; },
       "rank 0 has 'blocks.1.norm1.weight' [8] in unit blocks.1",
       "has 'norm.weight' [8] in unit (root)"},
      {"more blocks", [](auto&, ViTSettings& s, auto&) { s.depth = 3; },
       "rank 0 has 'norm.weight' [8] in unit (root)",
       "has 'blocks.2.norm1.weight' [8] in unit blocks.2"},
      {"units", [](auto&, auto&, RunOptions& r) { r.sharding.units = UnitRule::parse("model"); },
       "rank 0 has 'blocks.0.norm1.weight' [8] in unit blocks.0",
       "has 'blocks.0.norm1.weight' [8] in unit (root)"},
      {"prefetch", [](auto&, auto&, RunOptions& r) { r.sharding.prefetch = 3; }, "prefetch 1",
       "prefetch 3"},
      {"policy", [](auto&, auto&, RunOptions& r) { r.sharding.policy = P::zero1; },
       "rank 0 has policy zero3", "has policy zero1"},
      {"hybrid",
       [](Communicator& world, auto&, RunOptions& r) {
         r.sharding.policy = P::hybrid;
         r.sharding.mesh = ProcessMesh({{"replicate", world.size()}, {"shard", 1}});
       },
       "rank 0 has policy zero3", "has policy hybrid"},
      {"a secondary copy",
       [](auto&, auto&, RunOptions& r) {
         r.sharding.reshard_after_forward = ReshardAfterForward::parse("1");
       },
       "rank 0 has policy zero3", "has policy zero3"},
      {"the type", [](auto&, auto&, RunOptions& r) { r.precision = DType::f64; }, "f32", "f64"},
      {"the seed", [](auto&, auto&, RunOptions& r) { r.seed = 4; }, "rank 0 has seed 3, f32",
       "has seed 4, f32"},
      {"how often gradients are summed",
       [](auto&, auto&, RunOptions& r) { r.sharding.reduce_every_pass = true; }, "every step",
       "every pass"},
      {"what persists", [](auto&, auto&, RunOptions& r) { r.sharding.persist_below = 10; },
       "rank 0 has 'cls_token' [1, 1, 8] in unit (root);",
       "has 'cls_token' [1, 1, 8] in unit (root)/persistent"},
  };
  for (const int ranks : {2, 3, 5}) {
    CAPTURE(ranks);
    for (const Case& c : cases) {
      CAPTURE(c.name);
      const Failure failure = fail_on_threads(ranks, [&](Communicator& world) {
        RunOptions run = run_of(P::zero3, ranks);
        ViTSettings settings{.image_height = 4,
                             .image_width = 4,
                             .channels = 1,
                             .patch = 2,
                             .dim = 8,
                             .depth = 2,
                             .heads = 2,
                             .classes = 3};
        if (world.rank() == ranks - 1) c.change(world, settings, run);
        const Workload work{
            [&] { return std::make_unique<VisionTransformer>(settings); }, {1, 4, 4}, 3, {}};
        const RankTrainer rank(world, work, run);
      });
      CAPTURE(failure.message);
      const std::string start = fmt::format("ranks 0 and {} hold different models", ranks - 1);
      CHECK(failure.message.find(start) != std::string::npos);
      CHECK(failure.message.find(c.first) != std::string::npos);
      CHECK(failure.message.find(c.other) != std::string::npos);
      for (const std::string& message : failure.of_ranks) {
        CAPTURE(message);
        CHECK(message.find(start) != std::string::npos);
        CHECK(message.find(c.first) != std::string::npos);
        CHECK(message.find(c.other) != std::string::npos);
      }
    }
  }
}

TEST_CASE("failure: of three different ranks two are compared rightly") {
  // Rank 1 differs from rank 0 behind the end of rank 2's shorter list.
  const Failure failure = fail_on_threads(3, [&](Communicator& world) {
    const std::int64_t depth[] = {3, 3, 1}, classes[] = {3, 4, 3};
    const auto rank = static_cast<std::size_t>(world.rank());
    const ViTSettings settings{.image_height = 4,
                               .image_width = 4,
                               .channels = 1,
                               .patch = 2,
                               .dim = 8,
                               .depth = depth[rank],
                               .heads = 2,
                               .classes = classes[rank]};
    VisionTransformer model(settings);
    Context context;
    ShardingOptions options;
    options.units = UnitRule::parse("model");
    const ShardingEngine engine(model, context, world, DType::f32, options);
  });
  CHECK(failure.message.find("ranks 0 and 1 hold different models") != std::string::npos);
  CHECK(failure.message.find("rank 0 has 'head.weight' [3, 8]") != std::string::npos);
  CHECK(failure.message.find("rank 1 has 'head.weight' [4, 8]") != std::string::npos);
}

TEST_CASE("failure: frozen on one rank only is an error that names the parameter") {
  const Failure failure = fail_on_threads(2, [&](Communicator& world) {
    Workload work = tied_vit();
    work.model = [&] {
      auto model = std::make_unique<TiedViT>();
      if (world.rank() == 1) model->parameters().at(3)->set_requires_grad(false);
      return model;
    };
    const RunOptions run = run_of(P::none, 2);
    const RankTrainer rank(world, work, run);
  });
  const std::string weight = "'vit.patch_embed.proj.weight' [10, 1, 3, 3] in unit (root)";
  CAPTURE(failure.message);
  CHECK(failure.message.find("rank 0 has " + weight + ";") != std::string::npos);
  CHECK(failure.message.find("rank 1 has " + weight + "/frozen.") != std::string::npos);
}

TEST_CASE("failure: late ranks change no bit") {
  for (const bool odd : {false, true}) {
    const Workload work = odd ? odd_net() : tied_vit();
    for (const P policy : kPolicies) {
      CAPTURE(name_of(policy));
      for (const int ranks : {2, 4}) {
        const RunOptions run = run_of(policy, ranks, odd);
        const RunResult expected = train_ranks(ranks, work, run);
        run_rank_threads(ranks, [&](Communicator& world) {
          with_faults(world, delays(world, odd ? 1 : 2), [&](Communicator& all) {
            SHERD_CHECK(train_rank(all, work, run) == expected, "the delays have changed a bit");
          });
        });
      }
    }
  }
}
