// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <sherd/runtime/suggest.h>

#include <algorithm>

namespace sherd {
namespace {

// Edits (insert, delete, replace) between two words (Levenshtein).
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string did_you_mean(std::string_view word, const std::vector<std::string>& known) {
  const auto nearest = std::ranges::min_element(
      known, {}, [&](const std::string& name) { return edit_distance(word, name); });
  if (nearest != known.end() &&
      edit_distance(word, *nearest) <= std::max<std::size_t>(2, word.size() / 3)) {
    return fmt::format("; did you mean '{}'?", *nearest);
  }
  return fmt::format("; known: {}", fmt::join(known, ", "));
}

}  // namespace sherd
