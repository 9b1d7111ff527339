// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/planner/trace_reader.h>

#include <sherd/runtime/error.h>
#include <sherd/runtime/io/file.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

namespace sherd {
namespace {

using Json = nlohmann::json;

// Takes the events one by one while the text is parsed, so that the tree of a large file is never
// in memory as a whole.
class Reader {
 public:
  explicit Reader(const std::string& path) { file_.path = path; }

  TraceFile read(std::string_view text) {
    SHERD_CHECK(text.find_first_not_of(" \t\r\n") != std::string_view::npos,
                "'{}' is empty, expected a trace; was the run that should write it stopped?",
                file_.path);
    Json rest;
    try {
      rest = Json::parse(text.begin(), text.end(),
                         [this](int depth, Json::parse_event_t event, Json& parsed) {
                           return take(depth, event, parsed);
                         });
    } catch (const Json::parse_error& error) {
      // One past the last byte is where the parser misses more.
      if (error.byte > text.size()) {
        fail(
            "'{}' is cut off: it ends after {} bytes in the middle of the trace; copy it again, "
            "or trace again",
            file_.path, text.size());
      }
      fail("'{}' is no JSON, at byte {}: expected a Chrome trace that sherd wrote with --trace",
           file_.path, error.byte);
    } catch (const Json::exception& error) {  // such as a number beyond all numbers
      fail("'{}' is no trace that sherd wrote with --trace: {}", file_.path, error.what());
    }
    finish(rest);
    return std::move(file_);
  }

 private:
  bool take(int depth, Json::parse_event_t event, Json& parsed) {
    using Kind = Json::parse_event_t;
    if (depth == 1 && event == Kind::key) {
      in_events_ = parsed == "traceEvents";
      if (in_events_) seen_events_ = true;
      return true;
    }
    if (!in_events_ || depth != 2 ||
        (event != Kind::object_end && event != Kind::array_end && event != Kind::value)) {
      return true;
    }
    ++number_;
    if (!parsed.is_object()) bad("is no object");
    take_event(parsed);
    return false;
  }

  [[noreturn]] void bad(const std::string& what) const {
    fail("'{}': event {} {}; expected a trace that sherd wrote", file_.path, number_, what);
  }

  const Json& field(const Json& event, const char* name) const {
    const auto found = event.find(name);
    if (found == event.end()) bad(fmt::format("has no '{}'", name));
    return *found;
  }
  std::string string_of(const Json& event, const char* name) const {
    const Json& value = field(event, name);
    if (!value.is_string()) bad(fmt::format("has {} for '{}', not a text", value.dump(), name));
    return value.get<std::string>();
  }
  double number_of(const Json& event, const char* name) const {
    const Json& value = field(event, name);
    if (!value.is_number()) bad(fmt::format("has {} for '{}', not a number", value.dump(), name));
    return value.get<double>();
  }
  int index_of(const Json& event, const char* name) const {
    const Json& value = field(event, name);
    if (!value.is_number_integer() || value < 0 || value > (1 << 20)) {
      bad(fmt::format("has {} for '{}', not a small whole number", value.dump(), name));
    }
    return value.get<int>();
  }

  void take_event(const Json& event) {
    const std::string kind = string_of(event, "ph"), name = string_of(event, "name");
    TraceFile::Rank& rank = rank_of(index_of(event, "pid"));
    if (kind == "M") return take_metadata(event, name, rank);
    const double time = number_of(event, "ts");
    if (kind == "C") {
      rank.counters.push_back({intern(name), time, number_of(field(event, "args"), "value")});
      return;
    }
    const std::uint32_t category = intern(string_of(event, "cat"));
    if (kind == "i") {
      rank.instants.push_back({intern(name), category, time});
    } else if (kind == "X") {
      const double duration = number_of(event, "dur");
      if (!(duration >= 0.0)) bad(fmt::format("lasts {} microseconds", duration));
      const bool later = event.contains("args") && event["args"].contains("issued");
      rank.events.push_back({intern(name), category, index_of(event, "tid"), time, duration,
                             later ? number_of(event["args"], "issued") : time});
    } else {
      bad(fmt::format("is of phase '{}', which sherd does not write", kind));
    }
  }

  void take_metadata(const Json& event, const std::string& name, TraceFile::Rank& rank) {
    if (name != "thread_name") return;
    const auto track = static_cast<std::size_t>(index_of(event, "tid"));
    if (track != rank.tracks.size()) bad(fmt::format("names track {} out of order", track));
    rank.tracks.push_back(string_of(field(event, "args"), "name"));
  }

  TraceFile::Rank& rank_of(int rank) {
    TraceFile::Rank& found = ranks_[rank];
    found.rank = rank;
    return found;
  }

  std::uint32_t intern(const std::string& text) {
    const auto [at, made] = texts_.try_emplace(text, static_cast<std::uint32_t>(texts_.size()));
    if (made) file_.texts.push_back(text);
    return at->second;
  }

  void finish(const Json& rest) {
    const auto other = rest.is_object() ? rest.find("otherData") : rest.end();
    const bool ours = rest.is_object() && other != rest.end() && other->is_object() &&
                      (other->contains("recorded_events") || other->contains("parts"));
    SHERD_CHECK(ours && seen_events_,
                "'{}' is JSON, but not a trace of sherd's: expected an object with traceEvents and "
                "otherData.parts, as --trace writes it",
                file_.path);
    try {
      if (other->contains("parts")) {
        for (const Json& part : other->at("parts")) take_part(part);
        file_.incomplete = other->value("incomplete", std::string());
      } else {
        take_part(*other);
      }
    } catch (const Json::exception& error) {
      fail("'{}': otherData is not as sherd writes it: {}", file_.path, error.what());
    }
    for (auto& [number, rank] : ranks_) {
      for (const TraceFile::Event& event : rank.events) {
        SHERD_CHECK(
            static_cast<std::size_t>(event.track) < rank.tracks.size(),
            "'{}': '{}' of rank {} is on track {}, which has no name; expected a trace that "
            "sherd wrote",
            file_.path, file_.text(event.name), number, event.track);
      }
      file_.ranks.push_back(std::move(rank));
    }
  }

  void take_part(const Json& part) {
    TraceFile::Rank& rank = rank_of(part.at("rank").get<int>());
    rank.dropped = part.value("dropped_events", std::int64_t{0});
    rank.clock_offset = part.value("clock_offset_seconds", 0.0);
    rank.clock_uncertainty = part.value("clock_uncertainty_seconds", 0.0);
    // A part that broke off says how much there was of it only where it is whole.
    if (!part.contains("recorded_events") || part.contains("error")) return;
    const auto expected = part.at("recorded_events").get<std::size_t>();
    const std::size_t got = rank.events.size() + rank.instants.size() + rank.counters.size();
    SHERD_CHECK(got == expected, "'{}': rank {} has {} events, expected {}; was it edited?",
                file_.path, rank.rank, got, expected);
  }

  TraceFile file_;
  std::map<int, TraceFile::Rank> ranks_;
  std::unordered_map<std::string, std::uint32_t> texts_;
  std::int64_t number_ = 0;  // of the event
  bool in_events_ = false, seen_events_ = false;
};

}  // namespace

TraceFile read_trace(const std::string& path) {
  const MappedFile file(path);
  const auto bytes = file.bytes();
  return read_trace_text({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path);
}

TraceFile read_trace_text(std::string_view text, const std::string& path) {
  return Reader(path).read(text);
}

}  // namespace sherd
