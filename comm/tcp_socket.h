// SPDX-License-Identifier: Apache-2.0
// What Sherd uses of TCP: sockets that never block, and waiting for them up to a deadline.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace sherd {

struct TcpAddress {
  std::string host;
  int port = 0;
  std::string text() const;  // "host:port"
};
// Of "host:port". `what`: whose setting it is, for errors.
TcpAddress parse_tcp_address(std::string_view text, std::string_view what);

class TcpSocket {
 public:
  TcpSocket() = default;
  explicit TcpSocket(int fd) : fd_(fd) {}
  TcpSocket(TcpSocket&& other) noexcept;
  TcpSocket& operator=(TcpSocket&& other) noexcept;
  ~TcpSocket() { close(); }
  void close();
  int fd() const { return fd_; }  // -1: none
  explicit operator bool() const { return fd_ >= 0; }

  // The bytes that went at once, perhaps 0; kClosed where the other side is gone.
  static constexpr std::ptrdiff_t kClosed = -1;
  std::ptrdiff_t send_some(const void* data, std::size_t bytes) const;
  std::ptrdiff_t receive_some(void* data, std::size_t bytes) const;

  TcpAddress here() const;  // as numbers
  TcpAddress there() const;
  std::string connect_error() const;  // of a connection that was started; "": it stands
  // A connection: small pieces at once, and noticed when the other machine is lost.
  void configure(double silence_seconds) const;

 private:
  int fd_ = -1;
};

// port 0: a free one.
TcpSocket tcp_listen(const TcpAddress& address);
TcpSocket tcp_accept(const TcpSocket& listener);  // none where nobody waits
// Starts to connect; when it can be written, connect_error() has the outcome. Of a name with
// several addresses the one numbered attempt, in turn.
TcpSocket tcp_connect(const TcpAddress& address, int attempt = 0);

using TcpDeadline = std::chrono::steady_clock::time_point;
TcpDeadline tcp_deadline(double seconds);
// Waits for any of them, at most 20 ms, so that the caller can look for what no socket tells. What
// was polled for is in revents.
void tcp_poll(std::vector<pollfd>& sockets);

enum class TcpOutcome { done, closed, late };
// All of it, before the deadline; `check` is called while waiting and may throw.
TcpOutcome tcp_send_all(const TcpSocket& socket, const void* data, std::size_t bytes,
                        TcpDeadline deadline, const std::function<void()>& check = {});
TcpOutcome tcp_receive_all(const TcpSocket& socket, void* data, std::size_t bytes,
                           TcpDeadline deadline, const std::function<void()>& check = {});

}  // namespace sherd
