// SPDX-License-Identifier: Apache-2.0
// What ranks find out about each other together.
#pragma once

#include <sherd/comm/communicator.h>
#include <sherd/runtime/error.h>

#include <string>
#include <string_view>
#include <vector>

namespace sherd {

// Thrown by every rank at the same point, so that they can still work together.
class SHERD_API AgreedError : public Error {
 public:
  using Error::Error;
};

// Throws, naming two ranks and the first line in which they differ, unless all give the same lines.
// `what`: "hold different models".
SHERD_API void check_same(Communicator& world, const std::vector<std::string>& lines,
                          std::string_view what);

// Throws, naming the rank, if any rank gives a message that is not empty.
SHERD_API void agree_on_errors(Communicator& world, const std::string& message);

// This rank's place among the ranks on its machine, for a GPU of its own.
SHERD_API int local_rank(Communicator& world);

}  // namespace sherd
