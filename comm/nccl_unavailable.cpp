// SPDX-License-Identifier: Apache-2.0
// In builds without NCCL.
#include <sherd/comm/nccl_communicator.h>
#include <sherd/runtime/error.h>

namespace sherd {

bool nccl_built() {
  return false;
}

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, int, Stream&,
                                                     const NcclOptions&) {
  fail(
      "this Sherd was built without NCCL, which {} ranks on GPUs need: install NCCL (Debian and "
      "Ubuntu: libnccl2 libnccl-dev, of NVIDIA's repository) and build again with -Dcuda=enabled "
      "-Dnccl=enabled, or use one rank",
      host.size());
}

}  // namespace sherd
