// SPDX-License-Identifier: Apache-2.0
// Connects every pair of ranks; Note [Rendezvous] is in tcp_rendezvous.h.
#include <sherd/comm/tcp_hello.h>
#include <sherd/comm/tcp_rendezvous.h>
#include <sherd/runtime/error.h>

#include <algorithm>

namespace sherd {
namespace {

constexpr double kAnswerSeconds = 1.0;

// The connections of this rank to the lower ones, which are under way.
struct Outgoing {
  TcpSocket socket;
  int rank, layer;
};

class MeshMaker {
 public:
  MeshMaker(const TcpMesh& mesh, const TcpSocket& listener, int layers)
      : mesh_(mesh), visitors_(listener) {
    for (int layer = 0; layer < layers; ++layer) made_.emplace_back(mesh_.places.size());
    missing_ = (size() - 1) * layers;
    for (int r = 0; r < mesh_.rank; ++r) {
      for (int layer = 0; layer < layers; ++layer)
        outgoing_.push_back({tcp_connect(mesh_.places[static_cast<std::size_t>(r)]), r, layer});
    }
  }

  bool complete() const { return missing_ == 0; }

  void step() {
    std::vector<pollfd> sockets;
    for (const Outgoing& one : outgoing_) sockets.push_back({one.socket.fd(), POLLOUT, 0});
    const std::size_t connecting = sockets.size();
    visitors_.add_to(sockets);
    tcp_poll(sockets);
    for (std::size_t i = connecting; i-- > 0;) {
      if (sockets[i].revents == 0) continue;
      introduce(outgoing_[i]);
      outgoing_.erase(outgoing_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    while (auto visitor = visitors_.next()) let_in(*visitor);
  }

  std::vector<TcpLinks> take() { return std::move(made_); }

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int r = 0; r < size(); ++r) {
      const bool here = std::ranges::all_of(
          made_, [&](const TcpLinks& links) { return bool(links[static_cast<std::size_t>(r)]); });
      if (r != mesh_.rank && !here) ranks.push_back(r);
    }
    return ranks;
  }

 private:
  int size() const { return static_cast<int>(mesh_.places.size()); }

  void introduce(Outgoing& one) {
    const std::string problem = one.socket.connect_error();
    SHERD_CHECK(problem.empty(), "rank {} cannot connect to rank {} at {}: {}", mesh_.rank,
                one.rank, mesh_.places[static_cast<std::size_t>(one.rank)].text(), problem);
    TcpHello hello = tcp_hello(TcpHello::Kind::link, mesh_.rank, size(), mesh_.token);
    hello.group = mesh_.group;
    hello.layer = static_cast<std::uint32_t>(one.layer);
    // The first bytes of a connection always have room.
    const bool said = one.socket.send_some(&hello, sizeof hello) == sizeof hello;
    SHERD_CHECK(said, "rank {} cannot talk to rank {}: the connection ended", mesh_.rank, one.rank);
    keep(std::move(one.socket), one.rank, one.layer);
  }

  // A higher rank. What is not of this mesh is dropped.
  void let_in(TcpVisitors::Visitor& visitor) {
    const TcpHello& hello = visitor.hello;
    if (hello.version != kTcpVersion) return;
    if (hello.kind == TcpHello::Kind::join) {
      send_reply(visitor.socket, true,
                 "all ranks of the run at this address are there already, and one more came",
                 tcp_deadline(kAnswerSeconds));
      return;
    }
    const TcpHello mine = tcp_hello(TcpHello::Kind::link, mesh_.rank, size(), mesh_.token);
    if (!same_token(hello, mine) || hello.group != mesh_.group || hello.size != size() ||
        hello.rank <= mesh_.rank || hello.rank >= size() || hello.layer >= made_.size() ||
        made_[hello.layer][static_cast<std::size_t>(hello.rank)])
      return;
    keep(std::move(visitor.socket), hello.rank, static_cast<int>(hello.layer));
  }

  void keep(TcpSocket socket, int rank, int layer) {
    socket.configure(mesh_.silence_seconds);
    made_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(rank)] = std::move(socket);
    --missing_;
  }

  const TcpMesh& mesh_;
  TcpVisitors visitors_;
  std::vector<TcpLinks> made_;
  std::vector<Outgoing> outgoing_;
  int missing_ = 0;
};

}  // namespace

std::vector<TcpLinks> connect_mesh(const TcpMesh& mesh, const TcpSocket& listener, int layers,
                                   TcpDeadline deadline, const std::function<void()>& check) {
  MeshMaker maker(mesh, listener, layers);
  while (!maker.complete()) {
    maker.step();
    check();
    SHERD_CHECK(maker.complete() || std::chrono::steady_clock::now() < deadline,
                "rank {} has no connection with rank {} in time: does a firewall keep {} from the "
                "ports of the others?",
                mesh.rank, fmt::join(maker.missing(), ", "),
                mesh.places[static_cast<std::size_t>(mesh.rank)].host);
  }
  return maker.take();
}

}  // namespace sherd
