// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sherd/comm/tcp_rendezvous_file.h>
#include <sherd/runtime/error.h>
#include <unistd.h>
#include <xxhash.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace sherd {
namespace {

constexpr std::size_t kMost = 512;  // bytes of such a file

std::string first_line(const std::string& token) {
  return fmt::format("sherd rendezvous 1 {:016x}\n", XXH3_64bits(token.data(), token.size()));
}

std::string text_of(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    SHERD_CHECK(errno == ENOENT, "cannot read the rendezvous file '{}': {}", path,
                std::strerror(errno));
    return "";
  }
  std::string text(kMost, '\0');
  const ssize_t got = ::read(fd, text.data(), text.size());
  ::close(fd);
  text.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
  return text;
}

}  // namespace

RendezvousFile::RendezvousFile(std::string path, const TcpAddress& address,
                               const std::string& token)
    : path_(std::move(path)), text_(first_line(token) + address.text() + "\n") {
  std::string temporary = path_ + ".XXXXXX";
  const int fd = ::mkstemp(temporary.data());  // readable by its owner alone
  bool good = fd >= 0;
  if (good) {
    good = ::write(fd, text_.data(), text_.size()) == static_cast<ssize_t>(text_.size());
    good = ::close(fd) == 0 && good;
    good = good && std::rename(temporary.c_str(), path_.c_str()) == 0;
  }
  const int error = errno;
  if (!good && fd >= 0) ::unlink(temporary.c_str());
  SHERD_CHECK(good, "cannot write the rendezvous file '{}': {}", path_, std::strerror(error));
}

RendezvousFile::~RendezvousFile() {
  try {
    if (text_of(path_) == text_) ::unlink(path_.c_str());
  } catch (const Error&) {
    // It is not to be read any more: another's.
  }
}

std::optional<TcpAddress> read_rendezvous_file(const std::string& path, const std::string& token) {
  const std::string text = text_of(path), expected = first_line(token);
  if (!text.starts_with(expected) || !text.ends_with('\n') || text.size() == expected.size())
    return {};
  return parse_tcp_address(
      std::string_view(text).substr(expected.size(), text.size() - expected.size() - 1), path);
}

}  // namespace sherd
