// SPDX-License-Identifier: Apache-2.0
#include <sherd/models/module.h>

#include <sherd/autograd/recompute.h>
#include <sherd/runtime/trace.h>

#include <algorithm>
#include <unordered_set>

namespace sherd {
namespace {

std::string join_path(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

}  // namespace

Module::~Module() = default;

Variable Module::operator()(const Variable& input) {
  const TraceScope trace(input.context().trace(), name_.empty() ? std::string_view("model") : name_,
                         "forward");
  Variable value = run_hooks(pre_hooks_, input);
  value = recompute_ ? forward_twice(value) : forward(value);
  return run_hooks(post_hooks_, value);
}

Variable Module::forward_twice(const Variable& input) {
  const auto run = [this, training = training_](const Variable& x) {
    SHERD_CHECK(training == training_,
                "set_training({}) came between forward and backward; call it after backward",
                training_);
    return forward(x);
  };
  return recompute(name_.empty() ? "model" : name_, run, input, offload_input_);
}

// Over a copy, since a hook may add and remove hooks, itself among them.
Variable Module::run_hooks(const std::vector<std::pair<int, Hook>>& hooks, const Variable& input) {
  if (hooks.empty()) return input;
  Variable value = input;
  const std::vector<std::pair<int, Hook>> now = hooks;
  for (const auto& [id, hook] : now) value = hook(*this, value);
  return value;
}

Module& Module::Child::get() const {
  return *parent_->children_[index_].second;
}

Variable Module::Child::operator()(const Variable& input) const {
  return get()(input);
}

Module::Child Module::register_child(const std::string& name, std::shared_ptr<Module> module) {
  children_.emplace_back(name, std::move(module));
  return {this, children_.size() - 1};
}

int Module::add_pre_forward_hook(Hook hook) {
  pre_hooks_.emplace_back(next_hook_, std::move(hook));
  return next_hook_++;
}

int Module::add_post_forward_hook(Hook hook) {
  post_hooks_.emplace_back(next_hook_, std::move(hook));
  return next_hook_++;
}

void Module::remove_hook(int id) {
  const auto has_id = [id](const auto& hook) { return hook.first == id; };
  std::erase_if(pre_hooks_, has_id);
  std::erase_if(post_hooks_, has_id);
}

void Module::assign_names(const std::string& prefix) {
  // A tied parameter keeps the first name it is given, so clear before the walk.
  if (prefix.empty()) {
    for (Parameter* parameter : parameters()) parameter->set_name("");
  }
  name_ = prefix;
  for (auto& [name, parameter] : parameters_) {
    if (parameter->name().empty()) parameter->set_name(join_path(prefix, name));
  }
  for (auto& [name, child] : children_) child->assign_names(join_path(prefix, name));
}

std::shared_ptr<Module> Module::child(const std::string& name) const {
  const auto found = std::ranges::find(children_, name, [](const auto& c) { return c.first; });
  SHERD_CHECK(found != children_.end(), "module '{}' has no child '{}'", name_, name);
  return found->second;
}

void Module::replace_child(const std::string& name, std::shared_ptr<Module> module) {
  const auto found = std::ranges::find(children_, name, [](const auto& c) { return c.first; });
  SHERD_CHECK(found != children_.end(), "module '{}' has no child '{}' to replace", name_, name);
  module->assign_names(found->second->name());
  module->set_training(found->second->training());
  module->set_recompute(found->second->recomputes(), found->second->offloads_input());
  found->second = std::move(module);
}

std::vector<Parameter*> Module::parameters() const {
  std::vector<Parameter*> all;
  std::unordered_set<const Parameter*> seen;
  const auto visit = [&](const Module& module, const auto& self) -> void {
    for (const auto& [name, parameter] : module.parameters_) {
      if (seen.insert(parameter.get()).second) all.push_back(parameter.get());
    }
    for (const auto& [name, child] : module.children_) self(*child, self);
  };
  visit(*this, visit);
  return all;
}

std::vector<std::pair<std::string, Tensor>> Module::buffers() const {
  std::vector<std::pair<std::string, Tensor>> all;
  const auto visit = [&](const Module& module, const std::string& prefix,
                         const auto& self) -> void {
    for (const auto& [name, tensor] : module.buffers_)
      all.emplace_back(join_path(prefix, name), tensor);
    for (const auto& [name, child] : module.children_) self(*child, join_path(prefix, name), self);
  };
  visit(*this, "", visit);
  return all;
}

std::int64_t Module::parameter_count() const {
  std::int64_t count = 0;
  for (const Parameter* parameter : parameters()) count += parameter->numel();
  return count;
}

void Module::initialize(Context& context, DType dtype) {
  if (name_.empty()) assign_names();
  for (Parameter* parameter : parameters()) parameter->materialize(context, dtype);
}

void Module::clear_gradients() {
  for (Parameter* parameter : parameters()) parameter->clear_grad();
}

void Module::set_training(bool training) {
  for_each_module([training](Module& module) { module.training_ = training; });
}

void Module::set_recompute(bool on, bool offload_input) {
  SHERD_CHECK(on || !offload_input,
              "module '{}': its input can be offloaded only where the module is recomputed, for "
              "otherwise the input is not what is kept",
              name_);
  recompute_ = on;
  offload_input_ = offload_input;
}

void Module::for_each_module(const std::function<void(Module&)>& visit) {
  visit(*this);
  for (auto& [name, child] : children_) child->for_each_module(visit);
}

std::shared_ptr<Parameter> Module::register_parameter(const std::string& name, const Shape& shape,
                                                      const Initializer& initializer,
                                                      bool weight_decay) {
  auto parameter = std::make_shared<Parameter>(shape, initializer, weight_decay);
  parameters_.emplace_back(name, parameter);
  return parameter;
}

void Module::register_parameter(const std::string& name, std::shared_ptr<Parameter> shared) {
  parameters_.emplace_back(name, std::move(shared));
}

void Module::register_buffer(const std::string& name, Tensor tensor) {
  buffers_.emplace_back(name, std::move(tensor));
}

void Sequential::append(const std::string& name, std::shared_ptr<Module> module) {
  register_child(name, std::move(module));
}

Variable Sequential::forward(const Variable& input) {
  Variable value = input;
  for (const auto& [name, child] : children()) value = (*child)(value);
  return value;
}

}  // namespace sherd
