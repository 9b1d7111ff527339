// SPDX-License-Identifier: Apache-2.0
// SHERD_API marks what the shared library exports; everything else stays hidden, so that two
// libraries in one process cannot clash through us.
#pragma once

#define SHERD_API __attribute__((visibility("default")))
