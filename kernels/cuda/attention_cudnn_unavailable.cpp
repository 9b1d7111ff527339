// SPDX-License-Identifier: Apache-2.0
// Builds without cuDNN, the emulated one among them.
#include <sherd/kernels/cuda/attention_cudnn.h>

namespace sherd::cuda {
namespace {

constexpr const char* kWhy =
    "is not in this build: build with -Dcuda=enabled and -Dcudnn=enabled, or choose --attention "
    "own";

[[noreturn]] void refuse() {
  fail("attention by cuDNN {}", kWhy);
}

}  // namespace

bool cudnn_attention_built() {
  return false;
}

std::string cudnn_version() {
  return "none";
}

std::string cudnn_attention_refuses(Context&, const AttentionShape&, DType) {
  return kWhy;
}

template <typename T>
std::size_t cudnn_attention_forward_workspace_bytes(Context&, const AttentionShape&,
                                                    AttentionView<const T>, AttentionView<const T>,
                                                    AttentionView<const T>, AttentionView<T>) {
  refuse();
}

template <typename T>
std::size_t cudnn_attention_backward_workspace_bytes(Context&, const AttentionShape&,
                                                     AttentionView<const T>, AttentionView<const T>,
                                                     AttentionView<const T>, AttentionView<const T>,
                                                     AttentionView<const T>, AttentionView<T>,
                                                     AttentionView<T>, AttentionView<T>) {
  refuse();
}

template <typename T>
void cudnn_attention_forward(Context&, const AttentionShape&, AttentionView<const T>,
                             AttentionView<const T>, AttentionView<const T>, AttentionView<T>,
                             float*, void*) {
  refuse();
}

template <typename T>
void cudnn_attention_backward(Context&, const AttentionShape&, AttentionView<const T>,
                              AttentionView<const T>, AttentionView<const T>,
                              AttentionView<const T>, AttentionView<const T>, const float*,
                              AttentionView<T>, AttentionView<T>, AttentionView<T>, void*) {
  refuse();
}

#define SHERD_INSTANTIATE(T)                                                                    \
  template std::size_t cudnn_attention_forward_workspace_bytes<T>(                              \
      Context&, const AttentionShape&, AttentionView<const T>, AttentionView<const T>,          \
      AttentionView<const T>, AttentionView<T>);                                                \
  template std::size_t cudnn_attention_backward_workspace_bytes<T>(                             \
      Context&, const AttentionShape&, AttentionView<const T>, AttentionView<const T>,          \
      AttentionView<const T>, AttentionView<const T>, AttentionView<const T>, AttentionView<T>, \
      AttentionView<T>, AttentionView<T>);                                                      \
  template void cudnn_attention_forward<T>(                                                     \
      Context&, const AttentionShape&, AttentionView<const T>, AttentionView<const T>,          \
      AttentionView<const T>, AttentionView<T>, float*, void*);                                 \
  template void cudnn_attention_backward<T>(                                                    \
      Context&, const AttentionShape&, AttentionView<const T>, AttentionView<const T>,          \
      AttentionView<const T>, AttentionView<const T>, AttentionView<const T>, const float*,     \
      AttentionView<T>, AttentionView<T>, AttentionView<T>, void*);
SHERD_INSTANTIATE(bf16)
SHERD_INSTANTIATE(f16)
#undef SHERD_INSTANTIATE

}  // namespace sherd::cuda
