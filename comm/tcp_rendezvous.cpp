// SPDX-License-Identifier: Apache-2.0
// Note [Rendezvous] is in tcp_rendezvous.h.
#include <sherd/comm/tcp_hello.h>
#include <sherd/comm/tcp_rendezvous.h>
#include <sherd/comm/tcp_rendezvous_file.h>
#include <sherd/runtime/error.h>

#include <algorithm>
#include <cstring>
#include <thread>

namespace sherd {
namespace {

constexpr double kAnswerSeconds = 5.0;  // to pass on an answer to whoever takes it

struct Place {
  char host[64];
  std::uint32_t port;
};

std::size_t index(int rank) {
  return static_cast<std::size_t>(rank);
}

// "rank 2", "ranks 2, 5"
std::string ranks_text(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

std::vector<int> missing_in(const TcpLinks& links, int rank) {
  std::vector<int> missing;
  for (int r = 0; r < static_cast<int>(links.size()); ++r) {
    if (r != rank && !links[index(r)]) missing.push_back(r);
  }
  return missing;
}

// What is wrong with a hello to rank 0; "" if nothing.
std::string mistake_in(const TcpVisitors::Visitor& visitor, const TcpHello& mine,
                       const TcpLinks& there) {
  const TcpHello& hello = visitor.hello;
  if (hello.version != kTcpVersion)
    return fmt::format(
        "a process at {} speaks version {} of the protocol and rank 0 version {}: all must run the "
        "same build of Sherd",
        visitor.from, hello.version, kTcpVersion);
  if (!same_token(hello, mine))
    return fmt::format(
        "rank {} at {} has another token than rank 0: all ranks of a run must be given the same "
        "one, and runs that meet at the same place different ones",
        hello.rank, visitor.from);
  if (hello.size != mine.size)
    return fmt::format(
        "rank {} at {} was started as one of {} ranks and rank 0 as one of {}: all must be given "
        "the same size",
        hello.rank, visitor.from, hello.size, mine.size);
  if (hello.rank < 1 || hello.rank >= mine.size)
    return fmt::format(
        "a process at {} says that it is rank {}, which {} of {} ranks", visitor.from, hello.rank,
        hello.rank == 0 ? "is the one that listens here, " : "does not exist", mine.size);
  if (there[index(hello.rank)])
    return fmt::format("two processes say that they are rank {} of {}: one at {} and one at {}",
                       hello.rank, mine.size, there[index(hello.rank)].there().text(),
                       visitor.from);
  return "";
}

// Rank 0: everybody who comes, until all are there. `ports`: where each listens.
TcpLinks gather(const TcpOptions& options, const TcpSocket& listener, TcpDeadline deadline,
                std::vector<int>& ports) {
  const TcpHello mine = tcp_hello(TcpHello::Kind::join, 0, options.size, options.token);
  TcpVisitors visitors(listener);
  TcpLinks there(index(options.size));
  const auto tell_all = [&](const std::string& error) {
    for (const TcpSocket& one : there) {
      if (one) send_reply(one, true, error, tcp_deadline(kAnswerSeconds));
    }
    fail("{}", error);
  };
  for (auto missing = missing_in(there, 0); !missing.empty(); missing = missing_in(there, 0)) {
    if (std::chrono::steady_clock::now() > deadline)
      tell_all(fmt::format(
          "{} of {} did not come to {} within {} s: were they started, with this "
          "address?",
          ranks_text(missing), options.size, listener.here().text(), options.join_seconds));
    std::vector<pollfd> sockets;
    visitors.add_to(sockets);
    for (const TcpSocket& one : there) sockets.push_back({one.fd(), POLLIN, 0});
    tcp_poll(sockets);
    while (auto visitor = visitors.next()) {
      if (visitor->hello.version == kTcpVersion && visitor->hello.kind != TcpHello::Kind::join)
        continue;  // of a run that is over
      const std::string mistake = mistake_in(*visitor, mine, there);
      if (!mistake.empty()) {
        send_reply(visitor->socket, true, mistake, tcp_deadline(kAnswerSeconds));
        tell_all(mistake);
      }
      visitor->socket.configure(options.silence_seconds);
      ports[index(visitor->hello.rank)] = static_cast<int>(visitor->hello.port);
      there[index(visitor->hello.rank)] = std::move(visitor->socket);
    }
    for (int r = 1; r < options.size; ++r) {  // they wait for an answer and say nothing
      char byte = 0;
      if (!there[index(r)] || there[index(r)].receive_some(&byte, 1) == 0) continue;
      there[index(r)].close();
      tell_all(fmt::format("rank {} of {} went away before all ranks were there", r, options.size));
    }
  }
  return there;
}

// A rank but the first: connects to rank 0, which may come later.
TcpSocket reach_first(const TcpOptions& options, TcpDeadline deadline) {
  std::string problem = options.file.empty() ? "" : "the file is not there";
  for (int attempt = 0; std::chrono::steady_clock::now() < deadline; ++attempt) {
    // The file may be one that an earlier run has left: read it again before each attempt.
    const auto address = options.file.empty()
                             ? parse_tcp_address(options.address, "the address of rank 0")
                             : read_rendezvous_file(options.file, options.token);
    if (address) {
      try {
        TcpSocket socket = tcp_connect(*address, attempt);
        const TcpDeadline patience = std::min(deadline, tcp_deadline(kAnswerSeconds));
        std::vector<pollfd> one{{socket.fd(), POLLOUT, 0}};
        while (one[0].revents == 0 && std::chrono::steady_clock::now() < patience) tcp_poll(one);
        problem = one[0].revents == 0 ? "no answer" : socket.connect_error();
        if (problem.empty()) return socket;
      } catch (const Error& error) {
        problem = error.what();
      }
      problem = fmt::format("{}: {}", address->text(), problem);
    }
    std::this_thread::sleep_for(
        std::chrono::milliseconds(std::min(10 << std::min(attempt, 5), 200)));
  }
  fail(
      "rank {} of {} did not reach rank 0 {} {} within {} s ({}): is rank 0 started, with the same "
      "{}?",
      options.rank, options.size, options.file.empty() ? "at" : "by the file",
      options.file.empty() ? options.address : options.file, options.join_seconds, problem,
      options.file.empty() ? "address" : "file and token");
}

// All ranks' reports come to the first, and all get the same outcome.
void agree(const TcpLinks& star, int rank, const std::string& error, double seconds) {
  if (rank != 0) {
    send_reply(star[0], !error.empty(), error, tcp_deadline(seconds));
    receive_reply(star[0], "rank 0", tcp_deadline(seconds));
    return;
  }
  std::string first = error;
  for (int r = 1; r < static_cast<int>(star.size()); ++r) {
    try {
      receive_reply(star[index(r)], fmt::format("rank {}", r), tcp_deadline(seconds));
    } catch (const Error& other) {
      if (first.empty()) first = other.what();
    }
  }
  for (int r = 1; r < static_cast<int>(star.size()); ++r) {
    send_reply(star[index(r)], !first.empty(), first, tcp_deadline(kAnswerSeconds));
  }
  if (!first.empty()) fail("{}", first);
}

}  // namespace

TcpMeeting meet(const TcpOptions& options) {
  const TcpDeadline deadline = tcp_deadline(options.join_seconds);
  const auto ranks = index(options.size);
  TcpMeeting meeting;
  TcpSocket listener;
  TcpLinks star(ranks);
  std::vector<Place> places(ranks);
  if (options.rank == 0) {
    listener = tcp_listen(options.file.empty()
                              ? parse_tcp_address(options.address, "the address of rank 0")
                              : TcpAddress{"127.0.0.1", 0});
    std::optional<RendezvousFile> file;
    if (!options.file.empty()) file.emplace(options.file, listener.here(), options.token);
    std::vector<int> ports(ranks);
    star = gather(options, listener, deadline, ports);
    for (int r = 0; r < options.size; ++r) {
      const TcpAddress at = r == 0 ? listener.here() : star[index(r)].there();
      at.host.copy(places[index(r)].host, sizeof(Place::host) - 1);
      places[index(r)].port = static_cast<std::uint32_t>(r == 0 ? at.port : ports[index(r)]);
    }
    const std::string body(reinterpret_cast<const char*>(places.data()), ranks * sizeof(Place));
    for (std::size_t r = 1; r < ranks; ++r) send_reply(star[r], false, body, deadline);
  } else {
    star[0] = reach_first(options, deadline);
    star[0].configure(options.silence_seconds);
    listener = tcp_listen({star[0].here().host, 0});
    TcpHello hello = tcp_hello(TcpHello::Kind::join, options.rank, options.size, options.token);
    hello.port = static_cast<std::uint32_t>(listener.here().port);
    tcp_send_all(star[0], &hello, sizeof hello, deadline);
    const TcpAddress first = star[0].there();
    // Rank 0 may have begun to wait later; it tells when its time is over.
    const std::string body =
        receive_reply(star[0], fmt::format("rank 0 ({})", first.text()),
                      tcp_deadline(2.0 * options.join_seconds + kAnswerSeconds));
    SHERD_CHECK(body.size() == ranks * sizeof(Place), "rank 0 gave {} bytes of places, expected {}",
                body.size(), ranks * sizeof(Place));
    std::memcpy(places.data(), body.data(), body.size());
    // The first may listen at more than one address; this one was good.
    std::memset(places[0].host, 0, sizeof(Place::host));
    first.host.copy(places[0].host, sizeof(Place::host) - 1);
  }
  meeting.listen_at = {listener.here().host, 0};
  TcpMesh mesh{options.rank, {}, 0, options.token, options.silence_seconds};
  for (const Place& place : places) {
    meeting.hosts.emplace_back(place.host);
    mesh.places.push_back({place.host, static_cast<int>(place.port)});
  }
  std::string error;
  try {
    meeting.layers = connect_mesh(mesh, listener, 2, tcp_deadline(options.join_seconds), [] {});
  } catch (const Error& problem) {
    error = problem.what();
  }
  agree(star, options.rank, error, options.join_seconds + kAnswerSeconds);
  return meeting;
}

}  // namespace sherd
