// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/communicator.h>
#include <sherd/runtime/error.h>
#include <xxhash.h>

#include <numeric>

namespace sherd {

std::string_view name_of(Collective collective) {
  switch (collective) {
    case Collective::all_reduce: return "all_reduce";
    case Collective::reduce_scatter: return "reduce_scatter";
    case Collective::all_gather: return "all_gather";
    case Collective::broadcast: return "broadcast";
    case Collective::all_to_all: return "all_to_all";
    case Collective::barrier: return "barrier";
  }
  fail("name_of: unknown collective {}", static_cast<int>(collective));
}

std::int64_t CommunicationCounters::total_bytes() const {
  return std::accumulate(std::begin(bytes), std::end(bytes), std::int64_t{0});
}

Communicator::Communicator(int rank, int size) : rank_(rank), size_(size) {
  SHERD_CHECK(size >= 1 && rank >= 0 && rank < size, "communicator: rank {} of {} ranks", rank,
              size);
}

Communicator::~Communicator() = default;

std::string Communicator::Call::describe() const {
  if (collective == Collective::barrier) return fmt::format("barrier for '{}'", label);
  static constexpr const char* kOps[] = {"sum", "average", "max"};
  const bool reduces =
      collective == Collective::all_reduce || collective == Collective::reduce_scatter;
  const std::string detail = reduces ? fmt::format(" ({})", kOps[static_cast<int>(op)])
                             : collective == Collective::broadcast
                                 ? fmt::format(" from rank {}", root)
                                 : std::string();
  return fmt::format("{}{} of {} {} for '{}'", name_of(collective), detail, count, name_of(dtype),
                     label);
}

std::uint64_t Communicator::Call::fingerprint(std::int64_t sequence) const {
  const std::int64_t numbers[] = {sequence,
                                  static_cast<std::int64_t>(collective),
                                  static_cast<std::int64_t>(dtype),
                                  static_cast<std::int64_t>(op),
                                  count,
                                  root};
  return XXH3_64bits_withSeed(label.data(), label.size(), XXH3_64bits(numbers, sizeof numbers));
}

// Counts the call and runs it.
void Communicator::start(const Call& call, const void* input, void* output) {
  SHERD_CHECK(call.count >= 0, "{}: a negative count", call.describe());
  const auto index = static_cast<std::size_t>(call.collective);
  const auto piece = call.count * static_cast<std::int64_t>(call.element_bytes());
  const std::int64_t others = size_ - 1;
  std::int64_t sent = 0;
  switch (call.collective) {
    case Collective::all_reduce: sent = 2 * piece * others / size_; break;
    case Collective::reduce_scatter:
    case Collective::all_gather:
    case Collective::all_to_all: sent = piece * others; break;
    case Collective::broadcast: sent = rank_ == call.root ? piece * others : 0; break;
    case Collective::barrier: break;
  }
  ++counters_.calls[index];
  counters_.bytes[index] += sent;
  run(call, input, output);
}

void Communicator::all_reduce(void* data, std::int64_t count, DType dtype, ReduceOp op,
                              std::string_view label) {
  start({Collective::all_reduce, dtype, op, count, 0, label}, data, data);
}

void Communicator::reduce_scatter(const void* input, void* output, std::int64_t count, DType dtype,
                                  ReduceOp op, std::string_view label) {
  start({Collective::reduce_scatter, dtype, op, count, 0, label}, input, output);
}

void Communicator::all_gather(const void* input, void* output, std::int64_t count, DType dtype,
                              std::string_view label) {
  start({Collective::all_gather, dtype, ReduceOp::sum, count, 0, label}, input, output);
}

void Communicator::broadcast(void* data, std::int64_t count, DType dtype, int root,
                             std::string_view label) {
  SHERD_CHECK(root >= 0 && root < size_, "broadcast for '{}': root {} of {} ranks", label, root,
              size_);
  start({Collective::broadcast, dtype, ReduceOp::sum, count, root, label}, data, data);
}

void Communicator::all_to_all(const void* input, void* output, std::int64_t count, DType dtype,
                              std::string_view label) {
  start({Collective::all_to_all, dtype, ReduceOp::sum, count, 0, label}, input, output);
}

void Communicator::barrier(std::string_view label) {
  start({Collective::barrier, DType::u8, ReduceOp::sum, 0, 0, label}, nullptr, nullptr);
}

}  // namespace sherd
