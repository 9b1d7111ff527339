// SPDX-License-Identifier: Apache-2.0
// The ledger knows what every allocated byte is for.
//
// It counts rounded live bytes in the order in which the host program allocates and releases, on
// every device alike. So its peak is deterministic, and the peak of a run on `meta` equals the peak
// of the same run on a real device. Not thread-safe: the host thread of a context owns it.
#pragma once

#include <sherd/runtime/api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

namespace sherd {

enum class MemoryCategory : std::uint8_t {
  parameters,
  gradients,
  optimizer_state,
  activations,
  gathered_parameters,
  communication,
  workspace,
  inputs,
  checkpoint,  // copies that are being written
};
inline constexpr std::size_t kMemoryCategories = 9;

SHERD_API std::string_view name_of(MemoryCategory category);

// Bytes by category.
using MemoryBreakdown = std::array<std::int64_t, kMemoryCategories>;

class SHERD_API Ledger {
 public:
  void add(MemoryCategory category, std::int64_t bytes);
  void remove(MemoryCategory category, std::int64_t bytes);

  const MemoryBreakdown& live() const { return live_; }
  std::int64_t live(MemoryCategory category) const { return live_[index(category)]; }
  std::int64_t live_total() const { return total_; }

  // The highest total since the last reset, what it was made of at that moment, and each category's
  // own highest value (those may come from different moments).
  std::int64_t peak_total() const { return peak_total_; }
  const MemoryBreakdown& at_peak() const { return at_peak_; }
  const MemoryBreakdown& peaks() const { return peaks_; }
  void reset_peak();

  // Calls after each change of a category.
  void watch(std::function<void(MemoryCategory)> changed) { changed_ = std::move(changed); }

 private:
  static std::size_t index(MemoryCategory category) { return static_cast<std::size_t>(category); }

  MemoryBreakdown live_{}, peaks_{}, at_peak_{};
  std::int64_t total_ = 0, peak_total_ = 0;
  std::function<void(MemoryCategory)> changed_;
};

// "12.3 MiB"
SHERD_API std::string format_bytes(std::int64_t bytes);
// "parameters 1.0 MiB, activations 3.2 MiB" (categories that hold nothing are left out).
SHERD_API std::string format_breakdown(const MemoryBreakdown& bytes);

}  // namespace sherd
