// SPDX-License-Identifier: Apache-2.0
#include <emulator/warp.h>

#include <cstdio>

#include "block.h"

namespace emulator {
namespace {

// The meeting of the calling lane: the one that waits for it, or a new one.
Meeting& find_meeting(Warp& warp, Thread& me, unsigned mask, Wait kind, Location where) {
  const unsigned bit = 1u << me.lane;
  if ((mask & bit) == 0) fail(where, "a lane calls a warp operation whose mask does not name it");
  mask &= warp.live;
  if ((mask & warp.exited) != 0)
    fail(where, "the mask of a warp operation names a lane that has exited");
  for (int i = 0; i < warp.meetings; ++i) {
    Meeting& meeting = warp.meeting[i];
    if ((meeting.mask & bit) != 0) {
      if (meeting.mask == mask && meeting.kind == kind && same_line(meeting.where, where))
        return meeting;
      fail(where, meeting.mask == mask
                      ? "divergence: lanes of a warp come to different warp operations"
                      : "divergence: lanes of a warp come to warp operations with different masks");
    }
    if ((meeting.mask & mask) != 0) {
      fail(where, "divergence: the mask names lanes that wait in another warp operation");
    }
  }
  Meeting& fresh = warp.meeting[warp.meetings++];
  fresh.mask = mask;
  fresh.arrived = 0;
  fresh.kind = kind;
  fresh.where = where;
  return fresh;
}

void warp_done(Warp& warp, Meeting& meeting, unsigned me) {
  const unsigned others = meeting.mask & ~me;
  warp.ready |= others;
  for (unsigned m = others; m != 0; m &= m - 1) {
    warp.thread[__builtin_ctz(m)]->waits = Wait::none;
  }
  Meeting& last = warp.meeting[--warp.meetings];
  if (&last != &meeting) meeting = last;
}

}  // namespace

void fail_shuffle(Location where, int lane_number, int source, unsigned mask) {
  char text[128];
  std::snprintf(text, sizeof text, "lane %d shuffles from lane %d, which is not in the mask 0x%08x",
                lane_number, source, mask);
  fail(where, text);
}

Arrival arrive(unsigned mask, Wait kind, Location where, const void* in, void* out) {
  hide_begin();  // until meeting_done or after_wait
  Thread& me = *block->current;
  me.waits = kind;
  me.waits_at = where;
  me.order_token = nullptr;
  Meeting& meeting = find_meeting(*me.warp, me, mask, kind, where);
  meeting.in[me.lane] = in;
  meeting.out[me.lane] = out;
  meeting.arrived |= 1u << me.lane;
  if (meeting.arrived == meeting.mask) return {&meeting, nullptr};
  return {nullptr, next_thread()};
}

void meeting_done(Meeting* meeting) {
  Thread& me = *block->current;
  me.waits = Wait::none;
  warp_done(*me.warp, *meeting, 1u << me.lane);
  hide_end();
}

Context* arrive_at_warp_barrier(unsigned mask, Location where) {
  hide_begin();
  Thread& me = *block->current;
  me.waits = Wait::syncwarp;
  me.waits_at = where;
  Warp& warp = *me.warp;
  Meeting& meeting = find_meeting(warp, me, mask, Wait::syncwarp, where);
  if (meeting.arrived == 0) meeting.out[0] = &warp.order_tokens[warp.barriers++ & 63u];
  me.order_token = meeting.out[0];
  release_order(me.order_token);
  meeting.arrived |= 1u << me.lane;
  if (meeting.arrived != meeting.mask) return next_thread();
  me.waits = Wait::none;
  warp_done(warp, meeting, 1u << me.lane);
  return nullptr;
}

}  // namespace emulator
