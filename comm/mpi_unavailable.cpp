// SPDX-License-Identifier: Apache-2.0
// In builds without MPI.
#include <sherd/comm/mpi.h>
#include <sherd/runtime/error.h>

namespace sherd {

bool mpi_built() {
  return false;
}

bool mpi_started() {
  return false;
}

std::unique_ptr<Communicator> make_mpi_communicator(MpiTransport) {
  const std::optional<Launcher> launcher = detect_launcher();
  fail(
      "{}this Sherd was built without MPI, so its processes cannot be ranks of one run: install "
      "MPICH (Debian: mpich libmpich-dev) and build again with -Dmpi=enabled, or use the ranks of "
      "one process",
      launcher ? fmt::format("{} started {} ranks, but ", launcher->name, launcher->size)
               : std::string());
}

MpiTransport mpi_automatic_transport() {
  return MpiTransport::automatic;
}

}  // namespace sherd
