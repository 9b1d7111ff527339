// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/schedule.h>
#include <sherd/runtime/stream.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace sherd {

namespace {

// Work that runs at once; and none at all, where everything is done already.
class InPlace final : public Stream::Backend {
 public:
  void enqueue(std::function<void()> work) override { work(); }
  Event record() override { return {}; }
  void wait(const Event& event) override { event.wait(); }
  void synchronize() override {}
};

class Meta final : public Stream::Backend {
 public:
  void enqueue(std::function<void()>) override {}
  Event record() override { return {}; }
  void wait(const Event&) override {}
  void synchronize() override {}
};

class WorkerEvent final : public Event::State {
 public:
  bool done() override {
    const std::lock_guard lock(mutex_);
    return done_;
  }
  void wait() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
    if (error_) std::rethrow_exception(error_);
  }
  bool wait_for(std::chrono::milliseconds time) override {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, time, [this] { return done_; });
  }
  void set(std::exception_ptr failure) {
    const std::lock_guard lock(mutex_);
    done_ = true;
    error_ = std::move(failure);
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
};

class Worker final : public Stream::Backend {
 public:
  Worker() : thread_([this] { run(); }) {}
  ~Worker() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void enqueue(std::function<void()> work) override { push({std::move(work), nullptr}); }
  Event record() override {
    auto event = std::make_shared<WorkerEvent>();
    push({nullptr, event});
    return Event(event);
  }
  void wait(const Event& event) override {
    push({[event] { event.wait(); }, nullptr});
  }
  void synchronize() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  struct Item {
    std::function<void()> work;          // or
    std::shared_ptr<WorkerEvent> event;  // to signal, even after a failure: waiters must not hang
  };

  void push(Item item) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(item));
    }
    changed_.notify_all();
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;  // stopping, and all work has run
      Item item = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      std::exception_ptr failure = error_;
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
      busy_ = false;
      if (failure && !error_) error_ = failure;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> queue_;
  bool busy_ = false;
  bool stopping_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

class Recording final : public Stream::Backend {
 public:
  Recording(Schedule& schedule, int stream) : schedule_(schedule), stream_(stream) {}

  void enqueue(std::function<void()> work) override {
    schedule_.enter(stream_);
    work();
    schedule_.leave();
  }
  Event record() override {
    return Event(std::make_shared<Position>(schedule_, stream_, schedule_.position()));
  }
  void wait(const Event& event) override {
    const auto* const position = dynamic_cast<const Position*>(event.state());
    if (position != nullptr) schedule_.wait(stream_, position->stream, position->entry);
  }
  void synchronize() override { record().wait(); }

 private:
  struct Position final : Event::State {
    Position(Schedule& of, int on, std::int64_t at) : schedule(of), stream(on), entry(at) {}
    bool done() override { return false; }
    void wait() override { schedule.host_wait(stream, entry); }
    bool wait_for(std::chrono::milliseconds) override {
      wait();
      return true;
    }
    Schedule& schedule;
    const int stream;
    const std::int64_t entry;
  };

  Schedule& schedule_;
  const int stream_;
};

std::unique_ptr<Stream::Backend> make_backend(Stream::Kind kind) {
  switch (kind) {
    case Stream::Kind::in_place: return std::make_unique<InPlace>();
    case Stream::Kind::worker: return std::make_unique<Worker>();
    case Stream::Kind::meta: break;
  }
  return std::make_unique<Meta>();
}

}  // namespace

std::unique_ptr<Stream::Backend> make_recording_stream(Schedule& schedule, int stream) {
  return std::make_unique<Recording>(schedule, stream);
}

bool Event::done() const {
  return !state_ || state_->done();
}

void Event::wait() const {
  if (state_) state_->wait();
}

bool Event::wait_for(std::chrono::milliseconds time) const {
  return !state_ || state_->wait_for(time);
}

Stream::Stream(Kind kind, std::string name) : Stream(make_backend(kind), std::move(name)) {}

Stream::Stream(std::unique_ptr<Backend> backend, std::string name)
    : name_(std::move(name)), backend_(std::move(backend)) {}

Stream::~Stream() = default;

void Stream::enqueue(std::function<void()> work) {
  backend_->enqueue(std::move(work));
}

void Stream::enqueue_on_host(std::function<void()> work) {
  backend_->enqueue_on_host(std::move(work));
}

std::shared_ptr<void> Stream::watch(std::function<void(bool)> look) {
  return backend_->watch(std::move(look));
}

Event Stream::record() {
  return backend_->record();
}

void Stream::wait(const Event& event) {
  backend_->wait(event);
}

void Stream::synchronize() {
  backend_->synchronize();
}

}  // namespace sherd
