// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes started by an MPI launcher:
//
//   mpiexec -n 8 ./program        // of the MPI that Sherd was built with
//
// MPI moves bytes; what is summed in which order is ours, so the results have the same bits as with
// threads. comm/README.md says how a program ends when one of its ranks fails.
#pragma once

#include <sherd/comm/communicator.h>

#include <optional>

namespace sherd {

SHERD_API bool mpi_built();
SHERD_API bool mpi_started();  // in this process, by Sherd or by the program

// Who started this process as one of several ranks, by what it left in the environment.
struct Launcher {
  std::string name;  // "mpiexec", "srun", ...
  int rank = 0, size = 1;
};
SHERD_API std::optional<Launcher> detect_launcher();

enum class MpiTransport : std::uint8_t {
  automatic,  // shared where all ranks see each other's memory, else messages
  shared,     // memory that all ranks of a machine see
  messages,   // MPI messages, anywhere
};
SHERD_API std::string_view name_of(MpiTransport transport);

// A group of all ranks the launcher started; they all call this together. The first call
// initialises MPI, unless the program has, and then MPI is finalised when the process exits.
SHERD_API std::unique_ptr<Communicator> make_mpi_communicator(
    MpiTransport transport = MpiTransport::automatic);

// What automatic takes here. All ranks call this together when it is the first use of MPI.
SHERD_API MpiTransport mpi_automatic_transport();

}  // namespace sherd
