// SPDX-License-Identifier: Apache-2.0
// What the engine did, in the order in which it asked for it: the schedule of a step as a list.
#pragma once

#include <sherd/runtime/api.h>

#include <string>
#include <vector>

namespace sherd {

struct ShardingEvent {
  enum class Kind : std::uint8_t {
    unshard,        // the gather of a unit that is needed now has been asked for
    prefetch,       // the gather of one that will be needed next
    wait,           // its parameters have arrived
    forward,        // its module starts to compute
    backward,       // its module's backward starts
    reshard,        // gathered parameters are released
    drop,           // ... of a unit that was prefetched and not needed
    reduce,         // the sum of its gradients over the ranks has been asked for
    wait_reduce,    // it has arrived
    fetch,          // what a unit keeps in files for its update is being read
    update,         // the optimizer starts on it
    store,          // it is being written back
    gather_update,  // full parameters are gathered after the optimizer has updated shards
  };
  Kind kind = Kind::unshard;
  std::string unit;

  SHERD_API std::string to_string() const;  // "prefetch blocks.1"
  bool operator==(const ShardingEvent&) const = default;
};

}  // namespace sherd
