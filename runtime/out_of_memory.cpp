// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/out_of_memory.h>

namespace sherd {
namespace {

std::string describe(MemoryPool pool, MemoryCategory category, std::int64_t bytes,
                     std::int64_t limit, const Ledger& ledger) {
  const char* where = pool == MemoryPool::host ? "host " : "";
  const std::string held =
      fmt::format("in use: {}; the most so far: {}", format_breakdown(ledger.live()),
                  format_bytes(ledger.peak_total()));
  if (limit == 0) {
    return fmt::format("out of {}memory: the system refused {} more for {}; {}", where,
                       format_bytes(bytes), name_of(category), held);
  }
  return fmt::format(
      "out of {}memory: {} more for {} would exceed the limit of {}; {}. Raise the {}memory limit, "
      "or {}",
      where, format_bytes(bytes), name_of(category), format_bytes(limit), held, where,
      pool == MemoryPool::host ? "keep less there" : "lower the batch size");
}

}  // namespace

OutOfMemory::OutOfMemory(MemoryPool pool, MemoryCategory category, std::int64_t bytes,
                         std::int64_t limit, const Ledger& ledger)
    : Error(describe(pool, category, bytes, limit, ledger)),
      pool_(pool),
      category_(category),
      bytes_(bytes),
      limit_(limit),
      live_(ledger.live()) {}

OutOfMemory::OutOfMemory(const std::string& place, const OutOfMemory& error)
    : Error(fmt::format("{}: {}", place, error.what())),
      pool_(error.pool_),
      category_(error.category_),
      bytes_(error.bytes_),
      limit_(error.limit_),
      live_(error.live_) {}

OutOfMemory::~OutOfMemory() = default;

}  // namespace sherd
