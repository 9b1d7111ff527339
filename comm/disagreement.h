// SPDX-License-Identifier: Apache-2.0
// What ranks are told when they disagree: the same words from every backend.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace sherd {

// `calls`: what each rank called, by rank.
std::string disagreement(std::int64_t sequence, std::span<const std::string> calls);
std::string message_disagreement(std::int64_t sequence, int from, const std::string& sent, int to,
                                 const std::string& received);
std::string left_message(int left, int rank, const std::string& call);
std::string stuck_message(int first, const std::string& first_call, int second,
                          const std::string& second_call);

}  // namespace sherd
