// SPDX-License-Identifier: Apache-2.0
// What TCP connections begin with. Numbers are little-endian, as on every machine Sherd runs on.
#pragma once

#include <sherd/comm/tcp_rendezvous.h>

#include <cstdint>
#include <deque>
#include <optional>

namespace sherd {

inline constexpr std::uint32_t kTcpVersion = 1;

struct TcpHello {
  enum class Kind : std::uint32_t { join, link };
  char magic[8];
  std::uint32_t version;
  Kind kind;
  std::int32_t rank, size;
  std::uint64_t group;  // of a link
  std::uint32_t layer;  // of a link
  std::uint32_t port;   // of a join: where this rank listens
  char token[kTcpToken];
};
static_assert(sizeof(TcpHello) == 40 + kTcpToken);

TcpHello tcp_hello(TcpHello::Kind kind, int rank, int size, const std::string& token);
// Takes the same time wherever they differ.
bool same_token(const TcpHello& a, const TcpHello& b);

// Rank 0's answers, and the reports of the others: a head, and so many bytes of text or places.
struct TcpReply {
  char magic[8];
  std::uint32_t version, failed, bytes;
  std::uint32_t unused = 0;
};
// Waits for it.
void send_reply(const TcpSocket& to, bool failed, const std::string& body, TcpDeadline deadline);
// Throws the text of a failed one, and where there is none; `who` answers: "rank 0
// (10.0.0.1:29400)".
std::string receive_reply(const TcpSocket& from, const std::string& who, TcpDeadline deadline);

// Connections that have come and not yet said a whole hello.
class TcpVisitors {
 public:
  explicit TcpVisitors(const TcpSocket& listener) : listener_(listener) {}
  struct Visitor {
    TcpSocket socket;
    TcpHello hello;  // of a known version, or the version alone
    std::string from;
  };
  // What to poll for, and then whoever has said hello.
  void add_to(std::vector<pollfd>& sockets) const;
  std::optional<Visitor> next();

 private:
  struct Waiting {
    TcpSocket socket;
    TcpHello hello{};
    std::size_t received = 0;
    TcpDeadline until;
  };
  const TcpSocket& listener_;
  std::deque<Waiting> waiting_;
};

}  // namespace sherd
