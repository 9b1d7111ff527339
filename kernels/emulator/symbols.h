// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace emulator {

// The demangled name of the function at `address`, also if it is local to its file; "" if the
// program was stripped. Reads the symbol table of the program's or library's file.
std::string function_name(const void* address);

}  // namespace emulator
