// SPDX-License-Identifier: Apache-2.0
// Barriers, shuffles, votes and reductions of a block and its warps, by CUDA's names.
//
// A lane that arrives waits, as its fiber, until all lanes of the mask have arrived at the same
// line; the last one computes for all and goes on without a switch. Lanes that meet at different
// lines, name different masks, or name exited lanes are reported. (The device would allow some of
// these.)
#pragma once

#include <type_traits>

#include <emulator/context.h>
#include <emulator/location.h>
#include <emulator/qualifiers.h>

namespace emulator {

enum class Wait : unsigned char {
  none,
  syncthreads,
  named_barrier,
  syncwarp,
  shuffle,
  vote,
  reduce,
  ldmatrix,
  mma
};

extern EMULATOR_THREAD_LOCAL unsigned lane;  // of the running thread, 0 to 31

// Reports `problem` of the running thread, at `where`, and does not return.
[[noreturn]] void fail(Location where, const char* problem);
[[noreturn]] void fail_shuffle(Location where, int lane, int source, unsigned mask);

// Lanes that meet in one warp operation; in and out point to each lane's own variables.
struct Meeting {
  unsigned mask, arrived;
  Wait kind;
  Location where;
  const void* in[32];
  void* out[32];
};
extern EMULATOR_THREAD_LOCAL Context* running;  // the thread that runs

// The lane has come to a warp operation. last: the meeting if all lanes are there, and then the
// caller computes for all and calls meeting_done; else `next` is the thread to switch to.
struct Arrival {
  Meeting* last;
  Context* next;
};
Arrival arrive(unsigned mask, Wait kind, Location where, const void* in, void* out);
void meeting_done(Meeting* meeting);

// Calls compute(in, out, mask) once for the lanes of the mask: in[l] and out[l] belong to lane l.
template <class In, class Out, class Compute>
inline __attribute__((always_inline)) void warp_operation(unsigned mask, Wait kind, Location where,
                                                          const In* in, Out* out, Compute compute) {
  Context* const me = running;
  const Arrival arrival = arrive(mask, kind, where, in, out);
  if (arrival.last != nullptr) {
    compute(reinterpret_cast<const In* const*>(arrival.last->in),
            reinterpret_cast<Out* const*>(arrival.last->out), arrival.last->mask);
    meeting_done(arrival.last);
  } else {
    switch_context(me, arrival.next);
    after_wait();
  }
}

// The thread has come to a barrier: the thread to switch to, or null if all are there. Barrier `id`
// of the block: 0 is __syncthreads. count 0 means all threads that have not exited.
Context* arrive_at_barrier(int id, int count, int predicate, Location where);
Context* arrive_at_warp_barrier(unsigned mask, Location where);
int predicates_counted(int id);  // at the last meeting of the barrier

inline __attribute__((always_inline)) void wait_turn(Context* me, Context* next) {
  if (next != nullptr) switch_context(me, next);
  after_wait();
}
inline __attribute__((always_inline)) void block_barrier(int id, int count, int predicate,
                                                         Location where) {
  Context* const me = running;
  wait_turn(me, arrive_at_barrier(id, count, predicate, where));
}
inline __attribute__((always_inline)) void warp_barrier(unsigned mask, Location where) {
  Context* const me = running;
  wait_turn(me, arrive_at_warp_barrier(mask, where));
}
inline int counting_barrier(int predicate, Location where) {
  block_barrier(0, 0, predicate, where);
  return predicates_counted(0);
}

template <class T>
inline T shuffle(unsigned mask, T value, int source, Location where) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8),
                "shuffles move int, unsigned, long long, float and double");
  struct Given {
    T value;
    int source;
  };
  const Given given{value, source};
  T result;
  warp_operation(mask, Wait::shuffle, where, &given, &result,
                 [where](const Given* const* in, T* const* out, unsigned all) {
                   for (unsigned m = all; m != 0; m &= m - 1) {
                     const int l = __builtin_ctz(m), from = in[l]->source;
                     if (!(all >> from & 1)) fail_shuffle(where, l, from, all);
                     *out[l] = in[from]->value;
                   }
                 });
  return result;
}

inline int segment(int width, Location where) {
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
    fail(where, "the width of a shuffle is not a power of two up to 32");
  }
  return width;
}

inline unsigned ballot(unsigned mask, bool predicate, Location where) {
  unsigned result;
  warp_operation(mask, Wait::vote, where, &predicate, &result,
                 [](const bool* const* in, unsigned* const* out, unsigned all) {
                   unsigned votes = 0;
                   for (unsigned m = all; m != 0; m &= m - 1) {
                     const int l = __builtin_ctz(m);
                     votes |= static_cast<unsigned>(*in[l]) << l;
                   }
                   for (unsigned m = all; m != 0; m &= m - 1) *out[__builtin_ctz(m)] = votes;
                 });
  return result;
}

template <class T, class Combine>
inline T warp_reduce(unsigned mask, T value, Location where, Combine) {
  T result;
  warp_operation(mask, Wait::reduce, where, &value, &result,
                 [](const T* const* in, T* const* out, unsigned all) {
                   T sum = *in[__builtin_ctz(all)];
                   for (unsigned m = all & (all - 1); m != 0; m &= m - 1) {
                     sum = Combine{}(sum, *in[__builtin_ctz(m)]);
                   }
                   for (unsigned m = all; m != 0; m &= m - 1) *out[__builtin_ctz(m)] = sum;
                 });
  return result;
}

}  // namespace emulator

#define EMULATOR_HERE emulator::Location where = emulator::Location::here()

inline void __syncthreads(EMULATOR_HERE) {
  emulator::block_barrier(0, 0, 0, where);
}
inline int __syncthreads_count(int predicate, EMULATOR_HERE) {
  return emulator::counting_barrier(predicate, where);
}
inline int __syncthreads_or(int predicate, EMULATOR_HERE) {
  return emulator::counting_barrier(predicate, where) != 0;
}
inline int __syncthreads_and(int predicate, EMULATOR_HERE) {
  return emulator::counting_barrier(!predicate, where) == 0;
}
inline void __syncwarp(unsigned mask = ~0u, EMULATOR_HERE) {
  emulator::warp_barrier(mask, where);
}
// Threads of a block run one at a time and see each other's writes at once.
inline void __threadfence_block() {}
inline void __threadfence() {}
inline void __threadfence_system() {}

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_HERE) {
  const int w = emulator::segment(width, where), l = static_cast<int>(emulator::lane);
  return emulator::shuffle(mask, value, (l & ~(w - 1)) | (source & (w - 1)), where);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, EMULATOR_HERE) {
  const int w = emulator::segment(width, where), l = static_cast<int>(emulator::lane);
  const int from = (l ^ lane_mask) & 31;
  return emulator::shuffle(mask, value, from / w > l / w ? l : from, where);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_HERE) {
  const int w = emulator::segment(width, where), l = static_cast<int>(emulator::lane);
  const bool inside = delta <= static_cast<unsigned>(l & (w - 1));
  return emulator::shuffle(mask, value, inside ? l - static_cast<int>(delta) : l, where);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_HERE) {
  const int w = emulator::segment(width, where), l = static_cast<int>(emulator::lane);
  const bool inside = delta < static_cast<unsigned>(w - (l & (w - 1)));
  return emulator::shuffle(mask, value, inside ? l + static_cast<int>(delta) : l, where);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_HERE) {
  return emulator::ballot(mask, predicate != 0, where);
}
inline int __any_sync(unsigned mask, int predicate, EMULATOR_HERE) {
  return emulator::ballot(mask, predicate != 0, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, EMULATOR_HERE) {
  return emulator::ballot(mask, predicate == 0, where) == 0;
}

#define EMULATOR_REDUCE(name, type, expression)                                        \
  inline type __reduce_##name##_sync(unsigned mask, type value, EMULATOR_HERE) {       \
    const auto combine = [](type a, type b) { return static_cast<type>(expression); }; \
    return emulator::warp_reduce(mask, value, where, combine);                         \
  }
// Signed sums wrap around, as on the device.
EMULATOR_REDUCE(add, unsigned, a + b)
EMULATOR_REDUCE(add, int, static_cast<unsigned>(a) + static_cast<unsigned>(b))
EMULATOR_REDUCE(min, unsigned, b < a ? b : a)
EMULATOR_REDUCE(min, int, b < a ? b : a)
EMULATOR_REDUCE(max, unsigned, a < b ? b : a)
EMULATOR_REDUCE(max, int, a < b ? b : a)
EMULATOR_REDUCE(and, unsigned, a& b)
EMULATOR_REDUCE(or, unsigned, a | b)
EMULATOR_REDUCE(xor, unsigned, a ^ b)
#undef EMULATOR_REDUCE
