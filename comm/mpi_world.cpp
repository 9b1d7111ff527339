// SPDX-License-Identifier: Apache-2.0
// Note [The end of an MPI program]
// A process that ends well meets the others in MPI_Finalize, however long that takes. One in which
// a group was ended (abort, an error) gives the others a few seconds to come there too, so that
// each can report; then it calls MPI_Abort, and the launcher ends them all with a non-zero status.
// A process that dies without coming here, by a signal or _exit, is noticed by the launcher, which
// ends the others. So no process of a failed run stays behind.
#include <mpi.h>
#include <sherd/comm/backoff.h>
#include <sherd/comm/mpi.h>
#include <sherd/comm/mpi_world.h>
#include <sherd/runtime/error.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace sherd {
namespace {

constexpr double kPatience = 5.0;  // seconds a failed rank waits for the others at its end

void check(int status, const char* what) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(status, text, &length);
  fail("{}: {}", what, std::string_view(text, static_cast<std::size_t>(length)));
}

std::string library_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  std::string line(text, static_cast<std::size_t>(length));
  line = line.substr(0, line.find('\n'));
  for (char& c : line) c = c == '\t' ? ' ' : c;
  return line;
}

static_assert(sizeof(MPI_Request) <= sizeof(void*));

MPI_Request handle_of(const std::array<std::byte, sizeof(void*)>& bytes) {
  MPI_Request request;
  std::memcpy(&request, bytes.data(), sizeof request);
  return request;
}

}  // namespace

struct MpiWorld::State {
  struct Kept {
    std::vector<std::byte> memory;
    std::vector<Request> requests;
  };
  MPI_Comm comm = MPI_COMM_NULL;
  std::mutex mutex;  // of kept
  std::vector<Kept> kept;
  std::atomic<bool> trouble{false};
};

MpiWorld& MpiWorld::get() {
  static std::string problem;
  static MpiWorld* world = [] {  // lives until the process has ended
    auto made = new MpiWorld();
    int before = 0;
    MPI_Initialized(&before);
    try {
      made->start();
      if (!before) std::atexit(finish_at_exit);
    } catch (const Error& error) {
      problem = error.what();
      if (!before) MPI_Finalize();
    }
    return made;
  }();
  if (!problem.empty()) fail("{}", problem);
  return *world;
}

bool MpiWorld::started() {
  int initialized = 0;
  MPI_Initialized(&initialized);
  return initialized != 0;
}

void MpiWorld::start() {
  state_ = std::make_unique<State>();
  int initialized = 0, level = MPI_THREAD_SINGLE;
  check(MPI_Initialized(&initialized), "MPI_Initialized");
  if (initialized) {
    check(MPI_Query_thread(&level), "MPI_Query_thread");
  } else {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
  }
  SHERD_CHECK(level == MPI_THREAD_MULTIPLE,
              "MPI offers thread level {} and Sherd needs MPI_THREAD_MULTIPLE ({}): a program that "
              "initialises MPI itself must ask for it, and {} must have it",
              level, MPI_THREAD_MULTIPLE, library_version());
  check(MPI_Comm_dup(MPI_COMM_WORLD, &state_->comm), "MPI_Comm_dup");
  check(MPI_Comm_set_errhandler(state_->comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check(MPI_Comm_rank(state_->comm, &rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(state_->comm, &size_), "MPI_Comm_size");
  const std::optional<Launcher> launcher = detect_launcher();
  SHERD_CHECK(
      !launcher || launcher->size == size_,
      "{} started {} ranks, but MPI sees {}: start the program with the mpiexec of {}, which "
      "Sherd was built with",
      launcher->name, launcher->size, size_, library_version());
  MPI_Comm machine = MPI_COMM_NULL;
  check(MPI_Comm_split_type(state_->comm, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &machine),
        "MPI_Comm_split_type");
  int here = 0, least = 0, found = 0;
  check(MPI_Comm_size(machine, &here), "MPI_Comm_size");
  check(MPI_Comm_free(&machine), "MPI_Comm_free");
  check(MPI_Allreduce(&here, &least, 1, MPI_INT, MPI_MIN, state_->comm), "MPI_Allreduce");
  one_machine_ = least == size_;
  crowded_ = is_crowded(here);
  void* value = nullptr;
  check(MPI_Comm_get_attr(state_->comm, MPI_TAG_UB, &value, &found), "MPI_Comm_get_attr");
  largest_tag_ = found ? *static_cast<int*>(value) : 32767;
}

bool MpiWorld::Request::done() {
  if (!active_) return true;
  MPI_Request request = handle_of(handle_);
  int done = 0;
  check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
  std::memcpy(handle_.data(), &request, sizeof request);
  active_ = done == 0;
  return done != 0;
}

void MpiWorld::Request::cancel() {
  if (done()) return;
  MPI_Request request = handle_of(handle_);
  check(MPI_Cancel(&request), "MPI_Cancel");
}

MpiWorld::Request MpiWorld::send(const void* data, std::size_t bytes, int to, int tag) {
  Request result;
  MPI_Request request;
  check(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to, tag, state_->comm, &request),
        "MPI_Isend");
  std::memcpy(result.handle_.data(), &request, sizeof request);
  result.active_ = true;
  return result;
}

MpiWorld::Request MpiWorld::receive(void* data, std::size_t bytes, int from, int tag) {
  Request result;
  MPI_Request request;
  check(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, from, tag, state_->comm, &request),
        "MPI_Irecv");
  std::memcpy(result.handle_.data(), &request, sizeof request);
  result.active_ = true;
  return result;
}

bool MpiWorld::take(int tag, std::vector<std::byte>& data, int& from) {
  int there = 0, bytes = 0;
  MPI_Message message;
  MPI_Status status;
  check(MPI_Improbe(MPI_ANY_SOURCE, tag < 0 ? MPI_ANY_TAG : tag, state_->comm, &there, &message,
                    &status),
        "MPI_Improbe");
  if (!there) return false;
  check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
  data.resize(static_cast<std::size_t>(bytes));
  check(MPI_Mrecv(data.data(), bytes, MPI_BYTE, &message, MPI_STATUS_IGNORE), "MPI_Mrecv");
  from = status.MPI_SOURCE;
  return true;
}

void MpiWorld::keep(std::vector<std::byte> memory, std::vector<Request> requests) {
  kept_done();
  const std::lock_guard lock(state_->mutex);
  state_->kept.push_back({std::move(memory), std::move(requests)});
}

void MpiWorld::expect_trouble() {
  state_->trouble = true;
}

// Lets go what is done; whether nothing is left.
bool MpiWorld::kept_done() {
  const std::lock_guard lock(state_->mutex);
  std::erase_if(state_->kept, [](State::Kept& kept) {
    std::erase_if(kept.requests, [](Request& request) { return request.done(); });
    return kept.requests.empty();
  });
  return state_->kept.empty();
}

void MpiWorld::finish_at_exit() {
  MpiWorld& world = get();
  bool good = false;
  try {
    good = world.finish(world.state_->trouble ? kPatience : -1.0);
  } catch (const Error&) {
    // MPI itself fails: there is nobody left to tell but the launcher.
  }
  if (!good) MPI_Abort(MPI_COMM_WORLD, 1);
}

// Takes what was never received, so that every message ends, meets the others and finalises MPI.
// False when the others do not come within the limit; there is none where it is negative.
bool MpiWorld::finish(double limit_seconds) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::byte> ignored;
  int from = 0;
  // At the first meeting nobody sends any more; at the second everything sent has been taken.
  for (int meeting = 0; meeting < 2; ++meeting) {
    Backoff backoff(crowded_);
    MPI_Request request;
    bool posted = false;
    for (int met = 0; !met; backoff.pause()) {
      while (take(-1, ignored, from)) continue;
      if (!posted && kept_done()) {
        check(MPI_Ibarrier(state_->comm, &request), "MPI_Ibarrier");
        posted = true;
      }
      if (posted) check(MPI_Test(&request, &met, MPI_STATUS_IGNORE), "MPI_Test");
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
      if (!met && limit_seconds >= 0.0 && waited.count() > limit_seconds) return false;
    }
  }
  check(MPI_Comm_free(&state_->comm), "MPI_Comm_free");
  check(MPI_Finalize(), "MPI_Finalize");
  return true;
}

}  // namespace sherd
