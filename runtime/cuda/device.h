// SPDX-License-Identifier: Apache-2.0
// GPUs, without a type of CUDA's: memory, streams and copies. In builds without CUDA every call is
// an Error that says so (unavailable.cpp).
#pragma once

#include <sherd/runtime/memory_source.h>
#include <sherd/runtime/stream.h>

#include <cstddef>
#include <memory>
#include <string>

namespace sherd::cuda {

// What CUDA this build has, for people: "CUDA 13.0", "emulated CUDA", "no CUDA".
SHERD_API std::string_view build_name();
// 0 where the build has no CUDA or the machine no driver or device.
SHERD_API int device_count();
SHERD_API std::string device_name(int device);
// Throws, and says what to do, unless this process can compute on the device.
SHERD_API void require_device(int device);

std::unique_ptr<Stream> make_stream(int device, std::string name);
// Another of the same device and context, to be served first: what ranks send should not queue
// behind large kernels. Work of both can be captured together.
std::unique_ptr<Stream> make_sibling(Stream& stream, std::string name);
// An event that keeps the device's time, and the seconds between two such events. Waits for the
// second. Streams' own events keep none: CUDA's are cheaper without.
Event record_time(Stream& stream);
double seconds_between(const Event& first, const Event& second);
// Before a call in which the driver waits for the device: waits for all streams of this one's
// context, of which ranks may have failed (Stream::watch). The driver itself would wait for ever.
void wait_before_driver_does(Stream& stream);
// The memory of the device, in the order of a stream: what is reused there waits for its events on
// the device, not on the host.
std::unique_ptr<MemorySource> make_device_memory(int device, std::shared_ptr<Stream> stream);
// The host's, which devices read and write directly. The stream: any of the context.
std::unique_ptr<MemorySource> make_pinned_memory(int device, std::shared_ptr<Stream> stream);

// In the order of a stream. Each address may be the device's or the host's; see reads_later().
void copy(Stream& stream, void* to, const void* from, std::size_t bytes);
// Whether copy() reads this address of the host after it has returned: pinned memory, and any where
// the device reaches the host's page tables.
bool reads_later(int device, const void* address);
void fill_zero(Stream& stream, void* to, std::size_t bytes);

}  // namespace sherd::cuda
