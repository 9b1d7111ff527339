// SPDX-License-Identifier: Apache-2.0
#include <sherd/kernels/cuda/elementwise.h>
#include <sherd/kernels/cuda/map.h>
#include <sherd/kernels/cuda/rounding.h>

namespace sherd::cuda {

template <typename From, typename To>
void cast(Stream& stream, std::int64_t n, const From* in, To* out) {
  map(stream, n, Convert<To>{}, out, in);
}

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

}  // namespace sherd::cuda
