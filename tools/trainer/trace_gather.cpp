// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/trainer/trace_gather.h>

#include <fmt/format.h>
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/file.h>

#include <filesystem>
#include <functional>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

namespace sherd {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kPiece = std::size_t{1} << 18;  // bytes of one message, or an event more
constexpr const char* kLabel = "traces: a part";

// Takes what Trace::write_json writes, which is a head, one event a line, and an end; hands on the
// events in pieces "event,\nevent".
class EventLines {
 public:
  explicit EventLines(std::function<void(std::string_view)> sink) : sink_(std::move(sink)) {}

  void take(std::string_view text) {
    line_ += text;
    std::size_t begin = 0;
    for (std::size_t end = 0; (end = line_.find('\n', begin)) != std::string::npos;
         begin = end + 1) {
      take_line(std::string_view(line_).substr(begin, end - begin));
    }
    line_.erase(0, begin);
  }

  // What the head said: the trace's otherData. At the end.
  Json finish() {
    if (!piece_.empty()) sink_(std::exchange(piece_, {}));
    return Json::parse(head_ + "]}").at("otherData");
  }

 private:
  void take_line(std::string_view line) {
    if (head_.empty()) {
      head_ = line;
      return;
    }
    if (line == "]}") return;
    if (line.ends_with(',')) line.remove_suffix(1);
    if (!piece_.empty()) piece_ += ",\n";
    piece_ += line;
    if (piece_.size() < kPiece) return;
    sink_(piece_);
    piece_.clear();
  }

  std::function<void(std::string_view)> sink_;
  std::string line_, head_, piece_;
};

// Hands the events to `sink`; returns what else is to be said of this part.
Json part_of(const Trace& trace, int rank, const ClockOffset& offset,
             const std::function<void(std::string_view)>& sink) {
  Json part{{"rank", rank}};
  try {
    EventLines lines(sink);
    trace.write_json([&](std::string_view text) { lines.take(text); });
    part.update(lines.finish());
  } catch (const std::bad_alloc&) {
    part["error"] = "the system has no memory left";
  }
  part["clock_offset_seconds"] = offset.seconds;
  part["clock_uncertainty_seconds"] = offset.uncertainty;
  return part;
}

// The file of all parts. After an error of the system it takes the rest and drops it.
class TraceFileWriter {
 public:
  TraceFileWriter(const std::string& path, int ranks) : ranks_(ranks) {
    attempt([&] {
      file_.emplace(path);
      file_->write("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
    });
  }

  void add(std::string_view events) {
    attempt([&] {
      if (!std::exchange(first_, false)) file_->write(",\n");
      file_->write(events);
    });
  }

  void end_part(const Json& part) {
    if (part.contains("error")) {
      add_incomplete(fmt::format("rank {}: {}", part.at("rank").get<int>(),
                                 part.at("error").get<std::string>()));
    }
    parts_.push_back(part);
  }

  // Returns what went wrong.
  std::string finish(const std::string& reason = {}) {
    Json other{{"program", "sherd"}, {"ranks", ranks_}, {"parts", parts_}};
    if (!reason.empty()) add_incomplete(reason);
    if (!incomplete_.empty()) other["incomplete"] = incomplete_;
    attempt([&] {
      file_->write("\n],\"otherData\":" +
                   other.dump(-1, ' ', false, Json::error_handler_t::replace) + "}\n");
      file_->commit();
    });
    return error_;
  }

 private:
  void add_incomplete(const std::string& what) {
    incomplete_ += (incomplete_.empty() ? "" : "; ") + what;
  }

  void attempt(const std::function<void()>& work) {
    if (!error_.empty()) return;
    try {
      work();
    } catch (const Error& error) {
      error_ = error.what();
      file_.reset();
    }
  }

  const int ranks_;
  std::optional<AtomicFile> file_;
  std::string error_, incomplete_;
  bool first_ = true;
  Json parts_ = Json::array();
};

void send_text(Communicator& world, std::string_view text) {
  const auto size = static_cast<std::int64_t>(text.size());
  world.send(&size, 1, DType::i64, 0, kLabel);
  if (size > 0) world.send(text.data(), size, DType::u8, 0, kLabel);
}

std::string receive_text(Communicator& world, int from) {
  std::int64_t size = 0;
  world.recv(&size, 1, DType::i64, from, kLabel);
  std::string text(static_cast<std::size_t>(size), '\0');
  if (size > 0) world.recv(text.data(), size, DType::u8, from, kLabel);
  return text;
}

}  // namespace

std::string gather_trace(const Trace& trace, Communicator& world, const ClockOffset& offset,
                         const std::string& path) {
  if (world.rank() > 0) {
    const Json part = part_of(trace, world.rank(), offset,
                              [&](std::string_view events) { send_text(world, events); });
    send_text(world, {});
    send_text(world, part.dump());
    return {};
  }
  TraceFileWriter file(path, world.size());
  file.end_part(part_of(trace, 0, offset, [&](std::string_view events) { file.add(events); }));
  try {
    for (int rank = 1; rank < world.size(); ++rank) {
      for (std::string text; !(text = receive_text(world, rank)).empty();) file.add(text);
      file.end_part(Json::parse(receive_text(world, rank)));
    }
  } catch (const Error& error) {
    file.finish(error.what());
    throw;
  }
  return file.finish();
}

void write_trace_part(const Trace& trace, const Communicator& world, const ClockOffset& offset,
                      const std::string& path, const std::string& reason) {
  TraceFileWriter file(path, world.size());
  file.end_part(
      part_of(trace, world.rank(), offset, [&](std::string_view events) { file.add(events); }));
  const std::string error = file.finish(reason);
  if (!error.empty()) fail("{}", error);
}

std::string trace_part_path(const std::string& path, int rank) {
  if (rank == 0) return path;
  const std::filesystem::path whole(path);
  const std::string name =
      fmt::format("{}-rank{}{}", whole.stem().string(), rank, whole.extension().string());
  return (whole.parent_path() / name).string();
}

}  // namespace sherd
