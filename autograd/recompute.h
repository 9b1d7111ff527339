// SPDX-License-Identifier: Apache-2.0
// Activation recomputation (gradient checkpointing; Chen et al., 2016, "Training Deep Nets with
// Sublinear Memory Cost"): of a part of the model only its input is kept between forward and
// backward; when backward comes to it, its forward runs again and makes what backward needs.
// Gradients have the bits that they have without it. Memory and time: models/vit.h.
//
//   y = recompute("blocks.3", [&](const Variable& x) { return mlp(norm(x)); }, x);
//
// Modules do this by Module::set_recompute.
#pragma once

#include <sherd/autograd/offloaded_tensor.h>
#include <sherd/autograd/saved_tensor.h>
#include <sherd/autograd/variable.h>
#include <sherd/runtime/context.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace sherd {

// forward(input), recorded on the context's current tape so that it runs again in backward. What
// `forward` refers to must outlive the tape. It has to do the same both times: depend on nothing
// but its input, parameters, older tensors and the random position (which the second run sees as it
// was), and change nothing. An Error that names `name` says where it did something else. What comes
// after the last value that backward needs may be wrong the second time (it is not used). No effect
// without a tape, or inside another recompute(): the outermost decides. offload_input: the input
// waits for backward in the host's memory, see Note [Offloaded inputs].
SHERD_API Variable recompute(const std::string& name,
                             std::function<Variable(const Variable&)> forward,
                             const Variable& input, bool offload_input = false);

// Note [Recomputation]
// The first run records its nodes on the tape as always: the same nodes in the same order, so
// gradients flow and add up in the same order too. Only the SavedTensors made meanwhile give up
// what was allocated inside, and the input. When backward asks the first of them for its tensor,
// `forward` runs again on a tape that keeps no nodes, and the k-th SavedTensor made in the second
// run gives its tensor to the k-th of the first. From then on each lives as long as its node, so
// memory falls node by node as without recomputation. Tensors that are older than the first run
// (parameters, labels) would be there anyway and stay where they are. They are told by the serial
// numbers of their storages: an address may be that of an earlier tensor.
//
// Only the recomputation itself holds the input, and only until it has run again; nodes that saved
// the input get it back then. It lives as long as one of the values that it has to make.
//
// The second run need not compute what only goes into the output. Where nothing that backward waits
// for comes any more after what an operation saves, the operation may leave its result out
// (Tape::rerun_is_over_after): linear() gives zeros then. So the last product of a ViT block, a
// third of the block's products, is computed once.
//
// Note [Offloaded inputs]
// With most of the model recomputed, the inputs are nearly all that is kept. One that is offloaded
// is copied to the host's memory beside the forward that it is the input of, from the first moment
// that something is known to be made again from it, and the recomputation lets go of it when that
// forward is over: what is left of it on the device is what others hold. When a rerun begins, the
// copy back of the input that backward needs next is started (of the recomputation before it on
// the tape), so that it arrives meanwhile: no more than two inputs of a tape are on the device. The
// copy has the bytes and the strides of the original, so kernels do the same; and a write to the
// original is found even if that is gone (Storage::shared_version), for it may have come before the
// copy. An input of two recomputations is copied twice.
class SHERD_API Recomputation : public std::enable_shared_from_this<Recomputation> {
 public:
  using Forward = std::function<Variable(const Variable&)>;

  Recomputation(std::string name, Forward forward, const Variable& input, bool offload_input);

  Variable run_first(Tape& tape, const Variable& input);
  void run_again();

  // What tape and saved tensors report, in either run.
  void add_operation() { ++(again_ ? operations_again_ : operations_); }
  void add_saved(const std::shared_ptr<SavedTensor::Value>& value);
  // In the second run: is what comes after the next `saves` saved tensors needed by nobody?
  bool is_over_after(std::size_t saves) const { return again_ && next_ + saves >= wanted_; }

 private:
  struct Saved {
    Shape shape;
    DType dtype;
    std::weak_ptr<SavedTensor::Value> value;  // empty: its tensor was kept
  };

  bool is_needed() const;
  void leave_input(Tape& tape);
  void fetch_input();
  const Tensor& take_input();
  void forget_second_run();

  Context& context_;
  const std::string name_;
  const Forward forward_;
  SavedTensor input_;  // its tensor is undefined while it is away
  const bool offload_input_;
  std::optional<OffloadedTensor> offloaded_;
  std::weak_ptr<Recomputation> previous_;  // on the tape
  const bool input_requires_grad_;
  const RandomPosition random_position_;
  const std::uint64_t first_serial_;  // storages from here on are allocated inside
  std::vector<Saved> saved_;
  std::int64_t operations_ = 0;

  // Of the second run.
  bool again_ = false;
  std::size_t next_ = 0;    // in saved_
  std::size_t wanted_ = 0;  // number of those up to the last that has to be made
  std::int64_t operations_again_ = 0;
};

}  // namespace sherd
