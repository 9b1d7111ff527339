// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/mpi.h>
#include <sherd/runtime/error.h>

#include <charconv>
#include <cstdlib>

namespace sherd {
namespace {

std::optional<int> number_in(const char* variable) {
  const char* text = std::getenv(variable);
  if (text == nullptr) return {};
  const std::string_view view(text);
  int value = 0;
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), value);
  if (error != std::errc() || end != view.data() + view.size()) return {};
  return value;
}

std::optional<Launcher> launcher_by(const char* name, const char* rank, const char* size) {
  const std::optional<int> r = number_in(rank), n = number_in(size);
  if (!r || !n || *r < 0 || *r >= *n) return {};
  return Launcher{name, *r, *n};
}

}  // namespace

std::optional<Launcher> detect_launcher() {
  // Open MPI first: it may set the variables of others beside its own.
  if (auto found = launcher_by("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
    return found;
  if (auto found = launcher_by("mpiexec", "PMI_RANK", "PMI_SIZE")) return found;
  // A batch script has these too, but is no step of its job.
  if (std::getenv("SLURM_STEP_ID") != nullptr)
    return launcher_by("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS");
  return {};
}

std::string_view name_of(MpiTransport transport) {
  switch (transport) {
    case MpiTransport::automatic: return "automatic";
    case MpiTransport::shared: return "shared";
    case MpiTransport::messages: return "messages";
  }
  fail("name_of: unknown transport {}", static_cast<int>(transport));
}

}  // namespace sherd
