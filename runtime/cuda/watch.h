// SPDX-License-Identifier: Apache-2.0
// What a thread calls while it waits for device work: Stream::watch.
#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace sherd::cuda {

// Once it has thrown, the events from before carry the error, and a synchronize() throws it unless
// another wait has.
class Watch {
 public:
  explicit Watch(std::function<void(bool)> look) : look_(std::move(look)) {}

  void look(bool done) {
    const std::lock_guard lock(mutex_);
    find_error(done);
    if (!error_) return;
    told_ = true;
    std::rethrow_exception(error_);
  }
  // Whether there is an error, for somebody who is not concerned: it is still to be told.
  bool has_error(bool done) {
    const std::lock_guard lock(mutex_);
    find_error(done);
    return error_ != nullptr;
  }
  void stop() {
    const std::lock_guard lock(mutex_);
    look_ = nullptr;
  }
  bool concerns_new_work() {
    const std::lock_guard lock(mutex_);
    return look_ && !error_;
  }
  bool is_over() {
    const std::lock_guard lock(mutex_);
    return error_ ? told_ : !look_;
  }

 private:
  void find_error(bool done) {
    if (error_ || !look_) return;
    try {
      look_(done);
    } catch (...) {
      error_ = std::current_exception();
    }
  }

  std::mutex mutex_;
  std::function<void(bool)> look_;
  std::exception_ptr error_;
  bool told_ = false;
};
using Watches = std::vector<std::shared_ptr<Watch>>;

// Waits without the driver, which would not come back from work that never ends. look(watch) is
// called from time to time; false from it ends the wait.
template <typename Query, typename Look>
void wait_until(const Watches& watches, const Query& is_done, const Look& look) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kLook = std::chrono::milliseconds(2);
  auto next = Clock::now() + kLook;
  for (int looks = 0; !is_done(); ++looks) {
    if (looks < 100) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    if (Clock::now() < next) continue;
    for (const auto& watch : watches) {
      if (!look(*watch)) return;
    }
    next = Clock::now() + kLook;
  }
}
template <typename Query>
void wait_and_look(const Watches& watches, const Query& is_done) {
  wait_until(watches, is_done, [](Watch& watch) {
    watch.look(false);
    return true;
  });
  for (const auto& watch : watches) watch->look(true);
}

// Of a stream and of what it waits for.
class WatchList {
 public:
  Watches all() {
    const std::lock_guard lock(mutex_);
    std::erase_if(watches_, [](const auto& watch) { return watch->is_over(); });
    return watches_;
  }
  void add(const Watches& more) {
    const std::lock_guard lock(mutex_);
    for (const auto& watch : more) {
      if (std::ranges::find(watches_, watch) == watches_.end()) watches_.push_back(watch);
    }
  }

 private:
  std::mutex mutex_;
  Watches watches_;
};

}  // namespace sherd::cuda
