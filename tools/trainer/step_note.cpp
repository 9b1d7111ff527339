// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <sherd/tools/trainer/step_note.h>

#include <array>
#include <charconv>
#include <utility>

namespace sherd {
namespace {

constexpr std::array<std::pair<std::string_view, bool StepNote::*>, 3> kMarks{
    {{", first", &StepNote::first},
     {", graph", &StepNote::graph},
     {", skipped", &StepNote::skipped}}};

bool take(std::string_view& text, std::string_view piece) {
  if (!text.starts_with(piece)) return false;
  text.remove_prefix(piece.size());
  return true;
}

bool take(std::string_view& text, std::int64_t& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{}) return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return true;
}

}  // namespace

std::string to_text(const StepNote& note) {
  std::string text = fmt::format("step {}: {} samples", note.step, note.samples);
  for (const auto& [mark, field] : kMarks) {
    if (note.*field) text += mark;
  }
  return text;
}

std::optional<StepNote> step_note_from_text(std::string_view text) {
  StepNote note;
  if (!take(text, "step ") || !take(text, note.step) || !take(text, ": ") ||
      !take(text, note.samples) || !take(text, " samples")) {
    return {};
  }
  for (const auto& [mark, field] : kMarks) note.*field = take(text, mark);
  if (!text.empty()) return {};
  return note;
}

}  // namespace sherd
