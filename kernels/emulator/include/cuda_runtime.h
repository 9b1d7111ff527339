// SPDX-License-Identifier: Apache-2.0
// In place of CUDA's header of this name: the runtime API, built-in variables and device functions,
// on the CPU. An emulated build has this folder first on its include path and needs no CUDA
// toolkit.
#pragma once

#include <emulator/arithmetic.h>
#include <emulator/atomics.h>
#include <emulator/qualifiers.h>
#include <emulator/runtime_api.h>
#include <emulator/vector_types.h>
#include <emulator/warp.h>
