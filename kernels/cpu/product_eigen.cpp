// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cpu/elementwise.h>
#include <sherd/kernels/cpu/gelu.h>
#include <sherd/kernels/cpu/product.h>

#include <sherd/runtime/error.h>

#include <Eigen/Core>

namespace sherd::cpu {
namespace {

template <typename T>
using RowMajor = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

template <typename T>
void run(Context& context, const Product& p, const T* a, const T* b, const T* bias, T* out) {
  using ConstMap = Eigen::Map<const RowMajor<T>>;
  const ConstMap left(a, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k);
  const ConstMap right(b, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n);
  Eigen::Map<RowMajor<T>> result(out, p.m, p.n);
  if (p.transpose_a && p.transpose_b) {
    result.noalias() = left.transpose() * right.transpose();
  } else if (p.transpose_a) {
    result.noalias() = left.transpose() * right;
  } else if (p.transpose_b) {
    result.noalias() = left * right.transpose();
  } else {
    result.noalias() = left * right;
  }
  if (bias != nullptr) {
    result.rowwise() += Eigen::Map<const Eigen::Matrix<T, 1, Eigen::Dynamic>>(bias, p.n);
  }
  const int threads = context.threads();
  switch (p.activation) {
    case Activation::none: break;
    case Activation::relu: relu_forward(threads, p.m * p.n, out, out); break;
    case Activation::gelu_erf: gelu_forward(threads, p.m * p.n, GeluForm::exact, out, out); break;
    case Activation::gelu_tanh: gelu_forward(threads, p.m * p.n, GeluForm::tanh, out, out); break;
  }
}

}  // namespace

void run_product_eigen(Context& context, const Product& product, const void* a, const void* b,
                       const void* bias, void* out) {
  if (product.dtype == DType::f64) {
    run(context, product, static_cast<const double*>(a), static_cast<const double*>(b),
        static_cast<const double*>(bias), static_cast<double*>(out));
  } else {
    SHERD_INTERNAL_CHECK(product.dtype == DType::f32, "Eigen product of {}",
                         name_of(product.dtype));
    run(context, product, static_cast<const float*>(a), static_cast<const float*>(b),
        static_cast<const float*>(bias), static_cast<float*>(out));
  }
}

}  // namespace sherd::cpu
