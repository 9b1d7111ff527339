// SPDX-License-Identifier: Apache-2.0
// The switches of the emulator: order of threads, streams, errors, devices. For tests, and for
// libraries that emulate more of the device's world on its streams.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

struct CUstream_st;

namespace emulator {

// The order in which threads of a block, and blocks of a grid, get to run. A kernel whose result
// depends on it has a race. Default: $EMULATOR_ORDER (forward, reverse, random:SEED), else forward.
enum class Order { forward, reverse, random };
void set_order(Order order, std::uint64_t seed = 0);

// What is wrong with a kernel, and where. By default the message goes to stderr and the process
// aborts at the spot.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// on: the launch is abandoned and Error thrown, by launch() where streams are inline, else by the
// next call that waits for the stream.
void throw_errors(bool on);
// Of this OS thread: why its last launch was refused ("" if it never was). Refused launches
// return an error code as on the device, and say this on stderr.
const std::string& launch_message();

// in_place (default): work runs on the calling thread at once. threads: every stream is an OS
// thread that executes its queue in order; with a delay each piece of work first waits a random
// time of 0 to delay_microseconds. Affects streams created, and default streams first used,
// afterwards. Default: $EMULATOR_STREAMS (in_place, threads, threads:MICROSECONDS).
enum class Streams { in_place, threads };
void set_streams(Streams mode, int delay_microseconds = 0);

// How many devices there are and how much memory each has. Before the first call that uses them.
void set_devices(int count, std::size_t bytes_each);

// Device memory is out of reach of host code (a fault with a message) while no device work runs.
// Never where a sanitizer watches memory, nor while a stream is a thread. Default: on, or
// $EMULATOR_GUARD (on, off).
void set_guard(bool on);

// How long a rank of emulated NCCL waits for the others before that is an error [30 s].
void set_nccl_patience(double seconds);

// Ranges of memory that communicators of emulated NCCL know: at present, their bytes, and all that
// were ever registered.
struct NcclRegistrations {
  std::size_t now, bytes, made;
};
NcclRegistrations nccl_registrations();

// Runs `work` in order on an emulated stream, as device work: for other emulated libraries. While
// the stream is captured the work is recorded, and runs at every replay.
void enqueue(CUstream_st* stream, std::function<void()> work);

}  // namespace emulator
