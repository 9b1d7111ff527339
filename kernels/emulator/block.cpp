// SPDX-License-Identifier: Apache-2.0
#include "block.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>

EMULATOR_THREAD_LOCAL uint3 threadIdx;
EMULATOR_THREAD_LOCAL uint3 blockIdx;
EMULATOR_THREAD_LOCAL dim3 blockDim;
EMULATOR_THREAD_LOCAL dim3 gridDim;

namespace emulator {

EMULATOR_THREAD_LOCAL unsigned lane;
EMULATOR_THREAD_LOCAL Context* running;
EMULATOR_THREAD_LOCAL Block* block;

namespace {

struct OrderSetting {
  Order order = Order::forward;
  std::uint64_t seed = 0;
};

OrderSetting order_of_environment() {
  const char* text = std::getenv("EMULATOR_ORDER");
  if (text == nullptr || std::strcmp(text, "forward") == 0) return {};
  if (std::strcmp(text, "reverse") == 0) return {Order::reverse, 0};
  if (std::strncmp(text, "random:", 7) == 0) {
    char* end;
    const std::uint64_t seed = std::strtoull(text + 7, &end, 10);
    if (end != text + 7 && *end == '\0') return {Order::random, seed};
  }
  report(std::string("EMULATOR_ORDER: expected forward, reverse or random:SEED, got ") + text +
         "\n");
  return {};
}

struct OrderSwitch {
  std::atomic<Order> order;
  std::atomic<std::uint64_t> seed;
  explicit OrderSwitch(OrderSetting s) : order(s.order), seed(s.seed) {}
};
OrderSwitch& order_switch() {
  static OrderSwitch setting(order_of_environment());
  return setting;
}

int pick_lane(Block& b, unsigned ready) {
  if (b.order == Order::forward) return __builtin_ctz(ready);
  if (b.order == Order::reverse) return 31 - __builtin_clz(ready);
  const unsigned turn = random_number(b) & 31u;
  const unsigned turned = ready >> turn | (turn != 0 ? ready << (32 - turn) : 0u);
  return static_cast<int>((static_cast<unsigned>(__builtin_ctz(turned)) + turn) & 31u);
}

// The next thread that can go on, or null. Stays in the warp while it can: its stacks are in the
// cache.
Thread* pick(Block& b) {
  int w = b.running_warp;
  if (b.order == Order::random) w = static_cast<int>(random_number(b) % unsigned(b.warp_count));
  for (int i = 0; i < b.warp_count; ++i) {
    Warp& warp = b.warps[static_cast<std::size_t>(w)];
    if (warp.ready != 0) {
      const int l = pick_lane(b, warp.ready);
      warp.ready &= ~(1u << l);
      b.running_warp = w;
      return warp.thread[l];
    }
    if (b.order == Order::reverse) {
      w = w != 0 ? w - 1 : b.warp_count - 1;
    } else {
      w = w + 1 < b.warp_count ? w + 1 : 0;
    }
  }
  return nullptr;
}

void make_current(Block& b, Thread& next) {
  b.current = &next;
  running = &next.context;
  threadIdx = next.index;
  lane = next.lane;
}

void run_threads();

void start(Thread& thread) {
  thread.started = true;
  prepare_context(thread.context, run_threads);
}

void release_barrier(Block& b, int id) {
  Barrier& barrier = b.barriers[id];
  barrier.result = barrier.predicates;
  barrier.arrived = barrier.predicates = 0;
  ++barrier.phase;
  for (int i = 0; i < b.thread_count; ++i) {
    Thread& thread = b.threads[static_cast<std::size_t>(i)];
    const bool at_barrier =
        thread.waits == Wait::syncthreads || thread.waits == Wait::named_barrier;
    if (!at_barrier || thread.barrier != id) continue;
    thread.waits = Wait::none;
    thread.warp->ready |= 1u << thread.lane;
  }
}

void end_thread(Block& b, Thread& me) {
  if (!me.copies.empty()) {
    fail(me.copies.front().where, "a thread ends while a cp.async of its is not waited for");
  }
  me.exited = true;
  me.warp->exited |= 1u << me.lane;
  --b.alive;
  for (int i = 0; i < me.warp->meetings; ++i) {
    const Meeting& meeting = me.warp->meeting[i];
    if ((meeting.mask >> me.lane & 1) != 0) {
      fail(meeting.where, "a lane exits that others wait for: their mask names it");
    }
  }
  Barrier& barrier = b.barriers[0];
  if (b.alive != 0 && barrier.expected == 0 && barrier.arrived == b.alive) release_barrier(b, 0);
}

// What every fiber runs: threads of the block that have not started, while there are any. It never
// returns, so the thread sanitizer must not count its calls.
EMULATOR_NOT_SANITIZED void run_threads() {
  context_entered();
  Block& b = *block;
  for (;;) {
    acquire_order(&b.start_token);
    (*b.body)();
    release_order(&b.end_token);
    hide_begin();
    Thread& me = *b.current;
    end_thread(b, me);
    Thread* next = pick(b);
    if (next == nullptr) {
      if (b.alive != 0) {
        fail({nullptr, 0}, "deadlock: this thread ended, and no other of its block can go on");
      }
      hide_end();
      if (!EMULATOR_TSAN) {
        give_stack(me.context.stack);
        me.context.stack = nullptr;
      }
      leave_context(me.context, b.caller);
    } else if (!next->started && !EMULATOR_TSAN) {
      next->started = true;
      next->context.stack = me.context.stack;
      me.context.stack = nullptr;
      make_current(b, *next);
      hide_end();
      continue;
    } else {
      if (!next->started) start(*next);
      // To the sanitizer a stack passed on would order its threads: there each keeps its own.
      if (!EMULATOR_TSAN) {
        give_stack(me.context.stack);
        me.context.stack = nullptr;
      }
      make_current(b, *next);
      hide_end();
      leave_context(me.context, next->context);
    }
    std::abort();  // an ended thread does not go on
  }
}

void reset_block(Block& b) {
  const dim3 size = b.launch->block;
  for (int w = 0; w < b.warp_count; ++w) {
    Warp& warp = b.warps[static_cast<std::size_t>(w)];
    const int lanes = b.thread_count - 32 * w;
    warp.live = warp.ready = lanes >= 32 ? ~0u : (1u << lanes) - 1;
    warp.exited = 0;
    warp.meetings = 0;
    warp.barriers = 0;
  }
  uint3 index{0, 0, 0};
  for (int i = 0; i < b.thread_count; ++i) {
    Thread& thread = b.threads[static_cast<std::size_t>(i)];
    thread.index = index;
    thread.lane = static_cast<unsigned>(i) & 31u;
    thread.warp = &b.warps[static_cast<std::size_t>(i / 32)];
    thread.warp->thread[thread.lane] = &thread;
    thread.started = thread.exited = false;
    thread.waits = Wait::none;
    thread.copy_group = 0;
    if (++index.x == size.x) {
      index.x = 0;
      if (++index.y == size.y) {
        index.y = 0;
        ++index.z;
      }
    }
  }
  std::memset(b.barriers, 0, sizeof(b.barriers));
  b.alive = b.thread_count;
  b.running_warp = b.order == Order::reverse ? b.warp_count - 1 : 0;
}

void run_block(Block& b) {
  poison_shared_memory(b);
  reset_block(b);
  release_order(&b.start_token);
  Thread& first = *pick(b);
  start(first);
  make_current(b, first);
  switch_context(&b.caller, &first.context);
  acquire_order(&b.end_token);
  if (!b.failure.empty()) return;
  b.current = nullptr;
  check_shared_memory(b);
}

// Fibers that will not go on: their stacks are free again.
void abandon_threads(Block& b) {
  for (Thread& thread : b.threads) {
    if (thread.context.stack != nullptr) {
      unpoison(thread.context.stack, kStackBytes);
      give_stack(thread.context.stack);
      thread.context.stack = nullptr;
    }
    const bool failed = &thread == b.current;
    if (failed || (thread.started && !thread.exited)) {
      abandon_tsan_fiber(thread.context, failed, &b.end_token);
    }
    thread.copies.clear();
    thread.started = false;
  }
  acquire_order(&b.end_token);
}

struct RunningGrid {
  Block& b;
  ~RunningGrid() {
    b.launch = nullptr;
    b.current = nullptr;
  }
};

}  // namespace

void set_order(Order order, std::uint64_t seed) {
  order_switch().seed = seed;
  order_switch().order = order;
}

Block::~Block() {
  const Hidden hidden;
  for (Thread& thread : threads) {
    if (thread.context.stack != nullptr) give_stack_to_all(thread.context.stack);
    destroy_tsan_fiber(thread.context);
  }
  release_shared_memory(*this);
  block = nullptr;
}

unsigned random_number(Block& b) {
  b.random_state = b.random_state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<unsigned>(b.random_state >> 33);
}

Context* next_thread() {
  Block& b = *block;
  Warp& warp = b.warps[static_cast<std::size_t>(b.running_warp)];
  Thread* next;
  if (b.order == Order::forward && warp.ready != 0) {  // most often
    next = warp.thread[__builtin_ctz(warp.ready)];
    warp.ready &= warp.ready - 1;
  } else {
    next = pick(b);
  }
  if (next == nullptr) fail(b.current->waits_at, "deadlock: no thread of the block can go on");
  if (!next->started) start(*next);
  make_current(b, *next);
  return &next->context;
}

#if EMULATOR_TSAN || EMULATOR_ASAN
void after_wait() {
  Thread& me = *block->current;
  if (me.order_token != nullptr) acquire_order(me.order_token);
  hide_end();
}
#endif

Context* arrive_at_barrier(int id, int count, int predicate, Location where) {
  hide_begin();  // until after_wait
  Block& b = *block;
  Thread& me = *b.current;
  me.waits = count == 0 ? Wait::syncthreads : Wait::named_barrier;
  me.waits_at = where;
  me.barrier = id;
  if (count != 0) {
    if (id < 0 || id > 15) fail(where, "the number of a named barrier is not 0 to 15");
    if (count < 0 || count % 32 != 0 || count > 32 * b.warp_count) {
      fail(where, "a named barrier's count is not a multiple of 32 up to the threads of the block");
    }
  }
  Barrier& barrier = b.barriers[id];
  if (barrier.arrived == 0) {
    barrier.where = where;
    barrier.expected = count;
  } else if (barrier.expected != count) {
    fail(where, "threads come to one barrier with different counts");
  } else if (count == 0 && !same_line(barrier.where, where)) {
    fail(where, "divergence: threads of a block come to __syncthreads at different lines");
  }
  me.order_token = &barrier.order_tokens[barrier.phase & 1u];
  release_order(me.order_token);
  barrier.predicates += predicate != 0;
  if (++barrier.arrived != (count == 0 ? b.alive : count)) return next_thread();
  me.waits = Wait::none;
  release_barrier(b, id);
  return nullptr;
}

int predicates_counted(int id) {
  const Hidden hidden;
  return block->barriers[id].result;
}

void run_grid(const Launch& launch, const std::function<void()>& body) {
  static thread_local std::unique_ptr<Block> own;
  const Hidden hidden;
  if (own == nullptr) {
    own = std::make_unique<Block>();
    block = own.get();
  }
  Block& b = *own;
  if (b.launch != nullptr) report("a launch inside a kernel, which is not supported\n");
  b.launch = &launch;
  const RunningGrid in_this_scope{b};
  b.body = &body;
  b.order = order_switch().order;
  b.random_state = order_switch().seed * 0x9E3779B97F4A7C15u + 12345;
  b.failure.clear();
  b.thread_count = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  b.warp_count = (b.thread_count + 31) / 32;
  blockDim = launch.block;
  gridDim = launch.grid;
  become_context(b.caller);
  for (int i = 0; i < b.thread_count; ++i) {
    create_tsan_fiber(b.threads[static_cast<std::size_t>(i)].context, i);
  }
  prepare_shared_memory(b);
  const std::uint64_t blocks = std::uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  // A stride without common factor visits all blocks in an order that looks random.
  std::uint64_t stride = 1, first = 0;
  if (b.order == Order::random && blocks > 2) {
    first = random_number(b) % blocks;
    do {
      stride = 1 + random_number(b) % (blocks - 1);
    } while (std::gcd(stride, blocks) != 1);
  }
  for (std::uint64_t i = 0; i < blocks; ++i) {
    std::uint64_t k = (first + i % blocks * stride) % blocks;
    if (b.order == Order::reverse) k = blocks - 1 - i;
    blockIdx = {static_cast<unsigned>(k % launch.grid.x),
                static_cast<unsigned>(k / launch.grid.x % launch.grid.y),
                static_cast<unsigned>(k / launch.grid.x / launch.grid.y)};
    run_block(b);
    if (!b.failure.empty()) {
      if (b.current != nullptr) abandon_threads(b);
      report(b.failure);
    }
  }
}

}  // namespace emulator
