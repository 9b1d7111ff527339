// SPDX-License-Identifier: Apache-2.0
// Module: a tree of layers with named parameters. Children are ordered; hooks run before and after
// forward; a child can be replaced. That is all a sharding engine needs, so a model never knows of
// ranks.
#pragma once

#include <sherd/autograd/parameter.h>
#include <sherd/autograd/variable.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace sherd {

class SHERD_API Module {
 public:
  using Hook = std::function<Variable(Module&, const Variable&)>;

  Module() = default;
  virtual ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // Runs the pre-forward hooks (each may replace the input), forward, and the post-forward hooks
  // (each may replace the output).
  Variable operator()(const Variable& input);

  // Return a number by which the hook can be removed.
  int add_pre_forward_hook(Hook hook);
  int add_post_forward_hook(Hook hook);
  void remove_hook(int id);
  bool has_hooks() const { return !pre_hooks_.empty() || !post_hooks_.empty(); }

  // The path in the model ("blocks.3.attn"), given by assign_names; empty for the root.
  const std::string& name() const { return name_; }
  // Names every module and parameter below by its path; call it on the root. A name keys a
  // parameter's initial values.
  void assign_names(const std::string& prefix = "");

  const std::vector<std::pair<std::string, std::shared_ptr<Module>>>& children() const {
    return children_;
  }
  std::shared_ptr<Module> child(const std::string& name) const;  // throws if there is none
  // The new child takes the old one's name, mode and set_recompute().
  void replace_child(const std::string& name, std::shared_ptr<Module> module);

  // Every parameter below, each once (a tied one under its first name), in a fixed order: own ones
  // first, then the children's.
  std::vector<Parameter*> parameters() const;
  // Own parameters by short name.
  const std::vector<std::pair<std::string, std::shared_ptr<Parameter>>>& own_parameters() const {
    return parameters_;
  }
  std::vector<std::pair<std::string, Tensor>> buffers() const;  // by full name
  std::int64_t parameter_count() const;

  // Allocates every parameter and fills it by its initialiser from the context's seed. On a module
  // without a name, taken for the root, assign_names() comes first.
  void initialize(Context& context, DType dtype);
  void clear_gradients();

  // Training mode turns dropout on. Holds for everything below.
  void set_training(bool training);
  bool training() const { return training_; }

  // Keep of this module's forward only its input, and run it again in backward (recompute.h, which
  // says what a forward must not do then). Hooks of this module run once as ever, those of modules
  // below again with the second run. Inside a module that does so it has no effect, nor without a
  // tape. Between forward and backward the mode (set_training) must not change. offload_input: the
  // input is kept in the host's memory (recompute.h, Note [Offloaded inputs]).
  void set_recompute(bool on, bool offload_input = false);
  bool recomputes() const { return recompute_; }
  bool offloads_input() const { return offload_input_; }

  // Calls visit for this module and everything below, parents first.
  void for_each_module(const std::function<void(Module&)>& visit);

 protected:
  // A child as its parent calls it: whatever stands in its place now, see replace_child.
  class Child {
   public:
    Child() = default;
    Variable operator()(const Variable& input) const;
    Module& get() const;

   private:
    friend class Module;
    Child(Module* parent, std::size_t index) : parent_(parent), index_(index) {}
    Module* parent_ = nullptr;
    std::size_t index_ = 0;
  };

  virtual Variable forward(const Variable& input) = 0;

  std::shared_ptr<Parameter> register_parameter(const std::string& name, const Shape& shape,
                                                const Initializer& initializer, bool weight_decay);
  void register_parameter(const std::string& name, std::shared_ptr<Parameter> shared);  // tied
  Child register_child(const std::string& name, std::shared_ptr<Module> module);
  void register_buffer(const std::string& name, Tensor tensor);

 private:
  Variable forward_twice(const Variable& input);
  Variable run_hooks(const std::vector<std::pair<int, Hook>>& hooks, const Variable& input);

  std::string name_;
  bool training_ = true;
  bool recompute_ = false, offload_input_ = false;
  std::vector<std::pair<std::string, std::shared_ptr<Parameter>>> parameters_;
  std::vector<std::pair<std::string, Tensor>> buffers_;
  std::vector<std::pair<std::string, std::shared_ptr<Module>>> children_;
  int next_hook_ = 0;
  std::vector<std::pair<int, Hook>> pre_hooks_, post_hooks_;
};

// Children run one after another.
class SHERD_API Sequential : public Module {
 public:
  void append(const std::string& name, std::shared_ptr<Module> module);

 protected:
  Variable forward(const Variable& input) override;
};

}  // namespace sherd
