// SPDX-License-Identifier: Apache-2.0
#include <sherd/comm/tcp_hello.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace sherd {
namespace {

constexpr char kMagic[8] = {'S', 'h', 'e', 'r', 'd', 'T', 'C', 'P'};
constexpr std::size_t kWaiting = 4096;          // connections that may wait with half a hello
constexpr double kPatience = 10.0;              // seconds one may take to say it
constexpr std::uint32_t kReplyBytes = 1 << 20;  // of 4096 ranks' places
constexpr std::size_t kHeadBytes = offsetof(TcpHello, kind);  // the same in every version

}  // namespace

TcpHello tcp_hello(TcpHello::Kind kind, int rank, int size, const std::string& token) {
  TcpHello hello{};
  std::memcpy(hello.magic, kMagic, sizeof kMagic);
  hello.version = kTcpVersion;
  hello.kind = kind;
  hello.rank = rank;
  hello.size = size;
  std::memcpy(hello.token, token.data(), std::min<std::size_t>(token.size(), kTcpToken - 1));
  return hello;
}

bool same_token(const TcpHello& a, const TcpHello& b) {
  volatile unsigned char different = 0;
  for (int i = 0; i < kTcpToken; ++i) {
    different = static_cast<unsigned char>(different | (static_cast<unsigned char>(a.token[i]) ^
                                                        static_cast<unsigned char>(b.token[i])));
  }
  return different == 0;
}

void send_reply(const TcpSocket& to, bool failed, const std::string& body, TcpDeadline deadline) {
  TcpReply reply{};
  std::memcpy(reply.magic, kMagic, sizeof kMagic);
  reply.version = kTcpVersion;
  reply.failed = failed ? 1 : 0;
  reply.bytes = static_cast<std::uint32_t>(body.size());
  std::string all(reinterpret_cast<const char*>(&reply), sizeof reply);
  all += body;
  tcp_send_all(to, all.data(), all.size(), deadline);  // who is gone needs no answer
}

std::string receive_reply(const TcpSocket& from, const std::string& who, TcpDeadline deadline) {
  TcpReply reply;
  TcpOutcome outcome = tcp_receive_all(from, &reply, sizeof reply, deadline);
  std::string body;
  if (outcome == TcpOutcome::done) {
    SHERD_CHECK(std::memcmp(reply.magic, kMagic, sizeof kMagic) == 0 && reply.bytes <= kReplyBytes,
                "{} is no rank of Sherd's: it answers something else", who);
    SHERD_CHECK(reply.version == kTcpVersion,
                "{} speaks version {} of the protocol and this rank {}: all must run the same "
                "build of Sherd",
                who, reply.version, kTcpVersion);
    body.resize(reply.bytes);
    outcome = tcp_receive_all(from, body.data(), body.size(), deadline);
  }
  SHERD_CHECK(outcome != TcpOutcome::closed,
              "{} closed the connection without an answer: its process ended, or is not Sherd's",
              who);
  SHERD_CHECK(outcome != TcpOutcome::late, "{} has not answered in time", who);
  if (reply.failed != 0) fail("{}", body);
  return body;
}

void TcpVisitors::add_to(std::vector<pollfd>& sockets) const {
  sockets.push_back({listener_.fd(), POLLIN, 0});
  for (const Waiting& one : waiting_) sockets.push_back({one.socket.fd(), POLLIN, 0});
}

std::optional<TcpVisitors::Visitor> TcpVisitors::next() {
  const auto now = std::chrono::steady_clock::now();
  while (waiting_.size() < kWaiting) {
    TcpSocket socket = tcp_accept(listener_);
    if (!socket) break;
    waiting_.push_back({std::move(socket), {}, 0, now + std::chrono::seconds(int(kPatience))});
  }
  for (auto one = waiting_.begin(); one != waiting_.end();) {
    auto* at = reinterpret_cast<std::byte*>(&one->hello);
    const std::ptrdiff_t got =
        one->socket.receive_some(at + one->received, sizeof(TcpHello) - one->received);
    one->received += static_cast<std::size_t>(std::max<std::ptrdiff_t>(0, got));
    const bool foreign = std::memcmp(at, kMagic, std::min(one->received, sizeof kMagic)) != 0;
    if (got == TcpSocket::kClosed || foreign || now > one->until) {
      one = waiting_.erase(one);
      continue;
    }
    const bool other = one->received >= kHeadBytes && one->hello.version != kTcpVersion;
    if (other || one->received == sizeof(TcpHello)) {
      Visitor visitor{std::move(one->socket), one->hello, ""};
      visitor.from = visitor.socket.there().text();
      waiting_.erase(one);
      return visitor;
    }
    ++one;
  }
  return {};
}

}  // namespace sherd
