// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/ledger.h>

#include <algorithm>

namespace sherd {

std::string_view name_of(MemoryCategory category) {
  static constexpr std::array<std::string_view, kMemoryCategories> kNames{
      "parameters",    "gradients", "optimizer_state", "activations", "gathered_parameters",
      "communication", "workspace", "inputs",          "checkpoint"};
  return kNames[static_cast<std::size_t>(category)];
}

void Ledger::add(MemoryCategory category, std::int64_t bytes) {
  std::int64_t& live = live_[index(category)];
  live += bytes;
  total_ += bytes;
  peaks_[index(category)] = std::max(peaks_[index(category)], live);
  if (total_ > peak_total_) {
    peak_total_ = total_;
    at_peak_ = live_;
  }
  if (changed_) changed_(category);
}

void Ledger::remove(MemoryCategory category, std::int64_t bytes) {
  std::int64_t& live = live_[index(category)];
  SHERD_INTERNAL_CHECK(live >= bytes, "the ledger would release {} bytes of {} but only {} live",
                       bytes, name_of(category), live);
  live -= bytes;
  total_ -= bytes;
  if (changed_) changed_(category);
}

void Ledger::reset_peak() {
  peak_total_ = total_;
  peaks_ = live_;
  at_peak_ = live_;
}

std::string format_bytes(std::int64_t bytes) {
  static constexpr std::array<std::string_view, 6> kUnits{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

std::string format_breakdown(const MemoryBreakdown& bytes) {
  std::string text;
  for (std::size_t i = 0; i < kMemoryCategories; ++i) {
    if (bytes[i] == 0) continue;
    if (!text.empty()) text += ", ";
    text += fmt::format("{} {}", name_of(static_cast<MemoryCategory>(i)), format_bytes(bytes[i]));
  }
  return text.empty() ? "nothing" : text;
}

}  // namespace sherd
