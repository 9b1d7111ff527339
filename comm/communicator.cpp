// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/communicator.h>
#include <sherd/comm/disagreement.h>
#include <sherd/runtime/error.h>
#include <xxhash.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace sherd {

std::string disagreement(std::int64_t sequence, std::span<const std::string> calls) {
  std::string text;
  for (std::size_t r = 0; r < calls.size(); ++r) {
    text += fmt::format("{}rank {}: {}", r == 0 ? "" : "; ", r, calls[r]);
  }
  return fmt::format(
      "ranks disagree at collective number {}: {}. All ranks must make the same calls in the same "
      "order; do they run the same model on the same number of batches?",
      sequence, text);
}

std::string message_disagreement(std::int64_t sequence, int from, const std::string& sent, int to,
                                 const std::string& received) {
  return fmt::format(
      "ranks disagree at message number {} from rank {} to rank {}: rank {}: {}; rank {}: {}. Both "
      "must name the same type, count and label, in the same order",
      sequence, from, to, from, sent, to, received);
}

std::string left_message(int left, int rank, const std::string& call) {
  return fmt::format("rank {} has left the group, so rank {} waits in vain in {}", left, rank,
                     call);
}

std::string stuck_message(int first, const std::string& first_call, int second,
                          const std::string& second_call) {
  if (first > second) return stuck_message(second, second_call, first, first_call);
  return fmt::format(
      "ranks wait for each other: rank {} in {}, rank {} in {}. A message needs its send and its "
      "recv at the same place between the collectives",
      first, first_call, second, second_call);
}

std::string_view name_of(Collective collective) {
  switch (collective) {
    case Collective::all_reduce: return "all_reduce";
    case Collective::reduce_scatter: return "reduce_scatter";
    case Collective::all_gather: return "all_gather";
    case Collective::broadcast: return "broadcast";
    case Collective::all_to_all: return "all_to_all";
    case Collective::barrier: return "barrier";
    case Collective::send: return "send";
    case Collective::recv: return "recv";
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
  if (about != nullptr) return about->describe();
  static constexpr const char* kOps[] = {"sum", "average", "max"};
  std::string before, after;
  switch (collective) {
    case Collective::barrier: return fmt::format("barrier for '{}'", label);
    case Collective::all_reduce:
    case Collective::reduce_scatter:
      before = fmt::format(" ({})", kOps[static_cast<int>(op)]);
      break;
    case Collective::broadcast: before = fmt::format(" from rank {}", root); break;
    case Collective::send: after = fmt::format(" to rank {}", root); break;
    case Collective::recv: after = fmt::format(" from rank {}", root); break;
    case Collective::all_gather:
    case Collective::all_to_all: break;
  }
  if (result() != dtype) after = fmt::format(" to {}", name_of(result()));
  return fmt::format("{}{} of {} {}{} for '{}'", name_of(collective), before, count, name_of(dtype),
                     after, label);
}

std::uint64_t Communicator::Call::fingerprint() const {
  // The two sides of a message differ in who sends and who the other is.
  const std::int64_t numbers[] = {
      sequence,
      static_cast<std::int64_t>(is_message() ? Collective::send : collective),
      static_cast<std::int64_t>(dtype),
      static_cast<std::int64_t>(result()),
      static_cast<std::int64_t>(op),
      count,
      is_message() ? 0 : root,
      about != nullptr ? static_cast<std::int64_t>(about->fingerprint()) : 0};
  return XXH3_64bits_withSeed(label.data(), label.size(), XXH3_64bits(numbers, sizeof numbers));
}

void Communicator::compare(const Call& call) {
  Call mine{Collective::barrier, DType::u8, ReduceOp::sum, 0, 0, call.label};
  mine.about = &call;
  if (call.is_message()) {
    mine.collective = call.collective;
    mine.root = call.root;
    mine.sequence = messages_[{call.collective, call.root}]++;
  } else {
    mine.sequence = collectives_++;
  }
  run(mine, nullptr, nullptr);
}

// Counts the call and runs it.
void Communicator::start(Call call, const void* input, void* output) {
  SHERD_CHECK(call.count >= 0, "{}: a negative count", call.describe());
  SHERD_CHECK(!call.is_message() || (call.root >= 0 && call.root < size_ && call.root != rank_),
              "{}: this is rank {} of {}; a message goes to another rank of the group",
              call.describe(), rank_, size_);
  const auto index = static_cast<std::size_t>(call.collective);
  const auto piece = static_cast<std::int64_t>(call.bytes());
  const std::int64_t others = size_ - 1;
  std::int64_t sent = 0;
  switch (call.collective) {
    case Collective::all_reduce: sent = 2 * piece * others / size_; break;
    case Collective::reduce_scatter:
    case Collective::all_gather:
    case Collective::all_to_all: sent = piece * others; break;
    case Collective::broadcast: sent = rank_ == call.root ? piece * others : 0; break;
    case Collective::send: sent = piece; break;
    case Collective::barrier:
    case Collective::recv: break;
  }
  ++counters_.calls[index];
  counters_.bytes[index] += sent;
  call.sequence = call.is_message() ? messages_[{call.collective, call.root}]++ : collectives_++;
  run(call, input, output);
}

std::unique_ptr<Communicator> Communicator::split(std::span<const int> members,
                                                  std::string_view label) {
  const auto in_order = [&] {
    return std::ranges::adjacent_find(members, std::greater_equal<>()) == members.end() &&
           members.front() >= 0 && members.back() < size_;
  };
  SHERD_CHECK(
      !members.empty() && in_order() && std::ranges::binary_search(members, rank_),
      "split for '{}': expected ranks of 0 to {} in ascending order with this rank, {}, got "
      "[{}]",
      label, size_ - 1, rank_, fmt::join(members, ", "));
  return make_group(members, label);
}

void Communicator::check_partition(std::span<const int> members, std::string_view label) {
  // Every rank is in its own list, so the lists are a partition when each is named by as many ranks
  // as it has. Only hashes are compared; the lists follow where they are needed for the message.
  const auto ranks = static_cast<std::size_t>(size_);
  struct Named {
    std::int64_t size, hash;
    bool operator==(const Named&) const = default;
  };
  const Named mine{static_cast<std::int64_t>(members.size()),
                   static_cast<std::int64_t>(XXH3_64bits(members.data(), members.size_bytes()))};
  std::vector<Named> all(ranks);
  all_gather(&mine, all.data(), 2, DType::i64, label);
  const bool partition = std::ranges::all_of(
      all, [&](const Named& named) { return std::ranges::count(all, named) == named.size; });
  if (partition) return;
  std::vector<std::int32_t> padded(ranks, -1), lists(ranks * ranks);
  std::ranges::copy(members, padded.begin());
  all_gather(padded.data(), lists.data(), size_, DType::i32, label);
  std::string text;
  for (std::size_t r = 0; r < ranks; ++r) {
    const std::span list(lists.data() + r * ranks, static_cast<std::size_t>(all[r].size));
    text += fmt::format("{}rank {}: [{}]", r == 0 ? "" : "; ", r, fmt::join(list, ", "));
  }
  const std::string reason = fmt::format(
      "split for '{}': the ranks of a group must all name the same members, got {}", label, text);
  abort(reason);
  fail("{}", reason);
}

void Communicator::all_reduce(void* data, std::int64_t count, DType dtype, ReduceOp op,
                              std::string_view label) {
  start({Collective::all_reduce, dtype, op, count, 0, label}, data, data);
}

void Communicator::reduce_scatter(const void* input, void* output, std::int64_t count, DType dtype,
                                  ReduceOp op, std::string_view label) {
  start({Collective::reduce_scatter, dtype, op, count, 0, label}, input, output);
}

void Communicator::reduce_scatter_wide(const void* input, void* output, std::int64_t count,
                                       DType dtype, ReduceOp op, std::string_view label) {
  const Call call{Collective::reduce_scatter, dtype, op, count, 0, label, true};
  if (call.result() != dtype && count > 0 && !on_paper()) {
    const auto in = reinterpret_cast<std::uintptr_t>(input);
    const auto out = reinterpret_cast<std::uintptr_t>(output);
    const std::size_t read = call.bytes() * static_cast<std::size_t>(size_);
    const std::size_t written = static_cast<std::size_t>(count) * size_of(call.result());
    SHERD_CHECK(out >= in + read || in >= out + written,
                "{}: the output overlaps the input, whose elements are of another size",
                call.describe());
  }
  start(call, input, output);
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

void Communicator::send(const void* data, std::int64_t count, DType dtype, int to,
                        std::string_view label) {
  start({Collective::send, dtype, ReduceOp::sum, count, to, label}, data, nullptr);
}

void Communicator::recv(void* data, std::int64_t count, DType dtype, int from,
                        std::string_view label) {
  start({Collective::recv, dtype, ReduceOp::sum, count, from, label}, nullptr, data);
}

}  // namespace sherd
