// SPDX-License-Identifier: Apache-2.0
// What the processes of a TCP run tell each other beside their data.
//
// Note [TCP connections]
// Each pair of processes has one connection for notices (a group has ended and why, a rank has left
// a group, a process is done), and each pair of ranks of a group one of its own for data. Data of a
// group is read by its ranks' own calls alone, straight into buffers of fixed size, so nothing
// piles up and no group can block another; notices are small and read by whoever waits, so an abort
// does not stand in line behind data. A rank says on the first connection that it leaves a group
// before it closes the others: where data ends without that word or a goodbye, the process is
// dead, and that ends all groups.
#pragma once

#include <sherd/comm/tcp_rendezvous.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace sherd {

class TcpWorld {
 public:
  // links: to every process but this one, by number.
  TcpWorld(const TcpOptions& options, TcpAddress listen_at, std::vector<std::string> hosts,
           TcpLinks links);
  ~TcpWorld();  // says goodbye

  int process() const { return process_; }
  const std::string& host(int process) const { return hosts_[static_cast<std::size_t>(process)]; }
  const TcpAddress& listen_at() const { return listen_at_; }
  const TcpOptions& options() const { return options_; }
  std::uint64_t next_group();  // a number that no other process gives

  // Groups, by number. Any thread.
  void end(std::uint64_t group, const std::vector<int>& processes, const std::string& reason);
  void leave(std::uint64_t group, const std::vector<int>& processes);
  // Reads what has come. The first reason stays; a dead process is one for every group.
  std::string end_reason(std::uint64_t group);
  bool has_left(std::uint64_t group, int process);  // or is done with all of them

  void add_to(std::vector<pollfd>& sockets);  // what to wait for beside data

 private:
  struct Peer {
    TcpSocket socket;
    std::string in, out;  // a notice that is not complete, and what has not gone yet
    bool done = false;
  };
  struct News {
    std::string reason;
    std::set<int> left;
    std::size_t others = 0;
    bool left_here = false;  // and then the number of others is known
  };

  void tell(int process, std::uint32_t kind, std::uint64_t group, const std::string& text);
  void look();
  void read_from(int process);
  void take(int process, std::uint32_t kind, std::uint64_t group, std::string text);
  void flush(Peer& peer);
  void lose(int process);
  void forget(std::uint64_t group);

  const TcpOptions options_;
  const TcpAddress listen_at_;
  const std::vector<std::string> hosts_;
  const int process_;
  std::mutex mutex_;
  std::uint64_t groups_ = 0;
  std::vector<Peer> peers_;
  std::string death_;  // of the first process that died
  std::map<std::uint64_t, News> news_;
};

}  // namespace sherd
