// SPDX-License-Identifier: Apache-2.0
// In builds without CUDA: kernels that no tensor can reach, as no context of device cuda is made.
#include <sherd/kernels/cuda/attention.h>
#include <sherd/kernels/cuda/column_sum.h>
#include <sherd/kernels/cuda/cross_entropy.h>
#include <sherd/kernels/cuda/dropout.h>
#include <sherd/kernels/cuda/elementwise.h>
#include <sherd/kernels/cuda/gelu.h>
#include <sherd/kernels/cuda/layer_norm.h>
#include <sherd/kernels/cuda/optimizers.h>
#include <sherd/kernels/cuda/patch_embed.h>
#include <sherd/kernels/cuda/patchify.h>
#include <sherd/kernels/cuda/product.h>
#include <sherd/kernels/cuda/reduce.h>
#include <sherd/kernels/cuda/strided_copy.h>
#include <sherd/kernels/cuda/tokens.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/philox.h>

namespace sherd::cuda {
namespace {

[[noreturn]] void fail_unavailable() {
  fail("device cuda: this build has no CUDA kernels; build with -Dcuda=enabled or -Dcuda=emulate");
}

}  // namespace

// ---- attention

template <typename T>
void attention_forward(Stream&, const AttentionShape&, AttentionView<const T>,
                       AttentionView<const T>, AttentionView<const T>, AttentionView<T>, acc_t<T>*,
                       void*) {
  fail_unavailable();
}
template <typename T>
void attention_backward(Stream&, const AttentionShape&, AttentionView<const T>,
                        AttentionView<const T>, AttentionView<const T>, AttentionView<const T>,
                        AttentionView<const T>, const acc_t<T>*, AttentionView<T>, AttentionView<T>,
                        AttentionView<T>, void*) {
  fail_unavailable();
}

#define SHERD_INSTANTIATE(T)                                                                   \
  template void attention_forward<T>(Stream&, const AttentionShape&, AttentionView<const T>,   \
                                     AttentionView<const T>, AttentionView<const T>,           \
                                     AttentionView<T>, acc_t<T>*, void*);                      \
  template void attention_backward<T>(                                                         \
      Stream&, const AttentionShape&, AttentionView<const T>, AttentionView<const T>,          \
      AttentionView<const T>, AttentionView<const T>, AttentionView<const T>, const acc_t<T>*, \
      AttentionView<T>, AttentionView<T>, AttentionView<T>, void*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

// ---- elementwise
template <typename T>
void fill(Stream&, std::int64_t, acc_t<T>, T*) {
  fail_unavailable();
}
template <typename T>
void add(Stream&, std::int64_t, const T*, const T*, T*) {
  fail_unavailable();
}
template <typename T>
void add_inplace(Stream&, std::int64_t, const T*, T*) {
  fail_unavailable();
}
template <typename T>
void accumulate(Stream&, std::int64_t, const T*, acc_t<T>*) {
  fail_unavailable();
}
template <typename T>
void scale(Stream&, std::int64_t, const T*, acc_t<T>, T*) {
  fail_unavailable();
}
template <typename T>
void relu_forward(Stream&, std::int64_t, const T*, T*) {
  fail_unavailable();
}
template <typename T>
void relu_backward(Stream&, std::int64_t, const T*, const T*, T*) {
  fail_unavailable();
}
template <typename T>
void scale_rows(Stream&, std::int64_t, std::int64_t, const T*, const acc_t<T>*, T*) {
  fail_unavailable();
}
template <typename T>
void add_scaled_rows(Stream&, std::int64_t, std::int64_t, const T*, const T*, const acc_t<T>*, T*) {
  fail_unavailable();
}
template <typename From, typename To>
void cast(Stream&, std::int64_t, const From*, To*) {
  fail_unavailable();
}
#define SHERD_INSTANTIATE(T)                                                                       \
  template void fill<T>(Stream&, std::int64_t, acc_t<T>, T*);                                      \
  template void add<T>(Stream&, std::int64_t, const T*, const T*, T*);                             \
  template void add_inplace<T>(Stream&, std::int64_t, const T*, T*);                               \
  template void accumulate<T>(Stream&, std::int64_t, const T*, acc_t<T>*);                         \
  template void scale<T>(Stream&, std::int64_t, const T*, acc_t<T>, T*);                           \
  template void relu_forward<T>(Stream&, std::int64_t, const T*, T*);                              \
  template void relu_backward<T>(Stream&, std::int64_t, const T*, const T*, T*);                   \
  template void scale_rows<T>(Stream&, std::int64_t, std::int64_t, const T*, const acc_t<T>*, T*); \
  template void add_scaled_rows<T>(Stream&, std::int64_t, std::int64_t, const T*, const T*,        \
                                   const acc_t<T>*, T*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE
#define SHERD_INSTANTIATE(From)                                                  \
  template void cast<From, double>(Stream&, std::int64_t, const From*, double*); \
  template void cast<From, float>(Stream&, std::int64_t, const From*, float*);   \
  template void cast<From, bf16>(Stream&, std::int64_t, const From*, bf16*);     \
  template void cast<From, f16>(Stream&, std::int64_t, const From*, f16*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
SHERD_INSTANTIATE(std::uint8_t)
#undef SHERD_INSTANTIATE

// ---- permutations
void strided_copy(Stream&, const StridedView&, std::size_t, const void*, void*, std::int64_t) {
  fail_unavailable();
}
void patchify(Stream&, const PatchShape&, std::size_t, const void*, void*) {
  fail_unavailable();
}
void unpatchify(Stream&, const PatchShape&, std::size_t, const void*, void*) {
  fail_unavailable();
}

// ---- GELU and dropout
template <typename T>
void gelu_forward(Stream&, std::int64_t, GeluForm, const T*, T*) {
  fail_unavailable();
}
template <typename T>
void gelu_backward(Stream&, std::int64_t, GeluForm, const T*, const T*, T*) {
  fail_unavailable();
}
template <typename T>
void gelu_backward_sums(Stream&, const GeluBackwardSums<T>&) {
  fail_unavailable();
}
template <typename T>
void dropout(Stream&, std::int64_t, const T*, T*, double, const RandomStream&, std::uint64_t) {
  fail_unavailable();
}
#define SHERD_INSTANTIATE(T)                                                                 \
  template void gelu_forward<T>(Stream&, std::int64_t, GeluForm, const T*, T*);              \
  template void gelu_backward<T>(Stream&, std::int64_t, GeluForm, const T*, const T*, T*);   \
  template void gelu_backward_sums<T>(Stream&, const GeluBackwardSums<T>&);                  \
  template void dropout<T>(Stream&, std::int64_t, const T*, T*, double, const RandomStream&, \
                           std::uint64_t);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

// ---- patch embedding, tokens
template <typename T>
void patch_embed_forward(Stream&, const PatchEmbedForward<T>&) {
  fail_unavailable();
}
template <typename T>
void patch_embed_backward_weight(Stream&, const PatchEmbedBackwardWeight<T>&) {
  fail_unavailable();
}
template <typename T>
void assemble_tokens(Stream&, const AssembleTokens<T>&) {
  fail_unavailable();
}
template <typename T>
void assemble_tokens_backward(Stream&, const AssembleTokensBackward<T>&) {
  fail_unavailable();
}
template <typename T>
void mean_tokens(Stream&, const TokenShape&, std::int64_t, const T*, T*) {
  fail_unavailable();
}
template <typename T>
void mean_tokens_backward(Stream&, const TokenShape&, std::int64_t, const T*, T*) {
  fail_unavailable();
}
template <typename T>
void select_token(Stream&, const TokenShape&, std::int64_t, const T*, T*) {
  fail_unavailable();
}
template <typename T>
void select_token_backward(Stream&, const TokenShape&, std::int64_t, const T*, T*) {
  fail_unavailable();
}
#define SHERD_INSTANTIATE(T)                                                                     \
  template void patch_embed_forward<T>(Stream&, const PatchEmbedForward<T>&);                    \
  template void patch_embed_backward_weight<T>(Stream&, const PatchEmbedBackwardWeight<T>&);     \
  template void assemble_tokens<T>(Stream&, const AssembleTokens<T>&);                           \
  template void assemble_tokens_backward<T>(Stream&, const AssembleTokensBackward<T>&);          \
  template void mean_tokens<T>(Stream&, const TokenShape&, std::int64_t, const T*, T*);          \
  template void mean_tokens_backward<T>(Stream&, const TokenShape&, std::int64_t, const T*, T*); \
  template void select_token<T>(Stream&, const TokenShape&, std::int64_t, const T*, T*);         \
  template void select_token_backward<T>(Stream&, const TokenShape&, std::int64_t, const T*, T*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

// ---- optimizers
template <typename T>
void adamw(Stream&, std::int64_t, const AdamWArgs<T>&) {
  fail_unavailable();
}
template <typename T>
void sgd(Stream&, std::int64_t, const SgdArgs<T>&) {
  fail_unavailable();
}
template void adamw<double>(Stream&, std::int64_t, const AdamWArgs<double>&);
template void adamw<float>(Stream&, std::int64_t, const AdamWArgs<float>&);
template void sgd<double>(Stream&, std::int64_t, const SgdArgs<double>&);
template void sgd<float>(Stream&, std::int64_t, const SgdArgs<float>&);

// ---- layer normalisation, column sums
template <typename T>
void layer_norm_forward(Stream&, const LayerNormForward<T>&) {
  fail_unavailable();
}
template <typename T>
void layer_norm_backward(Stream&, const LayerNormBackward<T>&) {
  fail_unavailable();
}
template <typename T>
void column_sum(Stream&, std::int64_t, std::int64_t, const T*, acc_t<T>*, acc_t<T>*) {
  fail_unavailable();
}

// ---- cross-entropy
template <typename T>
void cross_entropy_forward(Stream&, const CrossEntropy<T>&, acc_t<T>*, acc_t<T>*) {
  fail_unavailable();
}
template <typename T>
void cross_entropy_backward(Stream&, const CrossEntropy<T>&, const acc_t<T>*, const acc_t<T>*,
                            acc_t<T>, const acc_t<T>*, T*) {
  fail_unavailable();
}
template <typename T>
void argmax_rows(Stream&, std::int64_t, std::int64_t, const T*, std::int64_t*) {
  fail_unavailable();
}
void first_bad_label(Stream&, std::int64_t, std::int64_t, const std::int64_t*, std::int64_t*) {
  fail_unavailable();
}
void count_equal(Stream&, std::int64_t, const std::int64_t*, const std::int64_t*, std::int64_t*) {
  fail_unavailable();
}

// ---- reductions
template <typename T>
void sum(Stream&, std::int64_t, const T*, acc_t<T>, acc_t<T>*, acc_t<T>*) {
  fail_unavailable();
}
template <typename T>
void first_non_finite(Stream&, std::int64_t, const T*, std::int64_t*) {
  fail_unavailable();
}
template <typename T>
void add_square_words(Stream&, std::int64_t, const T*, std::int64_t*) {
  fail_unavailable();
}

#define SHERD_INSTANTIATE(T)                                                                     \
  template void layer_norm_forward<T>(Stream&, const LayerNormForward<T>&);                      \
  template void layer_norm_backward<T>(Stream&, const LayerNormBackward<T>&);                    \
  template void column_sum<T>(Stream&, std::int64_t, std::int64_t, const T*, acc_t<T>*,          \
                              acc_t<T>*);                                                        \
  template void cross_entropy_forward<T>(Stream&, const CrossEntropy<T>&, acc_t<T>*, acc_t<T>*); \
  template void cross_entropy_backward<T>(Stream&, const CrossEntropy<T>&, const acc_t<T>*,      \
                                          const acc_t<T>*, acc_t<T>, const acc_t<T>*, T*);       \
  template void argmax_rows<T>(Stream&, std::int64_t, std::int64_t, const T*, std::int64_t*);    \
  template void sum<T>(Stream&, std::int64_t, const T*, acc_t<T>, acc_t<T>*, acc_t<T>*);         \
  template void first_non_finite<T>(Stream&, std::int64_t, const T*, std::int64_t*);             \
  template void add_square_words<T>(Stream&, std::int64_t, const T*, std::int64_t*);
SHERD_INSTANTIATE(double)
SHERD_INSTANTIATE(float)
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

// ---- products
void run_product(Context&, const Product&, const void*, const void*, const void*, void*, void*) {
  fail_unavailable();
}

}  // namespace sherd::cuda
