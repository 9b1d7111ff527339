// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/stream.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace sherd {

struct Event::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr error;

  void set(std::exception_ptr failure) {
    const std::lock_guard lock(mutex);
    done = true;
    error = std::move(failure);
    changed.notify_all();
  }
};

bool Event::done() const {
  if (!state_) return true;
  const std::lock_guard lock(state_->mutex);
  return state_->done;
}

void Event::wait() const {
  if (!state_) return;
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->done; });
  if (state_->error) std::rethrow_exception(state_->error);
}

bool Event::wait_for(std::chrono::milliseconds time) const {
  if (!state_) return true;
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, time, [this] { return state_->done; });
}

struct Stream::Worker {
  struct Item {
    std::function<void()> work;           // or
    std::shared_ptr<Event::State> event;  // to signal, even after a failure: waiters must not hang
  };

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Item> queue;
  bool busy = false;
  bool stopping = false;
  std::exception_ptr error;
  std::thread thread;

  Worker() : thread([this] { run(); }) {}

  ~Worker() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    thread.join();
  }

  void push(Item item) {
    {
      const std::lock_guard lock(mutex);
      queue.push_back(std::move(item));
    }
    changed.notify_all();
  }

  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return stopping || !queue.empty(); });
      if (queue.empty()) return;  // stopping, and all work has run
      Item item = std::move(queue.front());
      queue.pop_front();
      busy = true;
      std::exception_ptr failure = error;
      lock.unlock();
      if (item.event) {
        item.event->set(failure);
      } else if (!failure) {
        try {
          item.work();
        } catch (...) {
          failure = std::current_exception();
        }
      }
      item = {};  // what the work captured dies outside the lock
      lock.lock();
      busy = false;
      if (failure && !error) error = failure;
      changed.notify_all();
    }
  }

  void synchronize() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return queue.empty() && !busy; });
    if (error) std::rethrow_exception(std::exchange(error, nullptr));
  }
};

Stream::Stream(Kind kind, std::string name) : kind_(kind), name_(std::move(name)) {
  if (kind_ == Kind::worker) worker_ = std::make_unique<Worker>();
}

Stream::~Stream() = default;

void Stream::enqueue(std::function<void()> work) {
  switch (kind_) {
    case Kind::in_place: work(); break;
    case Kind::worker: worker_->push({std::move(work), nullptr}); break;
    case Kind::meta: break;
  }
}

Event Stream::record() {
  Event event;
  if (kind_ == Kind::worker) {
    event.state_ = std::make_shared<Event::State>();
    worker_->push({nullptr, event.state_});
  }
  return event;
}

void Stream::wait(const Event& event) {
  if (kind_ == Kind::in_place) event.wait();
  if (kind_ == Kind::worker) worker_->push({[event] { event.wait(); }, nullptr});
}

void Stream::synchronize() {
  if (worker_) worker_->synchronize();
}

}  // namespace sherd
