// SPDX-License-Identifier: Apache-2.0
// Linked into a second `sherd`, in which rank 1 fails alone at the end of its third backward: no
// file, setting or limit of the system makes one rank fail at a place that is known.
#include <sherd/comm/sharding/engine.h>
#include <sherd/runtime/error.h>

namespace sherd {

// What the linker's --wrap makes of ShardingEngine::finish_backward, see tests/meson.build.
GlobalStep original(ShardingEngine* engine,
                    double loss) asm("__real__ZN5sherd14ShardingEngine15finish_backwardEd");
GlobalStep wrapper(ShardingEngine* engine,
                   double loss) asm("__wrap__ZN5sherd14ShardingEngine15finish_backwardEd");

GlobalStep wrapper(ShardingEngine* engine, double loss) {
  thread_local int calls = 0;
  if (engine->groups().world.rank() == 1 && ++calls == 3) fail("this rank has had enough");
  return original(engine, loss);
}

}  // namespace sherd
