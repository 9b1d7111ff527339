// SPDX-License-Identifier: Apache-2.0
// CostModel: how long a piece of work takes on a system.
//
//   const CostModel cost(read_system("dgx-a100"), ranks);
//   for (const Work& work : schedule.works()) total += cost.seconds(work);
#pragma once

#include <sherd/runtime/schedule.h>
#include <sherd/tools/planner/system.h>

namespace sherd {

class SHERD_API CostModel {
 public:
  // ranks: of the world, from device 0 of the first node on. Fewer than a node has devices share
  // its links, memory and disk among fewer. 0: every device has a rank.
  explicit CostModel(const System& system, int ranks = 0);

  // On the stream that the work is on. Throws where the system cannot do it: products of a type
  // that it does not have, a group over more nodes than a network joins.
  double seconds(const Work& work) const;
  // The same while a collective runs beside it all the time: products and attention have the
  // multiprocessors that the collective leaves. What is bound by memory is not slowed.
  double seconds_beside_collective(const Work& work) const;
  // Of the host, for each kernel, copy or collective that it asks for.
  double launch_seconds() const { return system_.launch_seconds; }
  const System& system() const { return system_; }

 private:
  System system_, beside_collective_;
  int ranks_;
};

}  // namespace sherd
