// SPDX-License-Identifier: Apache-2.0
// Collectives out of rounds: ranks that do not see each other's memory put blocks of bounded size
// into an outbox, swap, and read the blocks the others meant for them. A backend supplies the
// rounds; what is combined, in which order, and the size of what is held at once are the same for
// all of them.
#pragma once

#include <sherd/comm/communicator.h>

namespace sherd {

class StagedCommunicator : public Communicator {
 protected:
  using Communicator::Communicator;

  // What a round passes on, from every rank or from one alone.
  struct Round {
    std::size_t bytes;  // to each rank
    bool pieces =
        false;  // rank r gets [r * bytes, (r + 1) * bytes) of the outbox, or all its start
    int only_from = -1;
  };

  // Before the first round of a call. The calls are compared here or in the first swap, before
  // anything is read.
  virtual void begin(const Call& call) = 0;
  virtual std::size_t capacity() const = 0;  // of an outbox, in bytes
  virtual std::byte* outbox() = 0;           // of the next round
  virtual void swap(const Call& call, const Round& round) = 0;
  // What `from`, another rank, put there for this one; until the next swap. What is put into the
  // outbox meanwhile does not disturb it.
  virtual const std::byte* inbox(int from) const = 0;
  virtual void pass_message(const Call& call, const void* input, void* output) = 0;

 private:
  void run(const Call& call, const void* input, void* output) final;
  void gather(const Call& call, const std::byte* input, std::byte* output);
  void broadcast_from_root(const Call& call, std::byte* data);
  template <typename Body>
  void swap_pieces(const Call& call, const std::byte* input, const Body& body);
  void exchange(const Call& call, const std::byte* input, std::byte* output);
  void reduce_pieces(const Call& call, const std::byte* input, std::byte* output);
  void reduce_all(const Call& call, std::byte* data);
  void reduce_small(const Call& call, std::byte* data);
};

}  // namespace sherd
