// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/attention.h>

#include <sherd/kernels/cpu/attention.h>
#include <sherd/kernels/cuda/attention.h>
#include <sherd/kernels/cuda/attention_cudnn.h>
#include <sherd/kernels/dispatch.h>
#include <sherd/kernels/elementwise.h>

namespace sherd {
namespace {

using arguments::acc_t;
using arguments::AttentionShape;
using arguments::AttentionView;

// Kernels read views whose last dimension is gapless; anything else is copied.
Tensor readable(const Tensor& x) {
  return x.dim(-1) == 1 || x.stride(-1) == 1 ? x : clone(x);
}

template <typename T>
AttentionView<T> view_of(const Tensor& x) {
  return {x.data<std::remove_const_t<T>>(), x.stride(0), x.stride(1), x.stride(2)};
}

AttentionShape check_shapes(const Tensor& query, const Tensor& key, const Tensor& value,
                            double scale) {
  SHERD_CHECK(query.rank() == 4 && key.rank() == 4 && key.shape() == value.shape() &&
                  query.dim(0) == key.dim(0) && query.dim(2) == key.dim(2) &&
                  query.dim(3) == key.dim(3) && query.numel() > 0 && key.numel() > 0,
              "attention: expected query [B, N, H, D] and key, value [B, M, H, D], none empty; got "
              "{}, {}, {}",
              query.describe(), key.describe(), value.describe());
  SHERD_CHECK(query.dtype() == key.dtype() && query.dtype() == value.dtype(),
              "attention: query, key and value must have one type, got {}, {}, {}",
              query.describe(), key.describe(), value.describe());
  return {query.dim(0), query.dim(2), query.dim(1), key.dim(1), query.dim(3), scale};
}

std::int64_t pair_products(const AttentionShape& s) {
  return 2 * s.batch * s.heads * s.queries * s.keys * s.head_dim;  // FLOPs of one of the products
}

template <typename T>
Tensor workspace_for(Context& context, const AttentionShape& shape, bool backward) {
  return workspace(context,
                   context.target() == Device::cuda
                       ? cuda::attention_workspace_bytes<T>(shape, backward)
                       : cpu::attention_workspace_bytes<T>(shape, context.threads(), backward));
}

// Whether cuDNN computes it, where it could.
bool by_cudnn(const Context& context, DType dtype) {
  if (context.attention() != AttentionKernels::cudnn) return false;
  require_attention(context.attention(), context.target());
  SHERD_CHECK(dtype == DType::bf16 || dtype == DType::f16,
              "attention by cuDNN takes bf16 and fp16, got {}; choose --attention own",
              name_of(dtype));
  SHERD_CHECK(!context.is_meta(),
              "attention by cuDNN cannot be planned: its workspace is known on the GPU alone; plan "
              "with --attention own, or run without a plan (no --memory-limit, no --recompute "
              "auto)");
  return true;
}

template <typename T>
void cudnn_forward(Context& context, const AttentionShape& shape, const Tensor& q, const Tensor& k,
                   const Tensor& v, const AttentionOutput& out) {
  if constexpr (sizeof(T) == 2) {
    const auto qs = view_of<const T>(q), ks = view_of<const T>(k), vs = view_of<const T>(v);
    const auto outputs = view_of<T>(out.output);
    const Tensor scratch = workspace(context, cuda::cudnn_attention_forward_workspace_bytes<T>(
                                                  context, shape, qs, ks, vs, outputs));
    cuda::cudnn_attention_forward<T>(context, shape, qs, ks, vs, outputs, out.lse.data<float>(),
                                     workspace_data(scratch));
  }
}

template <typename T>
void cudnn_backward(Context& context, const AttentionShape& shape, const Tensor& grad_output,
                    const Tensor& q, const Tensor& k, const Tensor& v,
                    const AttentionOutput& forward, const Tensor& grad_query,
                    const Tensor& grad_key, const Tensor& grad_value) {
  if constexpr (sizeof(T) == 2) {
    const auto g = view_of<const T>(grad_output), qs = view_of<const T>(q),
               ks = view_of<const T>(k), vs = view_of<const T>(v),
               outputs = view_of<const T>(forward.output);
    const auto grad_q = view_of<T>(grad_query), grad_k = view_of<T>(grad_key),
               grad_v = view_of<T>(grad_value);
    const Tensor scratch =
        workspace(context, cuda::cudnn_attention_backward_workspace_bytes<T>(
                               context, shape, g, qs, ks, vs, outputs, grad_q, grad_k, grad_v));
    cuda::cudnn_attention_backward<T>(context, shape, g, qs, ks, vs, outputs,
                                      forward.lse.data<float>(), grad_q, grad_k, grad_v,
                                      workspace_data(scratch));
  }
}

// Beside its products it moves so many tensors of the query's size.
void record_attention(std::string_view name, const Tensor& query, std::int64_t flops,
                      std::int64_t moved) {
  Schedule* const schedule = query.context().schedule();
  if (schedule == nullptr) return;
  schedule->add({.kind = Work::Kind::kernel,
                 .name = name,
                 .dtype = query.dtype(),
                 .bytes = moved * bytes_of(query),
                 .flops = flops});
}

}  // namespace

void require_attention(AttentionKernels kernels, Device device) {
  if (kernels != AttentionKernels::cudnn) return;
  SHERD_CHECK(device == Device::cuda,
              "attention by cuDNN computes on device cuda, this is {}; choose --attention own",
              name_of(device));
  SHERD_CHECK(cuda::cudnn_attention_built(),
              "attention by cuDNN is not in this build: build with -Dcuda=enabled and "
              "-Dcudnn=enabled, or choose --attention own");
}

AttentionOutput attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                  double scale) {
  const AttentionShape shape = check_shapes(query, key, value, scale);
  const Tensor q = readable(query), k = readable(key), v = readable(value);
  Context& context = q.context();
  const AttentionOutput out{
      Tensor::empty(context, q.shape(), q.dtype()),
      Tensor::empty(context, {shape.batch, shape.heads, shape.queries}, compute_dtype(q.dtype()))};
  context.work().attention_flops += 2 * pair_products(shape);
  record_attention("attention_forward", q, 2 * pair_products(shape), 4);
  dispatch_floating(q.dtype(), "attention", [&](auto zero) {
    using T = decltype(zero);
    if (by_cudnn(context, q.dtype())) return cudnn_forward<T>(context, shape, q, k, v, out);
    const Tensor scratch = workspace_for<T>(context, shape, false);
    if (context.is_meta()) return;
    const auto run = [&](auto forward, auto... last) {
      forward(shape, view_of<const T>(q), view_of<const T>(k), view_of<const T>(v),
              view_of<T>(out.output), out.lse.data<acc_t<T>>(), workspace_data(scratch), last...);
    };
    if (q.device() == Device::cuda) {
      run([&](const auto&... x) { cuda::attention_forward<T>(context.compute_stream(), x...); });
    } else {
      run(cpu::attention_forward<T>, context.threads());
    }
  });
  return out;
}

void attention_backward(const Tensor& grad_output, const Tensor& query, const Tensor& key,
                        const Tensor& value, const AttentionOutput& forward, double scale,
                        const Tensor& grad_query, const Tensor& grad_key,
                        const Tensor& grad_value) {
  const AttentionShape shape = check_shapes(query, key, value, scale);
  check_same("attention_backward", grad_output, forward.output);
  check_statistic("attention_backward", forward.lse, {shape.batch, shape.heads, shape.queries},
                  query.dtype());
  const std::pair<const Tensor*, const Tensor*> outputs[] = {
      {&grad_query, &query}, {&grad_key, &key}, {&grad_value, &value}};
  for (const auto& [grad, input] : outputs) {
    check_same("attention_backward", *grad, *input);
    SHERD_CHECK(grad->dim(-1) == 1 || grad->stride(-1) == 1,
                "attention_backward: the last dimension of a gradient must be contiguous");
    for (const Tensor* read : {&grad_output, &query, &key, &value, &forward.output, &forward.lse}) {
      SHERD_CHECK(&grad->storage() != &read->storage(),
                  "attention_backward: gradient {} lies in the memory of an input, which is read "
                  "after parts of gradients are written; give it memory of its own",
                  grad->describe());
    }
    grad->storage().mark_modified();
  }
  const Tensor g = readable(grad_output), q = readable(query), k = readable(key),
               v = readable(value);
  Context& context = q.context();
  context.work().attention_flops += 5 * pair_products(shape);
  record_attention("attention_backward", q, 5 * pair_products(shape), 8);
  dispatch_floating(q.dtype(), "attention_backward", [&](auto zero) {
    using T = decltype(zero);
    if (by_cudnn(context, q.dtype())) {
      return cudnn_backward<T>(context, shape, g, q, k, v, forward, grad_query, grad_key,
                               grad_value);
    }
    const Tensor scratch = workspace_for<T>(context, shape, true);
    if (context.is_meta()) return;
    const auto run = [&](auto backward, auto... last) {
      backward(shape, view_of<const T>(g), view_of<const T>(q), view_of<const T>(k),
               view_of<const T>(v), view_of<const T>(forward.output),
               static_cast<const acc_t<T>*>(forward.lse.data<acc_t<T>>()), view_of<T>(grad_query),
               view_of<T>(grad_key), view_of<T>(grad_value), workspace_data(scratch), last...);
    };
    if (q.device() == Device::cuda) {
      run([&](const auto&... x) { cuda::attention_backward<T>(context.compute_stream(), x...); });
    } else {
      run(cpu::attention_backward<T>, context.threads());
    }
  });
}

}  // namespace sherd
