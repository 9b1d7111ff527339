// SPDX-License-Identifier: Apache-2.0
// Note [TCP connections] is in tcp_world.h.
#include <sherd/comm/tcp_world.h>
#include <sherd/runtime/error.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

namespace sherd {
namespace {

constexpr std::size_t kReason = 4096;     // bytes of a reason that others are told
constexpr double kFarewellSeconds = 2.0;  // for the last notices to go

enum Kind : std::uint32_t { kEnded, kDied, kLeft, kGoodbye };

struct Head {
  std::uint32_t kind, bytes;
  std::uint64_t group;
};

}  // namespace

TcpWorld::TcpWorld(const TcpOptions& options, TcpAddress listen_at, std::vector<std::string> hosts,
                   TcpLinks links)
    : options_(options),
      listen_at_(std::move(listen_at)),
      hosts_(std::move(hosts)),
      process_(options.rank),
      peers_(links.size()) {
  for (std::size_t p = 0; p < links.size(); ++p) peers_[p].socket = std::move(links[p]);
}

TcpWorld::~TcpWorld() {
  const std::lock_guard lock(mutex_);
  const TcpDeadline deadline = tcp_deadline(kFarewellSeconds);
  for (int p = 0; p < static_cast<int>(peers_.size()); ++p) tell(p, kGoodbye, 0, "");
  std::vector<pollfd> sockets;
  do {
    sockets.clear();
    for (Peer& peer : peers_) {
      flush(peer);
      if (!peer.out.empty()) sockets.push_back({peer.socket.fd(), POLLOUT, 0});
    }
    if (!sockets.empty()) tcp_poll(sockets);
  } while (!sockets.empty() && std::chrono::steady_clock::now() < deadline);
  for (Peer& peer : peers_) {
    if (peer.socket) ::shutdown(peer.socket.fd(), SHUT_WR);
  }
}

std::uint64_t TcpWorld::next_group() {
  const std::lock_guard lock(mutex_);
  return static_cast<std::uint64_t>(process_ + 1) << 32 | ++groups_;
}

void TcpWorld::end(std::uint64_t group, const std::vector<int>& processes,
                   const std::string& reason) {
  const std::lock_guard lock(mutex_);
  std::string& stored = news_[group].reason;
  if (!stored.empty()) return;  // the first reason is the cause
  stored = reason;
  for (const int p : processes) tell(p, kEnded, group, reason.substr(0, kReason));
}

void TcpWorld::leave(std::uint64_t group, const std::vector<int>& processes) {
  const std::lock_guard lock(mutex_);
  for (const int p : processes) tell(p, kLeft, group, "");
  News& news = news_[group];
  news.others = processes.size() - 1;
  news.left_here = true;
  // Processes that were done before have left every group.
  for (const int p : processes) {
    if (p != process_ && peers_[static_cast<std::size_t>(p)].done) news.left.insert(p);
  }
  forget(group);
}

std::string TcpWorld::end_reason(std::uint64_t group) {
  const std::lock_guard lock(mutex_);
  look();
  const auto found = news_.find(group);
  if (found != news_.end() && !found->second.reason.empty()) return found->second.reason;
  return death_;
}

bool TcpWorld::has_left(std::uint64_t group, int process) {
  const std::lock_guard lock(mutex_);
  look();
  if (peers_[static_cast<std::size_t>(process)].done) return true;
  const auto found = news_.find(group);
  return found != news_.end() && found->second.left.contains(process);
}

void TcpWorld::add_to(std::vector<pollfd>& sockets) {
  const std::lock_guard lock(mutex_);
  for (const Peer& peer : peers_) {
    if (!peer.socket || peer.done) continue;
    const int events = POLLIN | (peer.out.empty() ? 0 : POLLOUT);
    sockets.push_back({peer.socket.fd(), static_cast<short>(events), 0});
  }
}

void TcpWorld::tell(int process, std::uint32_t kind, std::uint64_t group, const std::string& text) {
  Peer& peer = peers_[static_cast<std::size_t>(process)];
  if (!peer.socket || peer.done) return;
  const Head head{kind, static_cast<std::uint32_t>(text.size()), group};
  peer.out.append(reinterpret_cast<const char*>(&head), sizeof head);
  peer.out += text;
  flush(peer);
}

void TcpWorld::flush(Peer& peer) {
  while (!peer.out.empty()) {
    const std::ptrdiff_t sent = peer.socket.send_some(peer.out.data(), peer.out.size());
    if (sent == 0) return;
    if (sent == TcpSocket::kClosed) {
      peer.out.clear();  // who is gone needs no notice; reading says why
      return;
    }
    peer.out.erase(0, static_cast<std::size_t>(sent));
  }
}

void TcpWorld::look() {
  for (int p = 0; p < static_cast<int>(peers_.size()); ++p) {
    Peer& peer = peers_[static_cast<std::size_t>(p)];
    if (!peer.socket || peer.done) continue;
    flush(peer);
    read_from(p);
  }
}

void TcpWorld::read_from(int process) {
  Peer& peer = peers_[static_cast<std::size_t>(process)];
  char bytes[1024];
  while (!peer.done) {
    const std::ptrdiff_t got = peer.socket.receive_some(bytes, sizeof bytes);
    if (got == 0) return;
    if (got == TcpSocket::kClosed) return lose(process);
    peer.in.append(bytes, static_cast<std::size_t>(got));
    Head head;
    while (peer.in.size() >= sizeof head) {
      std::memcpy(&head, peer.in.data(), sizeof head);
      if (head.bytes > kReason) return lose(process);
      if (peer.in.size() < sizeof head + head.bytes) break;
      std::string text = peer.in.substr(sizeof head, head.bytes);
      peer.in.erase(0, sizeof head + head.bytes);
      take(process, head.kind, head.group, std::move(text));
    }
  }
}

void TcpWorld::take(int process, std::uint32_t kind, std::uint64_t group, std::string text) {
  if (kind == kGoodbye) {
    peers_[static_cast<std::size_t>(process)].done = true;
    return;
  }
  if (kind == kDied) {
    if (death_.empty()) death_ = std::move(text);
    return;
  }
  News& news = news_[group];
  if (kind == kEnded && news.reason.empty()) news.reason = std::move(text);
  if (kind == kLeft) news.left.insert(process);
  forget(group);
}

// A group that all have left needs no memory any more, unless its end is one of groups split from
// it.
void TcpWorld::forget(std::uint64_t group) {
  const News& news = news_[group];
  if (news.left_here && news.left.size() >= news.others && news.reason.empty()) news_.erase(group);
}

void TcpWorld::lose(int process) {
  Peer& peer = peers_[static_cast<std::size_t>(process)];
  peer.done = true;
  if (!death_.empty()) return;
  death_ = fmt::format(
      "rank {} of {} ({}) has died, or its machine is out of reach: the connection ended without a "
      "word",
      process, peers_.size(), hosts_[static_cast<std::size_t>(process)]);
  // Before this process goes too: others may see that first.
  for (int p = 0; p < static_cast<int>(peers_.size()); ++p) tell(p, kDied, 0, death_);
}

}  // namespace sherd
