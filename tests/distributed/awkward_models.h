// SPDX-License-Identifier: Apache-2.0
// Models that are awkward to shard.
#pragma once

#include <sherd/autograd/operations.h>
#include <sherd/models/vit.h>

#include <memory>
#include <utility>

namespace sherd::test {

// A ViT of odd sizes with dropout and drop-path, a frozen layer, and a matrix that three places
// use.
class TiedViT : public Module {
 public:
  static constexpr std::int64_t kClasses = 7, kSide = 9;

  TiedViT() {
    const auto vit = std::make_shared<VisionTransformer>(ViTSettings{.image_height = kSide,
                                                                     .image_width = kSide,
                                                                     .channels = 1,
                                                                     .patch = 3,
                                                                     .dim = 10,
                                                                     .depth = 3,
                                                                     .heads = 2,
                                                                     .mlp_ratio = 1.5,
                                                                     .classes = kClasses,
                                                                     .drop = 0.1,
                                                                     .drop_path = 0.2});
    vit_ = register_child("vit", vit);
    tied_ = vit->child("head")->own_parameters().front().second;  // [classes, dim]
    register_parameter("tied", tied_);
    assign_names();
    const auto block = vit->child("blocks")->child("1");
    for (Parameter* parameter : block->child("attn")->parameters()) {
      parameter->set_requires_grad(false);
    }
  }

 protected:
  Variable forward(const Variable& images) override {
    const Variable features = matmul(vit_(images), tied_->variable());
    return linear(features, tied_->variable(), {});
  }

 private:
  Child vit_;
  std::shared_ptr<Parameter> tied_;
};

// Everything else a flat unit may meet: a scalar, an empty and a tiny parameter, a matrix tied
// across units, a unit inside a unit, a module called twice, and one that some steps leave out.
class OddNet : public Module {
 public:
  static constexpr std::int64_t kWidth = 5;

  class Cell : public Module {
   public:
    explicit Cell(std::shared_ptr<Parameter> shared, std::shared_ptr<Module> inner = nullptr) {
      if (inner) inner_ = register_child("inner", inner), has_inner_ = true;
      weight_ = shared ? std::move(shared)
                       : std::make_shared<Parameter>(Shape{kWidth, kWidth},
                                                     Initializer::normal(0.3), true);
      register_parameter("weight", weight_);
      bias_ = register_parameter("bias", {kWidth}, Initializer::normal(0.1), false);
    }
    const std::shared_ptr<Parameter>& weight() const { return weight_; }

   protected:
    Variable forward(const Variable& x) override {
      const Variable y =
          activate(linear(x, weight_->variable(), bias_->variable()), Activation::gelu_erf);
      return add(x, has_inner_ ? inner_(y) : y);
    }

   private:
    Child inner_;
    bool has_inner_ = false;
    std::shared_ptr<Parameter> weight_, bias_;
  };

  OddNet() {
    const auto first = std::make_shared<Cell>(nullptr);
    const auto nested = std::make_shared<Cell>(nullptr, std::make_shared<Cell>(nullptr));
    const auto last = std::make_shared<Cell>(first->weight());
    const auto twice = std::make_shared<Cell>(nullptr);
    const auto branch = std::make_shared<Cell>(nullptr);
    first_ = register_child("first", first);
    twice_ = register_child("twice", twice);
    nested_ = register_child("nested", nested);
    branch_ = register_child("branch", branch);
    last_ = register_child("last", last);
    scalar_ = register_parameter("scalar", Shape{}, Initializer::ones(), false);
    empty_ = register_parameter("empty", {0}, Initializer::zeros(), false);
    unused_ = register_parameter("unused", {3}, Initializer::normal(1.0), true);
    assign_names();
  }

  bool take_branch = true;

  static bool is_unit(const Module& module) {
    return dynamic_cast<const Cell*>(&module) != nullptr;
  }

 protected:
  Variable forward(const Variable& x) override {
    Variable y = twice_(first_(x));
    y = twice_(nested_(y));
    if (take_branch) y = branch_(y);
    y = last_(y);
    // The scalar scales every row: [1, 1] times a row of sums.
    const Variable factor = reshape(scalar_->variable(), {1, 1});
    const Variable row = reshape(y, {y.shape().numel() / kWidth * kWidth, 1});
    return reshape(matmul(row, factor), y.shape());
  }

 private:
  Child first_, twice_, nested_, branch_, last_;
  std::shared_ptr<Parameter> scalar_, empty_, unused_;
};

}  // namespace sherd::test
