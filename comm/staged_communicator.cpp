// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/reduce.h>
#include <sherd/comm/staged_communicator.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <cstring>

namespace sherd {
namespace {

// An all-reduce of at most so many bytes takes one round, in which every rank reduces everything.
constexpr std::size_t kSmall = 4096;

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

// Calls body(begin, count) for ranges of at most `most` elements, and once where there is none: a
// call without elements is compared too.
template <typename Body>
void in_ranges(std::int64_t total, std::int64_t most, const Body& body) {
  std::int64_t begin = 0;
  do {
    const std::int64_t count = std::min(most, total - begin);
    body(begin, count);
    begin += count;
  } while (begin < total);
}

}  // namespace

void StagedCommunicator::run(const Call& call, const void* input, void* output) {
  if (call.is_message()) return pass_message(call, input, output);
  SHERD_CHECK(capacity() >= static_cast<std::size_t>(size()) * call.element_bytes(),
              "{}: {} bytes at once are too few for {} ranks", call.describe(), capacity(), size());
  const auto* in = static_cast<const std::byte*>(input);
  auto* out = static_cast<std::byte*>(output);
  begin(call);
  switch (call.collective) {
    case Collective::all_reduce:
      if (call.bytes() <= kSmall) return reduce_small(call, out);
      return reduce_all(call, out);
    case Collective::reduce_scatter: return reduce_pieces(call, in, out);
    case Collective::all_gather: return gather(call, in, out);
    case Collective::broadcast: return broadcast_from_root(call, out);
    case Collective::all_to_all: return exchange(call, in, out);
    case Collective::barrier: return swap(call, {.bytes = 0});
    case Collective::send:
    case Collective::recv: break;
  }
}

void StagedCommunicator::gather(const Call& call, const std::byte* input, std::byte* output) {
  const std::size_t width = call.element_bytes();
  const auto most = static_cast<std::int64_t>(capacity() / width);
  in_ranges(call.count, most, [&](std::int64_t begin, std::int64_t count) {
    const std::size_t offset = static_cast<std::size_t>(begin) * width;
    const std::size_t bytes = static_cast<std::size_t>(count) * width;
    copy_bytes(outbox(), input + offset, bytes);
    swap(call, {.bytes = bytes});
    for (int i = 0; i < size(); ++i) {
      const int from = (rank() + i) % size();
      std::byte* to = output + static_cast<std::size_t>(from) * call.bytes() + offset;
      copy_bytes(to, from == rank() ? input + offset : inbox(from), bytes);
    }
  });
}

void StagedCommunicator::broadcast_from_root(const Call& call, std::byte* data) {
  const std::size_t width = call.element_bytes();
  const auto most = static_cast<std::int64_t>(capacity() / width);
  in_ranges(call.count, most, [&](std::int64_t begin, std::int64_t count) {
    std::byte* at = data + static_cast<std::size_t>(begin) * width;
    const std::size_t bytes = static_cast<std::size_t>(count) * width;
    if (rank() == call.root) copy_bytes(outbox(), at, bytes);
    swap(call, {.bytes = bytes, .only_from = call.root});
    if (rank() != call.root) copy_bytes(at, inbox(call.root), bytes);
  });
}

// Passes every rank its piece of the others' inputs, a range at a time: body(begin, count, pieces)
// gets elements [begin, begin + count) of this rank's piece of each input, by rank.
template <typename Body>
void StagedCommunicator::swap_pieces(const Call& call, const std::byte* input, const Body& body) {
  const std::size_t width = call.element_bytes();
  const auto most = static_cast<std::int64_t>(capacity() / width) / size();
  std::vector<const void*> pieces(static_cast<std::size_t>(size()));
  in_ranges(call.count, most, [&](std::int64_t begin, std::int64_t count) {
    const std::size_t bytes = static_cast<std::size_t>(count) * width;
    const auto mine_for = [&](int r) {
      return input + static_cast<std::size_t>(r) * call.bytes() +
             static_cast<std::size_t>(begin) * width;
    };
    for (int r = 0; r < size(); ++r) {
      if (r != rank())
        copy_bytes(outbox() + static_cast<std::size_t>(r) * bytes, mine_for(r), bytes);
    }
    swap(call, {.bytes = bytes, .pieces = true});
    for (int r = 0; r < size(); ++r) {
      pieces[static_cast<std::size_t>(r)] = r == rank() ? mine_for(r) : inbox(r);
    }
    body(begin, count, pieces);
  });
}

void StagedCommunicator::exchange(const Call& call, const std::byte* input, std::byte* output) {
  const std::size_t width = call.element_bytes();
  swap_pieces(call, input, [&](std::int64_t begin, std::int64_t count, const auto& pieces) {
    for (int i = 0; i < size(); ++i) {
      const auto from = static_cast<std::size_t>((rank() + i) % size());
      copy_bytes(output + from * call.bytes() + static_cast<std::size_t>(begin) * width,
                 static_cast<const std::byte*>(pieces[from]),
                 static_cast<std::size_t>(count) * width);
    }
  });
}

void StagedCommunicator::reduce_pieces(const Call& call, const std::byte* input,
                                       std::byte* output) {
  const std::size_t width = size_of(call.result());
  swap_pieces(call, input, [&](std::int64_t begin, std::int64_t count, const auto& pieces) {
    reduce_in_tree(pieces, output + static_cast<std::size_t>(begin) * width, count, call.dtype,
                   call.result(), call.op);
  });
}

void StagedCommunicator::reduce_small(const Call& call, std::byte* data) {
  copy_bytes(outbox(), data, call.bytes());
  swap(call, {.bytes = call.bytes()});
  std::vector<const void*> sources;
  for (int r = 0; r < size(); ++r) sources.push_back(r == rank() ? data : inbox(r));
  reduce_in_tree(sources, data, call.count, call.dtype, call.dtype, call.op);
}

// Rank r reduces range r of what is at hand, then all swap their results.
void StagedCommunicator::reduce_all(const Call& call, std::byte* data) {
  const std::size_t width = call.element_bytes();
  const std::int64_t ranks = size();
  const auto most = static_cast<std::int64_t>(capacity() / width) / ranks * ranks;
  std::vector<const void*> sources(static_cast<std::size_t>(size()));
  in_ranges(call.count, most, [&](std::int64_t begin, std::int64_t count) {
    std::byte* at = data + static_cast<std::size_t>(begin) * width;
    const std::int64_t range = (count + ranks - 1) / ranks;  // elements of all but the last ones
    const std::size_t bytes = static_cast<std::size_t>(range) * width;
    const auto start = [&](int r) { return std::min(count, range * r); };
    const auto place = [&](int r) { return at + static_cast<std::size_t>(start(r)) * width; };
    const auto length = [&](int r) { return start(r + 1) - start(r); };
    const auto bytes_of = [&](int r) { return static_cast<std::size_t>(length(r)) * width; };
    for (int r = 0; r < size(); ++r) {
      if (r != rank())
        copy_bytes(outbox() + static_cast<std::size_t>(r) * bytes, place(r), bytes_of(r));
    }
    swap(call, {.bytes = bytes, .pieces = true});
    for (int r = 0; r < size(); ++r) {
      sources[static_cast<std::size_t>(r)] = r == rank() ? place(r) : inbox(r);
    }
    reduce_in_tree(sources, place(rank()), length(rank()), call.dtype, call.dtype, call.op);
    copy_bytes(outbox(), place(rank()), bytes_of(rank()));
    swap(call, {.bytes = bytes});
    for (int i = 1; i < size(); ++i) {
      const int from = (rank() + i) % size();
      copy_bytes(place(from), inbox(from), bytes_of(from));
    }
  });
}

}  // namespace sherd
