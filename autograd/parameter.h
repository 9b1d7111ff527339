// SPDX-License-Identifier: Apache-2.0
// Parameter: a named, trainable tensor. It is described (shape, initialiser) before it holds bytes,
// so that a model can be built on a rank that will hold only a shard of it.
#pragma once

#include <sherd/autograd/variable.h>

#include <functional>
#include <string>

namespace sherd {

// How an element gets its first value. Element i of parameter "name" is a pure function of
// (seed, name, i), so a rank can fill just the elements it owns.
struct Initializer {
  enum class Kind { zeros, ones, normal, truncated_normal, uniform };
  Kind kind = Kind::zeros;
  double scale = 0.0;  // standard deviation, or half the width of the uniform range around 0

  static Initializer zeros() { return {Kind::zeros, 0.0}; }
  static Initializer ones() { return {Kind::ones, 0.0}; }
  static Initializer normal(double std) { return {Kind::normal, std}; }
  // Normal cut at ±2 (absolute, as timm's trunc_normal_ does).
  static Initializer truncated_normal(double std) { return {Kind::truncated_normal, std}; }
  static Initializer uniform(double bound) { return {Kind::uniform, bound}; }
};

class SHERD_API Parameter {
 public:
  Parameter(Shape shape, Initializer initializer, bool weight_decay)
      : shape_(shape), initializer_(initializer), weight_decay_(weight_decay) {}
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;

  // The full name in its model ("blocks.3.attn.qkv.weight"), given by Module::assign_names.
  const std::string& name() const { return name_; }
  void set_name(std::string name) { name_ = std::move(name); }
  const Shape& shape() const { return shape_; }
  std::int64_t numel() const { return shape_.numel(); }
  const Initializer& initializer() const { return initializer_; }
  bool weight_decay() const {
    return weight_decay_;
  }  // false: biases, norms, embeddings of position

  bool requires_grad() const { return requires_grad_; }
  void set_requires_grad(bool value) { requires_grad_ = value; }

  const Tensor& data() const { return data_; }
  void set_data(Tensor data);  // shape must match
  // Allocates the data and fills it by the initialiser.
  void materialize(Context& context, DType dtype);

  // Undefined until a backward has reached it. Of fp32 whether the data is fp32, bf16 or fp16: sums
  // over a batch and over batches lose small terms in 16 bits. fp64 for fp64.
  const Tensor& grad() const { return grad_; }
  void clear_grad() { grad_ = {}; }
  // Adds to the gradient. The first contribution becomes the gradient itself, or is copied to the
  // place that was set. grad is of the type that grad() has.
  void accumulate_grad(const Tensor& grad);

  // Where the gradient shall lie, such as a view of a flat buffer of grad()'s type; asked for when
  // the first contribution arrives. An operation may write its contribution there at once.
  using GradPlace = std::function<Tensor()>;
  void set_grad_place(GradPlace place) { grad_place_ = std::move(place); }
  Tensor grad_place() const { return grad_place_ && !grad_.defined() ? grad_place_() : Tensor(); }

  // The parameter as a differentiable value on the context's current tape (a constant without one,
  // or when requires_grad is false).
  Variable variable();

 private:
  std::string name_;
  Shape shape_;
  Initializer initializer_;
  bool weight_decay_;
  bool requires_grad_ = true;
  Tensor data_;
  Tensor grad_;
  GradPlace grad_place_;
};

// Fills elements of a parameter called `name` whose first one has index `first_index` in it.
SHERD_API void initialize(const Tensor& elements, const Initializer& initializer,
                          std::uint64_t seed, const std::string& name,
                          std::int64_t first_index = 0);

}  // namespace sherd
