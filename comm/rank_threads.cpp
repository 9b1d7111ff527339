// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/agreement.h>
#include <sherd/comm/rank_threads.h>
#include <sherd/runtime/error.h>

#include <exception>
#include <mutex>
#include <thread>

namespace sherd {
namespace {

// Why the run failed: a rank's own message before one that only repeats why the group had ended.
class Cause {
 public:
  // The message a group should end with.
  std::string add(int rank, const std::string& message, const std::string& group_reason) {
    const std::lock_guard lock(mutex_);
    const bool own = group_reason.empty() || message.find(group_reason) == std::string::npos;
    std::string text = own ? fmt::format("rank {}: {}", rank, message) : message;
    // A rank may have put its name there itself.
    if (own && message.starts_with(fmt::format("rank {}: ", rank))) text = message;
    // Rank 0 may add to what it has heard, as where it saved its work.
    const bool less = text_.find(text) != std::string::npos;
    const bool more = rank == 0 && text.find(text_) != std::string::npos;
    if (text_.empty() || more || (own && !own_ && !less)) text_ = text;
    own_ = own_ || own;
    return text;
  }
  // What all ranks say needs nobody's name.
  std::string agreed(const std::string& message) {
    const std::lock_guard lock(mutex_);
    text_ = message;
    own_ = true;
    return text_;
  }
  const std::string& text() const { return text_; }

 private:
  std::mutex mutex_;
  std::string text_;
  bool own_ = false;
};

}  // namespace

void run_rank_threads(int ranks, const std::function<void(Communicator&)>& body) {
  if (ranks == 1) return body(*make_self_communicator());  // errors need no rank's name
  std::vector<std::unique_ptr<Communicator>> all = make_thread_communicators(ranks);
  Cause cause;
  const auto run = [&](std::unique_ptr<Communicator> mine) {
    std::string message;
    try {
      body(*mine);
      return;
    } catch (const AgreedError& error) {
      mine->abort(cause.agreed(error.what()));
      return;
    } catch (const std::exception& error) {
      message = error.what();
    } catch (...) {
      message = "an exception that is no std::exception";
    }
    mine->abort(cause.add(mine->rank(), message, mine->end_reason()));
  };
  std::vector<std::thread> threads;
  std::string no_thread;
  for (std::size_t r = 1; r < all.size(); ++r) {
    try {
      threads.emplace_back(run, std::move(all[r]));
    } catch (const std::exception& error) {
      no_thread = fmt::format("no thread for rank {} of {}: {}", r, ranks, error.what());
      all.front()->abort(no_thread);
      break;
    }
  }
  if (no_thread.empty()) run(std::move(all.front()));
  for (std::thread& thread : threads) thread.join();
  if (!no_thread.empty()) fail("{}", no_thread);
  if (!cause.text().empty()) fail("{}", cause.text());
}

}  // namespace sherd
