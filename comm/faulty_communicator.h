// SPDX-License-Identifier: Apache-2.0
// A communicator that breaks another one, for tests of what several ranks do to each other.
#pragma once

#include <sherd/comm/communicator.h>

namespace sherd {

// What to break, for tests: one call of this rank, or all.
struct Fault {
  enum class Kind {
    delay,            // sleeps first
    fail,             // throws the reason
    different_label,  // another label than the others'
    drop,             // skips the call
    reorder,          // holds the call back until the next one is done; buffers must live so long
  };
  Kind kind = Kind::delay;
  std::int64_t call = 0;       // number, from 0, among those whose label matches; -1: every one
  double delay_seconds = 0.0;  // of delay
  std::string reason = "injected fault";
  std::string label = "";  // only calls whose label contains this
};
// Passes every call on to `inner`, with faults. Those with a label, or of every call, also hold in
// groups split from it, which count calls of their own.
SHERD_API std::unique_ptr<Communicator> make_faulty_communicator(
    std::unique_ptr<Communicator> inner, std::vector<Fault> faults);

}  // namespace sherd
