// SPDX-License-Identifier: Apache-2.0
// ShardingEngine: trains a Module on many ranks. It hooks on the modules that are units and
// gathers, releases and reduces around their forward and backward; the model knows nothing of it.
//
//   ShardingEngine engine(model, context, communicator, DType::f32, {.policy = ...});
//   (or a Precision: 16-bit parameters and gradients, weights kept in f32)
//   engine.initialize();
//   engine.prepare(*optimizer);
//   every step, with the loss of this rank's samples divided by the count over all ranks:
//     tape.backward(loss);
//     const GlobalStep all = engine.finish_backward(loss.tensor().item());
//     engine.update(*optimizer, lr, clip_factor(all.grad_norm, max_norm));
//
// All ranks make the same calls in the same order and run the same modules in the same order; where
// they do not, all get one Error that names the ranks and the units.
//
// Gradients are summed over the ranks, never averaged: with losses divided by the global number of
// samples, ranks may have different counts of them.
//
// At one number of ranks and threads every policy, unit rule and prefetch gives bitwise equal
// weights (Note [One tree] in comm/reduce.h; hybrid: where its shard groups are contiguous and of a
// power of two).
#pragma once

#include <sherd/autograd/tape.h>
#include <sherd/comm/sharding/events.h>
#include <sherd/comm/sharding/unit.h>
#include <sherd/kernels/reduce.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace sherd {

// Over all ranks.
struct GlobalStep {
  double loss = 0.0;       // the sum of what the ranks gave; 0 on meta
  double grad_norm = 0.0;  // of the gradient of all parameters, each counted once; 1 on meta
};

// What this rank brings to a step's agreement: the squares of its part of the gradient, still on
// the device, and for each parameter how many ranks have sent a gradient (at first this one alone).
struct LocalGradient {
  SquareSum squares;
  std::vector<std::int64_t> arrivals;
};

// What an update cost this rank, without what the ranks exchange after it.
struct UpdateCost {
  double seconds = 0.0;
  FileTraffic files;
};

class SHERD_API ShardingEngine {
 public:
  // Takes over the model's parameters. Each rank allocates its shards alone, set to zero. The
  // model, context and communicator must outlive the engine, the engine every tape recorded
  // meanwhile; the model's modules and what is frozen must not change. Once the engine is gone,
  // parameters that were sharded cannot be read. The model's input is cast to the type of the
  // parameters, its output to precision.output.
  ShardingEngine(Module& model, Context& context, Communicator& world, const Precision& precision,
                 const ShardingOptions& options);
  ~ShardingEngine();
  ShardingEngine(const ShardingEngine&) = delete;
  ShardingEngine& operator=(const ShardingEngine&) = delete;

  // Calls visit for all weights this rank keeps, between steps, to read them; in precision.master.
  void visit_shards(const ShardVisitor& visit);
  // The same to write them. All ranks together.
  void fill_shards(const ShardVisitor& fill);
  // Fills them by the parameters' initialisers and the context's seed. All ranks together.
  void initialize();

  // For checkpoints, between steps. What this rank writes: all ranks' pieces together are every
  // element once, divided evenly among the ranks that keep it.
  std::vector<ParameterPiece> owned_pieces() const;
  void visit_owned(const PieceVisitor& visit);
  // After prepare(): fills the optimizer state that this rank keeps.
  void fill_state(const StateVisitor& fill);

  // One span per piece of a trainable parameter that this rank updates. Gradients are there from
  // finish_backward() to finish_step(), undefined for a parameter that no rank used.
  std::vector<ParameterSpan> spans() const;

  // false: backward passes only add up on this rank, until one with true (the default), or
  // finish_backward(), reduces the sum. With options().reduce_every_pass each one does.
  void set_gradient_sync(bool on) { sync_ = on; }
  // Completes this step's gradients, and sums this rank's loss over the ranks.
  GlobalStep finish_backward(double loss);
  // The same in three: what the device has to do; what ranks agree on (arrivals become those of
  // all); and that the step's update comes. A captured step is replayed instead of the first, and
  // has no need of the last.
  LocalGradient complete_backward();
  GlobalStep agree(double loss, LocalGradient& gradient);
  void accept(const LocalGradient& gradient);
  // Makes the optimizer's state, where the options say: one flat tensor a unit.
  void prepare(Optimizer& optimizer);
  // Updates all weights by the optimizer. Parameters are up to date then, gradients gone.
  void update(Optimizer& optimizer, double lr, double grad_scale);
  // Instead, where a program has updated spans() by itself (what is offloaded to files is not in
  // memory then).
  void finish_step();
  // Instead, after an exception that all ranks have caught: gives up the step.
  void abandon_step();

  // Calls visit for each parameter with all its weights, in precision.master, gathered unit by
  // unit, to read. All ranks together; where holds_whole_model(), a rank can do it alone.
  void visit_parameters(const std::function<void(const Parameter&, const Tensor& weights)>& visit);

  const std::vector<std::unique_ptr<ShardedUnit>>& units() const { return units_; }
  const ShardingGroups& groups() const { return groups_; }
  ShardingGroups& groups() { return groups_; }
  const ShardingOptions& options() const { return options_; }
  const Precision& precision() const { return precision_; }
  // Whether this rank has the whole model, up to date, so that it can save it without the others.
  bool holds_whole_model() const;
  // Whether update() was left by an exception: some weights are those of the step, some not.
  bool torn() const { return torn_; }

  // Seconds this rank's computing thread has waited for communication.
  double exposed_seconds() const { return exposed_seconds_; }
  const UpdateCost& last_update() const { return last_update_; }
  // Everything sent since the communicators were made, over all groups.
  CommunicationCounters counters();

  void record_events(bool on) { recording_events_ = on; }
  const std::vector<ShardingEvent>& events() const { return events_; }
  void clear_events() { events_.clear(); }

 private:
  // A module that is a unit, with its one to three ShardedUnits.
  struct Stage {
    Module* module = nullptr;
    std::string name;  // of the module; "(root)" for the model
    bool is_model = false;
    std::vector<ShardedUnit*> units;
    int pre_hook = -1, post_hook = -1;
    int running = 0;          // forward passes it is in
    bool prefetched = false;  // and not needed yet
  };
  // One forward pass through a stage on a tape.
  struct Call {
    Stage* stage = nullptr;
    bool recorded = false;          // backward will come through
    bool last_in_backward = false;  // the first of its stage on this tape
  };
  // The calls on one tape in the order in which they ended; backward enters them in reverse.
  struct Recording {
    std::uint64_t tape = 0;
    std::vector<std::shared_ptr<Call>> calls;
  };

  void hook(Stage& stage);
  void before_forward(Stage& stage);
  void after_forward(Stage& stage, const Variable& output);
  Variable cast_to(DType dtype, const Variable& value) const;
  void before_rerun(Stage& stage);
  void after_rerun();
  void before_backward(const Recording& recording, std::size_t index);
  void after_backward(const Call& call);

  void begin_pass();
  void end_pass();
  std::shared_ptr<Recording> recording_of(const Tape& tape);
  bool unshard(Stage& stage, ShardingEvent::Kind kind);  // was there anything to do?
  void prefetch_after(Stage& stage);
  void wait(Stage& stage);
  void reshard(ShardedUnit& unit, bool keep_secondary,
               ShardingEvent::Kind kind = ShardingEvent::Kind::reshard);
  void drop(Stage& stage);
  void reduce(ShardedUnit& unit);
  void finish_reduce();
  void gather_updates(const std::function<bool(const ShardedUnit&)>& changed);
  void reshard_all();
  void log(ShardingEvent::Kind kind, const std::string& unit);
  void update_units(Optimizer& optimizer, double lr, double grad_scale);
  FileTraffic file_traffic();
  void check_trainable() const;
  void check_not_open(const Stage* entering = nullptr) const;
  // Adds the time from its construction to its destruction.
  class SecondsScope {
   public:
    explicit SecondsScope(double& total) : total_(total) {}
    ~SecondsScope() { total_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
    SecondsScope(const SecondsScope&) = delete;
    SecondsScope& operator=(const SecondsScope&) = delete;

   private:
    using Clock = std::chrono::steady_clock;
    double& total_;
    Clock::time_point start_ = Clock::now();
  };
  // Runs what blocks on other ranks and adds its time to exposed_seconds().
  template <typename Blocking>
  auto timed(const Blocking& blocking) {
    const SecondsScope seconds(exposed_seconds_);
    return blocking();
  }

  Context& context_;
  Precision precision_;
  ShardingOptions options_;
  ShardingGroups groups_;
  OffloadFiles files_;                       // of weights
  std::optional<OffloadFiles> state_files_;  // of optimizer state
  const Optimizer* prepared_ = nullptr;      // whose state that of the units is
  std::vector<std::unique_ptr<ShardedUnit>> units_;
  std::vector<std::unique_ptr<Stage>> stages_;
  bool sync_ = true;
  bool between_steps_ = true;        // parameters are not being updated
  bool torn_ = false;                // an update has begun and not ended: weights of two steps
  ShardedUnit* reducing_ = nullptr;  // at most one reduction is under way

  // Forward order: of the last pass, and how far this pass has come in it.
  std::vector<Stage*> order_, visited_;
  std::size_t next_ = 0;
  std::vector<std::shared_ptr<Call>> open_;  // forward passes that have not ended, outermost first
  std::vector<std::weak_ptr<Recording>> recordings_;
  std::vector<std::vector<ShardedUnit*>> rerun_;  // what its open stages gathered, outermost first

  double exposed_seconds_ = 0.0;
  UpdateCost last_update_;
  bool recording_events_ = false;
  std::vector<ShardingEvent> events_;
  int exceptions_ = 0;  // in flight when the engine was made
};

}  // namespace sherd
