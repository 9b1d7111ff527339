// SPDX-License-Identifier: Apache-2.0
// A TCP run as its environment describes it.
#include <sherd/comm/mpi.h>
#include <sherd/comm/tcp_communicator.h>
#include <sherd/comm/tcp_socket.h>
#include <sherd/runtime/error.h>

#include <charconv>
#include <cstdlib>

namespace sherd {
namespace {

std::string text_in(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? "" : text;
}

int number_in(const char* variable, const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  SHERD_CHECK(error == std::errc() && end == text.data() + text.size() && value >= 0,
              "{}={}: expected a whole number, 0 or more", variable, text);
  return value;
}

// The value of either variable; both must agree. None: -1.
int either(const char* ours, const char* theirs) {
  const std::string mine = text_in(ours), other = text_in(theirs);
  if (mine.empty() && other.empty()) return -1;
  const int value = mine.empty() ? number_in(theirs, other) : number_in(ours, mine);
  SHERD_CHECK(mine.empty() || other.empty() || number_in(theirs, other) == value,
              "{}={} and {}={} contradict each other: unset one of them", ours, mine, theirs,
              other);
  return value;
}

// host:port of MASTER_ADDR and MASTER_PORT; "" where they are not set.
std::string master() {
  const std::string host = text_in("MASTER_ADDR"), port = text_in("MASTER_PORT");
  if (host.empty() || port.empty()) return "";
  return TcpAddress{host, number_in("MASTER_PORT", port)}.text();
}

}  // namespace

std::optional<TcpOptions> tcp_options_from_environment() {
  const std::string ours = text_in("SHERD_RENDEZVOUS"), theirs = master();
  const bool torchrun =
      !theirs.empty() && !text_in("RANK").empty() && !text_in("WORLD_SIZE").empty();
  if (ours.empty() && !torchrun) {
    for (const char* variable : {"SHERD_RANK", "SHERD_WORLD_SIZE"}) {
      SHERD_CHECK(
          text_in(variable).empty(),
          "{}={} is set, but not where the ranks meet: set SHERD_RENDEZVOUS to host:port or "
          "file:PATH, or unset it",
          variable, text_in(variable));
    }
    return {};
  }
  SHERD_CHECK(ours.empty() || theirs.empty() || ours == theirs,
              "SHERD_RENDEZVOUS={} and MASTER_ADDR:MASTER_PORT={} contradict each other: unset one "
              "of them",
              ours, theirs);
  TcpOptions options;
  const std::string place = ours.empty() ? theirs : ours;
  if (place.starts_with("file:")) {
    options.file = place.substr(5);
    SHERD_CHECK(!options.file.empty(), "SHERD_RENDEZVOUS={}: expected a path after file:", place);
  } else {
    const TcpAddress address =
        parse_tcp_address(place, ours.empty() ? "MASTER_ADDR:MASTER_PORT" : "SHERD_RENDEZVOUS");
    SHERD_CHECK(address.port > 0,
                "SHERD_RENDEZVOUS={}: the others cannot know a port of 0; with "
                "file:PATH rank 0 takes a free one",
                place);
    options.address = place;
  }
  options.rank = either("SHERD_RANK", "RANK");
  options.size = either("SHERD_WORLD_SIZE", "WORLD_SIZE");
  if (options.rank < 0 && options.size < 0) {
    if (const std::optional<Launcher> launcher = detect_launcher()) {
      options.rank = launcher->rank;
      options.size = launcher->size;
    }
  }
  SHERD_CHECK(options.rank >= 0 && options.size >= 0,
              "the ranks meet at {}, but {} is not set, and no launcher gives it", place,
              options.rank < 0 ? "SHERD_RANK" : "SHERD_WORLD_SIZE");
  SHERD_CHECK(options.rank < options.size,
              "rank {} of {}: SHERD_RANK goes from 0 to SHERD_WORLD_SIZE - 1", options.rank,
              options.size);
  options.token = text_in("SHERD_TOKEN");
  const std::string patience = text_in("SHERD_JOIN_SECONDS");
  if (!patience.empty()) options.join_seconds = number_in("SHERD_JOIN_SECONDS", patience);
  return options;
}

}  // namespace sherd
