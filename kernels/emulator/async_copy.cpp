// SPDX-License-Identifier: Apache-2.0
// cp.async: what a thread issued is copied when it waits for the group.
#include <cstring>

#include "block.h"

namespace emulator {
namespace {

Thread& me() {
  return *block->current;
}

}  // namespace

// Not hidden from the sanitizers: the destination is lost from here on, whoever still reads it.
void copy_async(void* to, const void* from, int bytes, int source_bytes, Location where) {
  check_shared(to, static_cast<std::size_t>(bytes), "cp.async", where);
  if (source_bytes < 0 || source_bytes > bytes) {
    fail(where, "cp.async: the bytes to read are not between 0 and the size of the copy");
  }
  if (reinterpret_cast<std::uintptr_t>(from) % static_cast<unsigned>(bytes) != 0) {
    fail(where, "cp.async: the source address is not a multiple of the size of the copy");
  }
  if (EMULATOR_ASAN && source_bytes > 0) {  // so that it names the copy, not the wait
    static_cast<void>(static_cast<const volatile char*>(from)[source_bytes - 1]);
  }
  std::memset(to, 0xFF, static_cast<std::size_t>(bytes));
  const Hidden hidden;
  me().copies.push_back({static_cast<char*>(to), static_cast<const char*>(from), bytes,
                         source_bytes, me().copy_group, where});
}

void cp_async_commit() {
  ++me().copy_group;
}

void wait_copies(int groups_left) {
  hide_begin();
  std::vector<PendingCopy>& copies = me().copies;
  const int done = me().copy_group - groups_left;  // groups below this number
  std::size_t kept = 0;
  for (PendingCopy& copy : copies) {
    if (copy.group < done) {
      const PendingCopy c = copy;
      hide_end();
      std::memcpy(c.to, c.from, static_cast<std::size_t>(c.source_bytes));
      std::memset(c.to + c.source_bytes, 0, static_cast<std::size_t>(c.bytes - c.source_bytes));
      hide_begin();
    } else {
      copies[kept++] = copy;
    }
  }
  copies.resize(kept);
  hide_end();
}

}  // namespace emulator
