// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sherd/comm/backoff.h>
#include <sherd/comm/shared_region.h>
#include <sherd/runtime/error.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

namespace sherd {

void put_text(char* to, std::size_t size, std::string_view text) {
  const std::size_t length = std::min(size - 1, text.size());
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

Region::Region(int fd, int ranks, std::shared_ptr<Region> parent, std::function<void()> on_end)
    : parent_(std::move(parent)),
      on_end_(std::move(on_end)),
      ranks_(static_cast<std::size_t>(ranks)),
      bytes_(bytes_for(ranks)),
      crowded_(parent_ ? parent_->crowded() : is_crowded(ranks)) {
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  SHERD_CHECK(memory != MAP_FAILED, "mapping {} bytes: {}", bytes_, std::strerror(errno));
  base_ = static_cast<std::byte*>(memory);
}

Region::~Region() {
  munmap(base_, bytes_);
}

void Region::end(const std::string& reason) const {
  if (on_end_) on_end_();
  int alive = 0;
  if (front().end_state.compare_exchange_strong(alive, 1)) {  // the first reason is the cause
    put_text(front().reason, kReason, reason);
    front().end_state.store(2, std::memory_order_release);
  }
  for (Backoff backoff(crowded_); front().end_state.load(std::memory_order_acquire) != 2;)
    backoff.pause();
}

std::string Region::end_reason() const {
  if (front().end_state.load(std::memory_order_acquire) == 2) return front().reason;
  return parent_ ? parent_->end_reason() : std::string();
}

void Region::throw_if_ended() const {
  for (const Region* region = this; region != nullptr; region = region->parent_.get()) {
    if (region->front().end_state.load(std::memory_order_acquire) != 2) continue;
    if (on_end_) on_end_();
    fail("{}", region->front().reason);
  }
}

namespace {

// An open file that is closed again.
struct File {
  int fd = -1;
  ~File() {
    if (fd >= 0) close(fd);
  }
};

}  // namespace

std::shared_ptr<Region> make_region(Communicator& others, std::span<const int> members,
                                    std::shared_ptr<Region> parent,
                                    const std::function<void()>& on_end, std::string_view label) {
  struct Offer {
    std::int64_t process, file, token;
  };
  const int ranks = static_cast<int>(members.size());
  File file;
  std::shared_ptr<Region> region;
  std::string problem;
  Offer mine{getpid(), -1, 0};
  const auto attempt = [&](const auto& work) {
    try {
      work();
    } catch (const Error& error) {
      problem = error.what();
    }
  };
  if (others.rank() == members.front()) {
    attempt([&] {
      file.fd = memfd_create("sherd", MFD_CLOEXEC);
      SHERD_CHECK(file.fd >= 0, "memfd_create: {}", std::strerror(errno));
      SHERD_CHECK(ftruncate(file.fd, static_cast<off_t>(Region::bytes_for(ranks))) == 0,
                  "{} bytes: {}", Region::bytes_for(ranks), std::strerror(errno));
      region = std::make_shared<Region>(file.fd, ranks, parent, on_end);
      std::random_device random;
      region->front().token = static_cast<std::uint64_t>(random()) << 32 | random();
      mine.file = file.fd;
      mine.token = static_cast<std::int64_t>(region->front().token);
    });
  }
  std::vector<Offer> offers(static_cast<std::size_t>(others.size()));
  others.all_gather(&mine, offers.data(), 3, DType::i64, label);
  const Offer& offer = offers[static_cast<std::size_t>(members.front())];
  if (!region && problem.empty() && offer.file >= 0) {
    attempt([&] {
      const std::string path = fmt::format("/proc/{}/fd/{}", offer.process, offer.file);
      const File theirs{open(path.c_str(), O_RDWR | O_CLOEXEC)};
      SHERD_CHECK(theirs.fd >= 0, "{}: {}", path, std::strerror(errno));
      region = std::make_shared<Region>(theirs.fd, ranks, parent, on_end);
      SHERD_CHECK(static_cast<std::int64_t>(region->front().token) == offer.token,
                  "{} is not the memory of that rank", path);
    });
  }
  // Also holds the file open until everybody has it.
  std::vector<char> problems(static_cast<std::size_t>(others.size()) * kText);
  char my_problem[kText];
  put_text(my_problem, kText, problem);
  others.all_gather(my_problem, problems.data(), kText, DType::u8, label);
  for (int r = 0; r < others.size(); ++r) {
    const char* text = problems.data() + static_cast<std::size_t>(r) * kText;
    SHERD_CHECK(*text == '\0',
                "rank {} cannot share memory with the others: {}. Ranks that are not on one "
                "machine, or in containers of their own, need the transport `messages`",
                r, text);
  }
  return region;
}

}  // namespace sherd
