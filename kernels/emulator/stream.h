// SPDX-License-Identifier: Apache-2.0
// Streams, events and captures as the host side sees them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "runtime.h"
#include "sanitizers.h"

namespace emulator {

using Work = std::function<void()>;

// A point in a stream's order. What came before it is seen by whoever waits for it.
class Marker {
 public:
  void pass();
  void wait();
  bool passed();
  std::chrono::steady_clock::time_point when() const { return when_; }  // once passed

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
  std::chrono::steady_clock::time_point when_;
};

struct Capture;

struct Item {
  Work work;
  bool marks;  // only tells how far the stream has come: cudaStreamQuery does not count it
};

struct Stream {
  int device = 0;
  bool is_default = false;
  bool blocking = false;  // ordered with the default stream
  int delay = 0;          // microseconds, at most, before each piece of work

  bool has_thread = false;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::unique_ptr<Item>> queue;
  bool busy = false, closing = false;
  std::exception_ptr error;  // thrown by the next wait

  std::shared_ptr<Capture> capture;
};
using StreamPtr = std::shared_ptr<Stream>;

// The stream of a handle, null if there is none. The null handle is the current device's default.
StreamPtr find_stream(cudaStream_t handle);

enum class Kind { device, host };  // may it reach device memory?
// Runs `work` in the stream's order, or records it where the stream is captured.
cudaError_t submit(const StreamPtr& stream, Kind kind, Work work);
// Waits until what was submitted is done. Throws what a kernel of it reported.
void drain(const StreamPtr& stream);
std::vector<StreamPtr> all_streams(int device);

// ---- capture.cpp
struct Node {
  Work work;
  std::vector<std::size_t> after;  // nodes that it waits for
};
struct Capture {
  Stream* origin;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  bool invalid = false;
  std::vector<Node> nodes;
  std::map<StreamPtr, std::set<std::size_t>> last;  // of each stream: what its next node waits for
};
std::mutex& capture_mutex();
// Adds a node, or says why not. Locks.
cudaError_t capture_work(const StreamPtr& stream, Work work);
bool is_capturing(const StreamPtr& stream);
// For calls that a capture forbids: success, or the error; then the captures are invalid.
cudaError_t refuse_in_capture(const StreamPtr& stream);  // this stream's
cudaError_t refuse_unsafe_call();                        // any that this thread must heed
// Work on the default stream would wait for a captured stream.
cudaError_t refuse_default_stream(const StreamPtr& stream);

}  // namespace emulator

struct CUevent_st {
  int device = 0;
  bool timed = true;
  std::mutex mutex;
  std::shared_ptr<emulator::Marker> marker;  // null: never recorded
  bool captured = false;                     // last recorded in a capture
  std::weak_ptr<emulator::Capture> capture;
  std::set<std::size_t> nodes;
};
