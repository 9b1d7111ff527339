// SPDX-License-Identifier: Apache-2.0
// Products by cuBLASLt. Its matrices are column-major: a row-major matrix is its own transpose
// there, so out = op(a) op(b) is asked for as outᵀ = op(b)ᵀ op(a)ᵀ, and nothing is copied.
#include <cublasLt.h>
#include <sherd/kernels/cuda/elementwise.h>
#include <sherd/kernels/cuda/gelu.h>
#include <sherd/kernels/cuda/product.h>
#include <sherd/runtime/cuda/check.h>

#include <array>
#include <map>
#include <memory>

namespace sherd::cuda {
namespace {

void check(cublasStatus_t status, const char* call, const Product& p) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fail("cuBLASLt: {} ({}) in {} for a product {} x {} x {} of {} to {}",
       cublasLtGetStatusString(status), static_cast<int>(status), call, p.m, p.n, p.k,
       name_of(p.dtype), name_of(p.out_dtype));
}
#define SHERD_CUBLASLT_CHECK(product, call) check((call), #call, product)

template <typename Handle, cublasStatus_t (*destroy)(Handle)>
struct Owned {
  Handle handle = nullptr;
  Owned() = default;
  ~Owned() {
    if (handle != nullptr) destroy(handle);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
};
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;

cudaDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f64: return CUDA_R_64F;
    case DType::f32: return CUDA_R_32F;
    case DType::f16: return CUDA_R_16F;
    case DType::bf16: return CUDA_R_16BF;
    default: fail("a product of {}", name_of(dtype));
  }
}

// What comes after the product: the exact GELU has no epilogue, and fp64 has none but the bias.
Activation activation_after(const Product& p) {
  const bool apart = p.activation == Activation::gelu_erf || p.dtype == DType::f64;
  return apart ? p.activation : Activation::none;
}

// What is applied inside it.
cublasLtEpilogue_t epilogue_of(const Product& p) {
  switch (activation_after(p) == Activation::none ? p.activation : Activation::none) {
    case Activation::relu: return p.bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    case Activation::gelu_tanh:
      return p.bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    case Activation::gelu_erf:
    case Activation::none: break;
  }
  return p.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

// A product as cuBLASLt is told of it, with the algorithm that it has chosen.
struct Plan {
  Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy> operation;
  Layout left, right, out;
  cublasLtMatmulAlgo_t algorithm;
};

// One of a context: a handle, and the plans of the products that its model is made of.
struct Products {
  Owned<cublasLtHandle_t, cublasLtDestroy> handle;
  std::map<std::array<std::int64_t, 4>, std::unique_ptr<Plan>> plans;

  static std::array<std::int64_t, 4> key_of(const Product& p, std::uint32_t alignment) {
    const std::int64_t flags =
        static_cast<std::int64_t>(p.transpose_a) | static_cast<std::int64_t>(p.transpose_b) << 1 |
        static_cast<std::int64_t>(p.bias) << 2 | static_cast<std::int64_t>(p.activation) << 8 |
        static_cast<std::int64_t>(p.dtype) << 16 | static_cast<std::int64_t>(p.out_dtype) << 24 |
        static_cast<std::int64_t>(alignment) << 32;
    return {p.m, p.n, p.k, flags};
  }

  // alignment: in bytes, of all addresses.
  Plan& plan(const Product& p, std::uint32_t alignment);
};

void make_layout(const Product& p, Layout& layout, DType dtype, std::int64_t rows,
                 std::int64_t columns) {
  SHERD_CUBLASLT_CHECK(p, cublasLtMatrixLayoutCreate(&layout.handle, type_of(dtype),
                                                     static_cast<std::uint64_t>(rows),
                                                     static_cast<std::uint64_t>(columns), rows));
}

template <typename T>
void set(const Product& p, cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
         const T& value) {
  SHERD_CUBLASLT_CHECK(p,
                       cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value));
}

Plan& Products::plan(const Product& p, std::uint32_t alignment) {
  if (handle.handle == nullptr) SHERD_CUBLASLT_CHECK(p, cublasLtCreate(&handle.handle));
  std::unique_ptr<Plan>& slot = plans[key_of(p, alignment)];
  if (slot) return *slot;
  auto made = std::make_unique<Plan>();
  const bool wide = p.dtype == DType::f64;
  // Pedantic types would forbid the tensor cores; this one forbids TF32.
  SHERD_CUBLASLT_CHECK(p, cublasLtMatmulDescCreate(&made->operation.handle,
                                                   wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                                   wide ? CUDA_R_64F : CUDA_R_32F));
  const auto transposed = [](bool yes) { return yes ? CUBLAS_OP_T : CUBLAS_OP_N; };
  const cublasLtMatmulDesc_t operation = made->operation.handle;
  set(p, operation, CUBLASLT_MATMUL_DESC_TRANSA, transposed(p.transpose_b));
  set(p, operation, CUBLASLT_MATMUL_DESC_TRANSB, transposed(p.transpose_a));
  set(p, operation, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(p));
  if (p.bias) set(p, operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(p.dtype));
  // b is [k, n] or, transposed, [n, k], by rows; a likewise.
  make_layout(p, made->left, p.dtype, p.transpose_b ? p.k : p.n, p.transpose_b ? p.n : p.k);
  make_layout(p, made->right, p.dtype, p.transpose_a ? p.m : p.k, p.transpose_a ? p.k : p.m);
  make_layout(p, made->out, p.out_dtype, p.n, p.m);

  Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy> preference;
  SHERD_CUBLASLT_CHECK(p, cublasLtMatmulPreferenceCreate(&preference.handle));
  const std::size_t workspace = product_workspace_bytes(p);
  SHERD_CUBLASLT_CHECK(p, cublasLtMatmulPreferenceSetAttribute(
                              preference.handle, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                              &workspace, sizeof workspace));
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    SHERD_CUBLASLT_CHECK(p, cublasLtMatmulPreferenceSetAttribute(preference.handle, attribute,
                                                                 &alignment, sizeof alignment));
  }
  cublasLtMatmulHeuristicResult_t found;
  int count = 0;
  SHERD_CUBLASLT_CHECK(
      p, cublasLtMatmulAlgoGetHeuristic(handle.handle, operation, made->left.handle,
                                        made->right.handle, made->out.handle, made->out.handle,
                                        preference.handle, 1, &found, &count));
  SHERD_CHECK(count == 1, "cuBLASLt has no algorithm for a product {} x {} x {} of {} to {}", p.m,
              p.n, p.k, name_of(p.dtype), name_of(p.out_dtype));
  made->algorithm = found.algo;
  slot = std::move(made);
  return *slot;
}

}  // namespace

void run_product(Context& context, const Product& p, const void* a, const void* b, const void* bias,
                 void* out, void* workspace) {
  const auto stream = static_cast<cudaStream_t>(context.compute_stream().native());
  Products& products = context.attachment<Products>();
  std::uintptr_t addresses = 16;  // more is of no use
  for (const void* address : {a, b, bias, static_cast<const void*>(out)})
    addresses |= reinterpret_cast<std::uintptr_t>(address);
  Plan& plan = products.plan(p, static_cast<std::uint32_t>(addresses & -addresses));
  if (p.bias) set(p, plan.operation.handle, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  const double one64 = 1.0, zero64 = 0.0;
  const float one32 = 1.f, zero32 = 0.f;
  const bool wide = p.dtype == DType::f64;
  const void* const one = wide ? static_cast<const void*>(&one64) : &one32;
  const void* const zero = wide ? static_cast<const void*>(&zero64) : &zero32;
  SHERD_CUBLASLT_CHECK(
      p, cublasLtMatmul(products.handle.handle, plan.operation.handle, one, b, plan.left.handle, a,
                        plan.right.handle, zero, out, plan.out.handle, out, plan.out.handle,
                        &plan.algorithm, workspace, product_workspace_bytes(p), stream));
  const Activation after = activation_after(p);
  if (after == Activation::none) return;
  const auto apply = [&]<typename T>(T* values) {
    Stream& on = context.compute_stream();
    if (after == Activation::relu) return relu_forward<T>(on, p.m * p.n, values, values);
    const GeluForm form = after == Activation::gelu_erf ? GeluForm::exact : GeluForm::tanh;
    gelu_forward<T>(on, p.m * p.n, form, values, values);
  };
  switch (p.out_dtype) {
    case DType::f64: return apply(static_cast<double*>(out));
    case DType::f16: return apply(static_cast<f16*>(out));
    case DType::bf16: return apply(static_cast<bf16*>(out));
    default: return apply(static_cast<float*>(out));
  }
}

}  // namespace sherd::cuda
