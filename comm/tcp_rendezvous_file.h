// SPDX-License-Identifier: Apache-2.0
// The file by which ranks of one machine learn where rank 0 listens. It carries a hash of the run's
// token, so that one left by another run is not taken for this one's; where tokens are equal too,
// nobody listens there any more, and the file is read again.
#pragma once

#include <sherd/comm/tcp_socket.h>

#include <optional>
#include <string>

namespace sherd {

class RendezvousFile {
 public:
  // Written whole or not at all, for this user's eyes.
  RendezvousFile(std::string path, const TcpAddress& address, const std::string& token);
  ~RendezvousFile();  // removes it, unless another run has replaced it
  RendezvousFile(const RendezvousFile&) = delete;
  RendezvousFile& operator=(const RendezvousFile&) = delete;

 private:
  std::string path_, text_;
};

// None where there is no such file, or one of another run.
std::optional<TcpAddress> read_rendezvous_file(const std::string& path, const std::string& token);

}  // namespace sherd
