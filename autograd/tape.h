// SPDX-License-Identifier: Apache-2.0
// Tape: operations are recorded in the order they run; backward walks the record in reverse. The
// tape is the schedule: a hook placed at a position during forward runs when backward passes that
// position, which is where a sharding engine gathers and reduces.
//
//   Tape tape(context);
//   {
//     TapeScope recording(tape);
//     loss = cross_entropy(model(images), labels);
//   }
//   tape.backward(loss);   // gradients arrive in Parameter::grad
//
// Several tapes may live at once. Each can run backward once, and frees what it saved on the way.
#pragma once

#include <sherd/autograd/parameter.h>
#include <sherd/autograd/saved_tensor.h>
#include <sherd/autograd/variable.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace sherd {

class Tape;

// What a node's backward reads and writes: gradients of its outputs in, of its inputs out.
class SHERD_API Gradients {
 public:
  // Gradient of output i; undefined when nothing flowed back to it (only with several outputs).
  const Tensor& output(int i = 0) const { return outputs_[static_cast<std::size_t>(i)]; }
  bool wants(int input) const;
  // Hands over the gradient of an input (ignored when not wanted); contributions of several uses
  // add. A gradient is kept in its value's type, that of a parameter in fp32 (fp64 for fp64); one
  // that comes in another floating type is cast.
  void set(int input, Tensor gradient);
  // Where the first contribution to this input should be written, to spare a copy: its parameter's
  // grad_place(). Undefined for anything else; the kernel makes a new tensor then.
  Tensor place(int input) const;
  // The sum of earlier contributions to this input where a kernel may add to it in place; else
  // undefined, and the kernel makes a new tensor for set().
  Tensor accumulated(int input) const;

 private:
  friend class Tape;
  Gradients(Tape& tape, std::span<const int> inputs, std::span<const Tensor> outputs)
      : tape_(tape), inputs_(inputs), outputs_(outputs) {}
  Tape& tape_;
  std::span<const int> inputs_;
  std::span<const Tensor> outputs_;
};

// One recorded operation. Holds what backward needs as SavedTensors.
class SHERD_API Node {
 public:
  virtual ~Node();
  virtual const char* name() const = 0;
  virtual void backward(Gradients& gradients) = 0;
};

class SHERD_API Tape {
 public:
  explicit Tape(Context& context);
  ~Tape();
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  Context& context() const { return context_; }
  std::uint64_t id() const { return id_; }  // no other tape of this context ever has it
  std::size_t size() const { return records_.size(); }

  // A leaf of this tape whose gradient can be asked for after backward.
  Variable watch(const Tensor& tensor);
  Tensor gradient(const Variable& watched) const;  // undefined if nothing flowed back
  // See Parameter::variable. The parameter must outlive the tape.
  Variable parameter(Parameter& parameter);

  bool records(std::span<const Variable> inputs) const;  // does any input belong to this tape?
  Variable add(std::unique_ptr<Node> node, std::span<const Variable> inputs, const Tensor& output);
  std::vector<Variable> add(std::unique_ptr<Node> node, std::span<const Variable> inputs,
                            std::span<const Tensor> outputs);

  // Calls `hook` when backward passes this position, whether or not gradients flow there.
  void on_backward(std::string label, std::function<void()> hook);

  // Runs backward from `output`. grad_output may be left out for a one-element output: it is 1
  // then.
  void backward(const Variable& output, Tensor grad_output = {});

  // Does it belong to a second run of a recomputed forward (recompute.h)? Then it keeps neither
  // nodes nor hooks, and never runs backward.
  bool is_rerun() const { return rerun_; }
  // In such a run: does nobody need what comes after the next `saves` saved tensors? The operation
  // that saves them may then leave its result uncomputed.
  bool rerun_is_over_after(std::size_t saves) const;

 private:
  friend class Gradients;
  friend class Recomputation;
  friend class SavedTensor;
  friend Variable recompute(const std::string& name,
                            std::function<Variable(const Variable&)> forward, const Variable& input,
                            bool offload_input);
  struct Record {
    std::unique_ptr<Node> node;  // null for a hook
    std::function<void()> hook;
    std::string label;
    std::vector<int> inputs;  // slots, -1 for a constant
    int first_output = 0;
    int outputs = 0;
  };
  struct Slot {
    Tensor gradient;
    Shape shape;
    DType dtype;  // of the gradient, see Gradients::set
    bool keep = false;
    const Parameter* parameter = nullptr;  // of a parameter's slot
  };

  Tape(Context& context, Recomputation& rerun);
  int new_slot(const Tensor& tensor, bool keep);
  void append(Record record);
  void check_owner(const Variable& variable) const;
  void accumulate(int slot, Tensor gradient);
  void run(Record& record);

  Context& context_;
  std::uint64_t id_;
  bool finished_ = false;
  Recomputation* recomputation_ = nullptr;           // whose forward is being recorded
  bool rerun_ = false;                               // for the second time
  std::weak_ptr<Recomputation> last_recomputation_;  // whose forward came last
  std::vector<Record> records_;
  std::vector<Slot> slots_;
  std::unordered_map<const Parameter*, int> parameters_;  // to their slots
};

// Makes `tape` the one its context records on; restores the previous one at the end.
class SHERD_API TapeScope {
 public:
  explicit TapeScope(Tape& tape);
  ~TapeScope();
  TapeScope(const TapeScope&) = delete;
  TapeScope& operator=(const TapeScope&) = delete;

 private:
  Context& context_;
  Tape* previous_;
};

// Nothing is recorded inside.
class SHERD_API NoGradScope {
 public:
  explicit NoGradScope(Context& context);
  ~NoGradScope();
  NoGradScope(const NoGradScope&) = delete;
  NoGradScope& operator=(const NoGradScope&) = delete;

 private:
  Context& context_;
  Tape* previous_;
};

// How an operation records itself: returns `output` as a variable, on the current tape if one of
// the inputs is; make_node is called only then.
template <typename MakeNode>
Variable record(std::initializer_list<Variable> inputs, const Tensor& output,
                const MakeNode& make_node) {
  const std::span<const Variable> all(inputs.begin(), inputs.size());
  Tape* tape = output.context().tape();
  if (tape == nullptr || !tape->records(all)) return {output};
  return tape->add(make_node(), all, output);
}

}  // namespace sherd
