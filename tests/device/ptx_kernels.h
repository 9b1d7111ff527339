// SPDX-License-Identifier: Apache-2.0
// One warp runs one instruction of device_code.h, so that a GPU and the emulator can be compared
// with what the instruction is said to do. Every address is the device's.
#pragma once

#include <cstdint>

namespace sherd {

class Stream;

namespace test {

// rows: 32 rows of 8 elements; out: 32 lanes of 4 registers.
void run_ldmatrix(Stream& stream, int matrices, bool transposed, const std::uint16_t* rows,
                  std::uint32_t* out);
// a: 4 registers a lane, b: 2, d: 4 numbers, to which the product is added.
void run_mma(Stream& stream, bool of_bf16, const std::uint32_t* a, const std::uint32_t* b,
             float* d);
// out: for each lane what it gets from lane ^ 5, from 3 lanes below, 3 above, and lane 7; and the
// ballot of odd values.
void run_shuffles(Stream& stream, const std::uint32_t* values, std::uint32_t* out);
// to: 32 vectors of 8 elements; the first 16 * (lane + 1) / 32 bytes of each 16-byte vector of
// `from`, then 0. whole: at once, else 4 bytes at a time.
void run_copy(Stream& stream, bool whole, const std::uint16_t* from, std::uint16_t* to);

}  // namespace test
}  // namespace sherd
