// SPDX-License-Identifier: Apache-2.0
// ShardedUnit: the parameters of one unit in one flat buffer, gathered and reduced as one.
//
//     Sharded --unshard()--> Unsharding --wait()--> Unsharded --reshard()--> Sharded
//
// With mixed precision a rank keeps its master weights apart from the flat buffer, which holds
// their roundings; a shard is rounded straight into its place there before it travels.
//
// A parameter's data is an aligned view of the flat buffer, so gathering needs no copy-out: the
// bytes of that buffer come and go, the tensors over it (those saved for backward among them) stay.
// Gradients are written into a flat buffer of the same layout, which is reduced as a whole.
#pragma once

#include <sherd/comm/sharding/file_page.h>
#include <sherd/comm/sharding/groups.h>
#include <sherd/comm/sharding/partition.h>
#include <sherd/optim/optimizer.h>
#include <sherd/runtime/flat_layout.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace sherd {

// Reads or fills elements of a parameter, of which the first has index `first` in it.
using ShardVisitor =
    std::function<void(const Parameter& parameter, std::int64_t first, const Tensor& elements)>;

// A stretch of a parameter's elements, beginning with the one of index `first`.
struct ParameterPiece {
  const Parameter* parameter = nullptr;
  std::int64_t first = 0, numel = 0;
  bool trainable = true;  // and so has optimizer state
};

// Its master weights, and the tensors of optimizer state beside them.
using PieceVisitor = std::function<void(const ParameterPiece& piece, const Tensor& weights,
                                        std::span<const Tensor> state)>;
// Fills elements of one tensor of optimizer state.
using StateVisitor = std::function<void(const Parameter& parameter, std::size_t state,
                                        std::int64_t first, const Tensor& elements)>;

class SHERD_API ShardedUnit {
 public:
  enum class State : std::uint8_t { sharded, unsharding, unsharded };

  // Pages of what is offloaded go to `files`, to be made when all units have theirs.
  ShardedUnit(Context& context, ShardingGroups& groups, OffloadFiles& files, UnitPlan plan,
              UnitPolicy policy, const Precision& precision, const ShardingOptions& options);
  ~ShardedUnit();
  ShardedUnit(const ShardedUnit&) = delete;
  ShardedUnit& operator=(const ShardedUnit&) = delete;

  const std::string& name() const { return plan_.name; }
  const UnitPlan& plan() const { return plan_; }
  const UnitPolicy& policy() const { return policy_; }
  const FlatLayout& layout() const { return layout_; }
  State state() const { return state_; }
  bool trainable() const { return plan_.kind != UnitPlan::Kind::frozen; }

  // Calls visit for all master weights that this rank keeps, to read or to write them.
  void visit_shards(const ShardVisitor& visit);
  void fill_shards(const ShardVisitor& fill);
  // What this rank writes into a checkpoint: with the other ranks' pieces, every element once.
  std::vector<ParameterPiece> owned_pieces() const;
  void visit_owned(const PieceVisitor& visit);
  // All optimizer state that this rank keeps.
  void fill_state(const StateVisitor& fill);
  // All master weights, gathered where they are spread; in f32 or f64, until settle(). All ranks
  // together.
  Tensor gather_master();
  Tensor view(const Tensor& flat, std::size_t parameter) const;

  // Parameters. Each returns whether there was anything to do.
  bool unshard();  // starts the all-gather on the stream
  bool wait();     // until it has arrived
  // Gives the bytes back. keep_secondary: backward will come for them, so where there are
  // neighbours this rank keeps its part of their copy, from the end of forward until the last
  // backward through.
  bool reshard(bool keep_secondary);
  void drop_secondary() { secondary_ = {}; }

  // Gradients. In a backward pass they are written to a full flat buffer (its place is asked for
  // when the first one arrives); mark_passed() says that they are complete on this rank.
  // start_reduce() sums them over the ranks on the stream, finish_reduce() waits, and adds the sum
  // to that of earlier passes of this step. In between the input of the sum lives, in the type that
  // is sent; the engine keeps one such unit at a time.
  //   accumulating (full_grad_) --start_reduce--> being summed (input_) --finish_reduce--> summed
  // With sharded gradients the sum lies in grad_shard_, and another pass may follow; otherwise it
  // stays in full_grad_ and none may.
  void begin_pass() { closed_ = false; }  // a forward or backward of the model starts
  void mark_passed();
  bool unreduced() const;
  void start_reduce();
  void finish_reduce();

  // This rank's part of the reduced gradient, for norms; undefined where there is none.
  Tensor own_gradient() const;
  // One number a parameter: has any rank sent a gradient for it in this step? The engine sums them,
  // after which no more may come.
  const std::vector<std::int64_t>& arrivals() const { return arrivals_; }
  void set_arrivals(const std::int64_t* sums);
  bool has_gradient() const;

  // What the optimizer of this rank updates, and `states` tensors beside each, zero at first.
  std::vector<ParameterSpan> spans() const;
  // The same as flat tensors, where every parameter has a gradient; takes along the rounding of
  // master weights where that can be.
  std::optional<FlatSpans> flat_spans() const;
  void make_state(std::size_t states, OffloadFiles& files);
  Tensor state(std::size_t span, std::size_t state) const;

  // The update: what lies in files comes, is updated, goes. Each returns whether anything does.
  bool start_fetch();
  bool wait_fetch();  // and copies to the host what a GPU has of it, where it is updated there
  // Master weights are rounded to where they are gathered from, unless the update did that.
  bool finish_update(bool rounded);
  void settle();  // what was fetched is in its file again, its memory given back
  // After it: a tape recorded before is told that its saved values are old; then full parameters
  // are gathered from the shards (on the stream, until the event).
  void mark_updated();
  bool gathers_update() const { return !policy_.shard_parameters && policy_.shard_optimizer; }
  Event start_gather_update();
  // Whether this rank has all master weights.
  bool holds_master() const {
    return !policy_.shard_parameters && !(precision_.mixed() && policy_.shard_optimizer);
  }
  void clear_gradients();

 private:
  Tensor piece(const Tensor& flat) const;  // this rank's shard of a full buffer
  const Tensor& all_master() const { return precision_.mixed() ? master_ : flat_; }
  Tensor empty_gradient(std::int64_t numel, MemoryPool pool = MemoryPool::device) const;
  // A tensor that stays where `to` says; with a page where that is a file.
  Tensor make_kept(std::int64_t numel, DType dtype, MemoryCategory category, const OffloadTo& to,
                   OffloadFile& file, const char* what, std::unique_ptr<FilePage>& page);
  void visit_kept(const ShardVisitor& visit) const;
  bool keeps_shard() const { return policy_.shard_parameters || policy_.shard_optimizer; }
  std::vector<ShardSegment> kept_segments() const;   // of master_
  std::vector<ShardSegment> owned_segments() const;  // of those, what this rank writes
  std::vector<FilePage*> pages() const;
  void round_master();
  Tensor rounding_place() const;
  const Tensor& updated() const { return host_master_.defined() ? host_master_ : master_; }
  Tensor update_gradient() const;
  Tensor gradient_place(std::size_t parameter);
  bool arrives_apart() const;  // what is summed for grad_shard_, which is out of a GPU's reach
  void check_not_summed() const;
  void zero_what_did_not_arrive();

  Context& context_;
  ShardingGroups& groups_;
  UnitPlan plan_;
  UnitPolicy policy_;
  Precision precision_;
  FlatLayout layout_;
  std::vector<ShardSegment> segments_;  // of this rank
  State state_ = State::sharded;
  Tensor flat_;    // all parameters in the type of computation; without bytes while sharded
  Tensor master_;  // what this rank updates: its shard, or all; a view of flat_ where that is
                   // kept and of the same type
  Tensor shard_;   // from where the unit is gathered; undefined where master_ is rounded for that
  std::size_t states_ = 0;
  // On the host while they are updated there: what stays on a GPU otherwise.
  Tensor host_master_, host_gradient_;
  Tensor optimizer_state_;  // one stretch of master_'s size after the other
  std::unique_ptr<FilePage> master_page_, shard_page_, state_page_;  // of those in files
  FilePage* gathering_ = nullptr;                                    // is being read for a gather
  MemoryPool gradient_pool_ = MemoryPool::device;                    // of grad_shard_
  OffloadTo offload_optimizer_;
  bool rounded_ = false;  // round_master() has been called since the update
  Tensor secondary_;      // this rank's part of what K neighbours keep
  Event gathered_, reduced_;
  Tensor full_grad_, input_, result_, grad_shard_;  // see start_reduce()
  bool passed_ = false;        // a backward pass came through whose gradients are not summed yet
  bool closed_ = false;        // they are, or are being summed: this pass may bring no more
  bool reduced_once_ = false;  // in this step
  bool adds_ = false;          // the sum under way is not the step's first
  bool agreed_ = false;        // finish_backward() is done: nor may this step
  std::vector<std::int64_t> arrivals_;
};

}  // namespace sherd
