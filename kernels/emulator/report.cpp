// SPDX-License-Identifier: Apache-2.0
// Messages about wrong kernels: what, which kernel, block, thread and line, and who waits where.
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "block.h"
#include "symbols.h"

namespace emulator {
namespace {

std::atomic<bool> errors_throw{false};

const char* name_of(Wait wait) {
  switch (wait) {
    case Wait::none: return "nothing";
    case Wait::syncthreads: return "__syncthreads";
    case Wait::named_barrier: return "named barrier";
    case Wait::syncwarp: return "__syncwarp";
    case Wait::shuffle: return "__shfl_sync";
    case Wait::vote: return "a vote";
    case Wait::reduce: return "__reduce_sync";
    case Wait::ldmatrix: return "ldmatrix";
    case Wait::mma: return "mma.sync";
  }
  return "?";
}

std::string triple(uint3 v) {
  return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}

std::string what_it_waits_for(const Thread& thread) {
  if (thread.exited) return "ended";
  if (!thread.started) return "not yet run";
  if (thread.waits == Wait::none) return "ready";
  std::string text = std::string("at ") + name_of(thread.waits);
  if (thread.waits == Wait::named_barrier) text += " " + std::to_string(thread.barrier);
  return text + ", " + describe(thread.waits_at);
}

// "threads 0-31: at __syncthreads, x.cu:7", one line for neighbours that do the same.
std::string describe_threads(const Block& b) {
  std::string text;
  int lines = 0;
  for (int i = 0; i < b.thread_count;) {
    const Thread& first = b.threads[static_cast<std::size_t>(i)];
    const std::string what = what_it_waits_for(first);
    int end = i + 1;
    while (end < b.thread_count && &b.threads[static_cast<std::size_t>(end)] != b.current &&
           &first != b.current &&
           what_it_waits_for(b.threads[static_cast<std::size_t>(end)]) == what) {
      ++end;
    }
    if (&first != b.current) {
      if (++lines > 24) return text + "    ...\n";
      text += end == i + 1 ? "    thread " + std::to_string(i)
                           : "    threads " + std::to_string(i) + "-" + std::to_string(end - 1);
      text += ": " + what + "\n";
    }
    i = end;
  }
  return text.empty() ? "" : "  other threads of the block, by number:\n" + text;
}

}  // namespace

void throw_errors(bool on) {
  errors_throw = on;
}

std::string describe(Location where) {
  return where.file == nullptr ? "line unknown"
                               : std::string(where.file) + ":" + std::to_string(where.line);
}

std::string kernel_name(const void* kernel) {
  const std::string name = function_name(kernel);
  return name.empty() ? "with no name (the program is stripped)" : name;
}

std::string describe_position(const Block& b, Location where) {
  std::string text = "  kernel " + kernel_name(b.launch->kernel) + "\n  block " + triple(blockIdx);
  if (b.current != nullptr) text += " thread " + triple(b.current->index);
  if (where.file != nullptr) text += ", " + describe(where);
  text += "\n";
  if (b.current != nullptr) text += describe_threads(b);
  return text;
}

void report(const std::string& message) {
  if (errors_throw) throw Error("emulator: " + message);
  std::fprintf(stderr, "emulator: %s", message.c_str());
  std::abort();
}

void fail(Location where, const char* problem) {
  hide_begin();
  Block& b = *block;
  // The stack is abandoned: nothing on it may own memory then.
  b.failure = std::string(problem) + "\n" + describe_position(b, where);
  if (!errors_throw) report(b.failure);  // here, where a debugger shows the kernel
  hide_end();
  leave_context(b.current->context, b.caller);
  std::abort();
}

}  // namespace emulator
