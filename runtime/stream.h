// SPDX-License-Identifier: Apache-2.0
// Streams run work in order; events order work between streams.
//
//   in_place  runs the work at once on the calling thread: the compute stream of a CPU.
//   worker    a thread of its own that executes in order: gather and reduce streams of a CPU.
//   meta      runs nothing; every event is already done. Or records, see make_recording_stream().
//   cuda      (runtime/cuda/device.h) runs the work at once on the calling thread, which puts
//   device
//             work into the CUDA stream behind it.
//
// Work handed to a stream captures raw pointers, never owning handles of tensors: memory is counted
// and released by the host thread alone (Storage::record_use keeps the bytes from being reused
// early).
#pragma once

#include <sherd/runtime/api.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace sherd {

// A point in a stream's work. A default-made event is done. When work before it threw, the event is
// done too, and carries the exception: nobody hangs, and nobody computes on half-made data.
class SHERD_API Event {
 public:
  bool done() const;
  void wait() const;  // blocks the calling thread; rethrows what went wrong before the event
  bool wait_for(std::chrono::milliseconds time) const;  // done within the time? Throws nothing.

  // What a kind of stream makes of it.
  class State {
   public:
    virtual ~State() = default;
    virtual bool done() = 0;
    virtual void wait() = 0;
    virtual bool wait_for(std::chrono::milliseconds time) = 0;
  };
  Event() = default;
  explicit Event(std::shared_ptr<State> state) : state_(std::move(state)) {}
  State* state() const { return state_.get(); }  // null: done

 private:
  std::shared_ptr<State> state_;
};

class Schedule;

class SHERD_API Stream {
 public:
  enum class Kind { in_place, worker, meta };

  // What a kind of stream does.
  class Backend {
   public:
    virtual ~Backend() = default;
    virtual void enqueue(std::function<void()> work) = 0;
    virtual void enqueue_on_host(std::function<void()> work) { enqueue(std::move(work)); }
    virtual Event record() = 0;
    virtual void wait(const Event& event) = 0;
    virtual void synchronize() = 0;
    virtual void* native() { return nullptr; }
    virtual std::shared_ptr<void> watch(std::function<void(bool)>) { return nullptr; }
  };

  Stream(Kind kind, std::string name);
  Stream(std::unique_ptr<Backend> backend, std::string name);
  ~Stream();  // waits for the work that was handed over
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  const std::string& name() const { return name_; }
  void enqueue(std::function<void()> work);
  // Work of the host in the order of the stream. On cuda a thread of the driver runs it, where it
  // must not throw nor call CUDA; elsewhere it is the same.
  void enqueue_on_host(std::function<void()> work);
  Event record();                 // done once everything enqueued so far has run
  void wait(const Event& event);  // work enqueued later starts after the event
  // Blocks until all work has run. An exception thrown by work is rethrown here, once; work
  // enqueued after it is dropped until then.
  void synchronize();
  // For work of which only the host can tell that it never ends, or that it ended badly. Any thread
  // of the host that waits for this stream, its events, or streams that wait for them calls
  // look(false) every few milliseconds, and look(true) when it is done. What that throws the thread
  // throws, and so does every later wait for an event from before; what is recorded from then on is
  // not concerned. Until the returned handle is let go, which waits for a call that goes on. Does
  // nothing for streams other than CUDA's.
  [[nodiscard]] std::shared_ptr<void> watch(std::function<void(bool done)> look);
  // CUDA's stream, whose device becomes the calling thread's; null for the other kinds.
  void* native() const { return backend_->native(); }
  Backend& backend() { return *backend_; }

 private:
  std::string name_;
  std::unique_ptr<Backend> backend_;
};

// A meta stream that records what it is asked: what is enqueued runs at once, as on paper nothing
// takes time; its events are never done, so that every wait for one is an entry of the schedule.
SHERD_API std::unique_ptr<Stream::Backend> make_recording_stream(Schedule& schedule, int stream);

}  // namespace sherd
