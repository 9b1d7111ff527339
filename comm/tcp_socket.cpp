// SPDX-License-Identifier: Apache-2.0
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sherd/comm/tcp_socket.h>
#include <sherd/runtime/error.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <utility>

namespace sherd {
namespace {

constexpr int kPollMilliseconds = 20;

std::string number_text(const sockaddr_storage& address, socklen_t length, int& port) {
  char host[NI_MAXHOST] = {}, service[NI_MAXSERV] = {};
  getnameinfo(reinterpret_cast<const sockaddr*>(&address), length, host, sizeof host, service,
              sizeof service, NI_NUMERICHOST | NI_NUMERICSERV);
  port = std::atoi(service);
  return host;
}

using Found = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Found look_up(const TcpAddress& address, int flags) {
  addrinfo wanted{}, *found = nullptr;
  wanted.ai_family = AF_UNSPEC;
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = flags | AI_NUMERICSERV;
  const int status =
      getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &wanted, &found);
  SHERD_CHECK(status == 0, "the host '{}' is not known here: {}", address.host,
              status == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(status));
  return {found, &freeaddrinfo};
}

TcpSocket make_socket(const addrinfo& at) {
  TcpSocket made(
      ::socket(at.ai_family, at.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, at.ai_protocol));
  SHERD_CHECK(made.fd() >= 0, "cannot make a socket: {}", std::strerror(errno));
  return made;
}

void set_option(int fd, int level, int option, int value) {
  setsockopt(fd, level, option, &value, sizeof value);  // where it is refused, TCP's own stays
}

template <typename Some>
TcpOutcome move_all(const TcpSocket& socket, std::size_t bytes, short events, TcpDeadline deadline,
                    const std::function<void()>& check, const Some& some) {
  for (std::size_t done = 0; done < bytes;) {
    const std::ptrdiff_t moved = some(done);
    if (moved == TcpSocket::kClosed) return TcpOutcome::closed;
    done += static_cast<std::size_t>(moved);
    if (moved > 0) continue;
    if (check) check();
    if (std::chrono::steady_clock::now() > deadline) return TcpOutcome::late;
    std::vector<pollfd> one{{socket.fd(), events, 0}};
    tcp_poll(one);
  }
  return TcpOutcome::done;
}

}  // namespace

std::string TcpAddress::text() const {
  return host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port)
                                             : fmt::format("[{}]:{}", host, port);
}

TcpAddress parse_tcp_address(std::string_view text, std::string_view what) {
  const std::size_t colon = text.rfind(':');
  TcpAddress address;
  bool good = colon != std::string_view::npos && colon > 0;
  if (good) {
    std::string_view host = text.substr(0, colon);
    const std::string_view port = text.substr(colon + 1);
    if (host.starts_with('[') && host.ends_with(']')) {
      host = host.substr(1, host.size() - 2);
    } else {
      good = host.find(':') == std::string_view::npos;
    }
    address.host = host;
    const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), address.port);
    good = good && !host.empty() && error == std::errc() && end == port.data() + port.size() &&
           address.port >= 0 && address.port < 65536;
  }
  SHERD_CHECK(good, "{}: expected host:port, as in 127.0.0.1:29400 or [::1]:29400, got '{}'", what,
              text);
  return address;
}

TcpSocket::TcpSocket(TcpSocket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

TcpSocket& TcpSocket::operator=(TcpSocket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void TcpSocket::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

std::ptrdiff_t TcpSocket::send_some(const void* data, std::size_t bytes) const {
  const ssize_t sent = ::send(fd_, data, bytes, MSG_NOSIGNAL);
  if (sent >= 0) return sent;
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : kClosed;
}

std::ptrdiff_t TcpSocket::receive_some(void* data, std::size_t bytes) const {
  const ssize_t received = ::recv(fd_, data, bytes, 0);
  if (received > 0) return received;
  const bool none = received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
  return none ? 0 : kClosed;
}

TcpAddress TcpSocket::here() const {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  TcpAddress result;
  if (getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length) == 0)
    result.host = number_text(address, length, result.port);
  return result;
}

TcpAddress TcpSocket::there() const {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  TcpAddress result;
  if (getpeername(fd_, reinterpret_cast<sockaddr*>(&address), &length) == 0)
    result.host = number_text(address, length, result.port);
  return result;
}

std::string TcpSocket::connect_error() const {
  int error = 0;
  socklen_t length = sizeof error;
  if (getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
  return error == 0 ? "" : std::strerror(error);
}

void TcpSocket::configure(double silence_seconds) const {
  set_option(fd_, IPPROTO_TCP, TCP_NODELAY, 1);
  // Four questions in the time: one after half of it, the others every sixth.
  const int sixth = std::max(1, static_cast<int>(silence_seconds / 6.0));
  set_option(fd_, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd_, IPPROTO_TCP, TCP_KEEPIDLE, 3 * sixth);
  set_option(fd_, IPPROTO_TCP, TCP_KEEPINTVL, sixth);
  set_option(fd_, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set_option(fd_, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(silence_seconds * 1000.0));
}

TcpSocket tcp_listen(const TcpAddress& address) {
  const Found found = look_up(address, AI_PASSIVE);
  TcpSocket listener = make_socket(*found);
  set_option(listener.fd(), SOL_SOCKET, SO_REUSEADDR,
             1);  // connections of an earlier run may linger
  SHERD_CHECK(::bind(listener.fd(), found->ai_addr, found->ai_addrlen) == 0 &&
                  ::listen(listener.fd(), SOMAXCONN) == 0,
              "cannot listen at {}: {}; it must be an address of this machine and a port that is "
              "free",
              address.text(), std::strerror(errno));
  return listener;
}

TcpSocket tcp_accept(const TcpSocket& listener) {
  TcpSocket made(::accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (made) return made;
  // Who connected may be gone again. Anything else would come back at once, for ever.
  const int error = errno;
  SHERD_CHECK(error == EAGAIN || error == EWOULDBLOCK || error == EINTR || error == ECONNABORTED,
              "cannot accept a connection: {}", std::strerror(error));
  return made;
}

TcpSocket tcp_connect(const TcpAddress& address, int attempt) {
  const Found found = look_up(address, 0);
  int addresses = 0;
  for (const addrinfo* at = found.get(); at != nullptr; at = at->ai_next) ++addresses;
  const addrinfo* at = found.get();
  for (int skip = attempt % addresses; skip > 0; --skip) at = at->ai_next;
  TcpSocket made = make_socket(*at);
  const bool started = ::connect(made.fd(), at->ai_addr, at->ai_addrlen) == 0 ||
                       errno == EINPROGRESS || errno == EINTR;
  SHERD_CHECK(started, "cannot connect to {}: {}", address.text(), std::strerror(errno));
  return made;
}

TcpDeadline tcp_deadline(double seconds) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(
             std::chrono::duration<double>(seconds));
}

void tcp_poll(std::vector<pollfd>& sockets) {
  ::poll(sockets.data(), sockets.size(), kPollMilliseconds);
}

TcpOutcome tcp_send_all(const TcpSocket& socket, const void* data, std::size_t bytes,
                        TcpDeadline deadline, const std::function<void()>& check) {
  return move_all(socket, bytes, POLLOUT, deadline, check, [&](std::size_t done) {
    return socket.send_some(static_cast<const std::byte*>(data) + done, bytes - done);
  });
}

TcpOutcome tcp_receive_all(const TcpSocket& socket, void* data, std::size_t bytes,
                           TcpDeadline deadline, const std::function<void()>& check) {
  return move_all(socket, bytes, POLLIN, deadline, check, [&](std::size_t done) {
    return socket.receive_some(static_cast<std::byte*>(data) + done, bytes - done);
  });
}

}  // namespace sherd
