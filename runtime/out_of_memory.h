// SPDX-License-Identifier: Apache-2.0
// The error of an allocation that its limit or the system refuses.
#pragma once

#include <sherd/runtime/error.h>
#include <sherd/runtime/ledger.h>

namespace sherd {

// Where memory is: with the device that computes, or with its host.
enum class MemoryPool : std::uint8_t { device, host };

class SHERD_API OutOfMemory : public Error {
 public:
  // limit 0: the system refused. `ledger`: of the pool.
  OutOfMemory(MemoryPool pool, MemoryCategory category, std::int64_t bytes, std::int64_t limit,
              const Ledger& ledger);
  // The same error with a place before its message: "backward of linear".
  OutOfMemory(const std::string& place, const OutOfMemory& error);
  ~OutOfMemory() override;

  MemoryPool pool() const { return pool_; }
  MemoryCategory category() const { return category_; }  // of what was asked for
  std::int64_t bytes() const { return bytes_; }
  std::int64_t limit() const { return limit_; }
  const MemoryBreakdown& live() const { return live_; }  // when it was

 private:
  MemoryPool pool_;
  MemoryCategory category_;
  std::int64_t bytes_, limit_;
  MemoryBreakdown live_;
};

}  // namespace sherd
