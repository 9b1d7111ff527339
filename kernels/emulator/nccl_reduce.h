// SPDX-License-Identifier: Apache-2.0
// What NCCL does with the numbers, on the CPU.
#pragma once

#include <nccl.h>

#include <vector>

namespace emulator {

std::size_t bytes_of(ncclDataType_t type);  // 0: not a type
// to[count] := elements [begin, begin + count) of all ranks' inputs, reduced around the ring from
// rank `first` on, in the type itself.
void reduce_around(const std::vector<const void*>& inputs, std::size_t begin, std::size_t count,
                   std::size_t first, ncclDataType_t type, ncclRedOp_t op, void* to);

}  // namespace emulator
