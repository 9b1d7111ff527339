// SPDX-License-Identifier: Apache-2.0
// What Sherd uses of MPI: messages of bytes between all ranks the launcher started, never blocking.
// mpi_world.cpp alone calls MPI.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

namespace sherd {

class MpiWorld {
 public:
  // Initialises MPI at the first call, on all ranks together; finalises it when the process exits.
  // Throws at every call when that was not possible.
  static bool started();
  static MpiWorld& get();

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool one_machine() const { return one_machine_; }
  bool crowded() const { return crowded_; }  // this machine; see Backoff
  int largest_tag() const { return largest_tag_; }

  // A message under way; its memory must stay until it is done.
  class Request {
   public:
    bool done();
    void cancel();  // of a receive; it may be done all the same

   private:
    friend class MpiWorld;
    alignas(void*) std::array<std::byte, sizeof(void*)> handle_{};
    bool active_ = false;
  };
  Request send(const void* data, std::size_t bytes, int to, int tag);
  Request receive(void* data, std::size_t bytes, int from, int tag);
  // A message with this tag that has come, from anybody: its bytes, and who sent it. Any thread.
  bool take(int tag, std::vector<std::byte>& data, int& from);

  // Keeps memory until the messages in it are done, at the latest until the process ends.
  void keep(std::vector<std::byte> memory, std::vector<Request> requests);
  // From now on the end of this process waits for the others for a limited time only.
  void expect_trouble();

 private:
  MpiWorld() = default;
  void start();
  static void finish_at_exit();
  bool finish(double limit_seconds);
  bool kept_done();

  struct State;
  std::unique_ptr<State> state_;
  int rank_ = 0, size_ = 1, largest_tag_ = 0;
  bool one_machine_ = false, crowded_ = false;
};

}  // namespace sherd
