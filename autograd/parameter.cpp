// SPDX-License-Identifier: Apache-2.0
#include <sherd/autograd/parameter.h>
#include <sherd/autograd/tape.h>
#include <sherd/kernels/dispatch.h>
#include <sherd/kernels/elementwise.h>
#include <sherd/kernels/random.h>

namespace sherd {

void Parameter::set_data(Tensor data) {
  SHERD_CHECK(data.shape() == shape_, "parameter {}: expected shape {}, got {}", name_,
              shape_.to_string(), data.describe());
  data_ = std::move(data);
}

void Parameter::materialize(Context& context, DType dtype) {
  data_ = Tensor::empty(context, shape_, dtype, MemoryCategory::parameters);
  initialize(data_, initializer_, context.seed(), name_);
}

void Parameter::accumulate_grad(const Tensor& grad) {
  const DType dtype = compute_dtype(data_.dtype());
  const auto check = [&](const char* what, const Tensor& x) {
    SHERD_CHECK(x.shape() == shape_ && x.dtype() == dtype, "parameter {}: {} is {}, expected {} {}",
                name_, what, x.describe(), name_of(dtype), shape_.to_string());
  };
  check("its gradient", grad);
  if (grad_.defined()) {
    add_inplace(grad_, grad);
    return;
  }
  if (grad_place_) {
    const Tensor place = grad_place_();
    check("the place for its gradient", place);
    const bool there = place.shared_storage() == grad.shared_storage();
    if (!there) copy(place, grad);
    grad_ = place;
    return;
  }
  // The first contribution becomes the gradient itself, unless somebody else still holds its bytes.
  grad_ = grad.is_sole_owner() ? grad : clone(grad, MemoryCategory::gradients);
  grad_.storage().set_category(MemoryCategory::gradients);
}

Variable Parameter::variable() {
  SHERD_CHECK(data_.defined(),
              "parameter {} holds no data; call Module::initialize or load weights", name_);
  Tape* tape = data_.context().tape();
  if (tape == nullptr || !requires_grad_) return {data_};
  return tape->parameter(*this);
}

void initialize(const Tensor& elements, const Initializer& initializer, std::uint64_t seed,
                const std::string& name, std::int64_t first_index) {
  const RandomStream stream(seed, "init", name);
  switch (initializer.kind) {
    case Initializer::Kind::zeros: fill(elements, 0.0); break;
    case Initializer::Kind::ones: fill(elements, 1.0); break;
    case Initializer::Kind::normal:
      fill_normal(elements, 0.0, initializer.scale, stream, first_index);
      break;
    case Initializer::Kind::truncated_normal:
      fill_truncated_normal(elements, 0.0, initializer.scale, -2.0, 2.0, stream, first_index);
      break;
    case Initializer::Kind::uniform:
      fill_uniform(elements, -initializer.scale, initializer.scale, stream, first_index);
      break;
  }
}

}  // namespace sherd
