// SPDX-License-Identifier: Apache-2.0
// In builds without CUDA: kernels that no tensor can reach, as no context of device cuda is made.
#include <sherd/kernels/cuda/attention.h>
#include <sherd/runtime/error.h>

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

}  // namespace sherd::cuda
