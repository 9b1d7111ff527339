// SPDX-License-Identifier: Apache-2.0
// What of a model's states a rank holds at rest, by the ways in which different authors count.
//
// A convention says how many bytes a state has for each parameter. Where they lie, whole or as a
// shard, is what a policy says (UnitPolicy), and how large a shard is, what FlatLayout says: the
// same arithmetic for every convention.
//
//   sherd       as this project keeps them: parameters, master weights where these are of another
//               type, gradients and two moments in the master type
//   zero-paper  mixed precision Adam of the ZeRO paper (arXiv 1910.02054, section 3.1): 2 and 2
//               bytes in 16 bits, 12 of the optimizer (weights and two moments in fp32)
//   deepspeed   estimate_zero2/3_model_states_mem_needs of DeepSpeed: 16 bytes of the optimizer (an
//               fp32 gradient too); ZeRO-1 and 2 keep whole 16-bit gradients, and ZeRO-3 keeps none
//               but those, and the parameters, of the largest layer while it computes
#pragma once

#include <sherd/comm/sharding/options.h>

#include <string>
#include <vector>

namespace sherd {

struct StateConvention {
  std::string name;
  std::int64_t parameters = 0, gradients = 0, optimizer = 0;  // bytes of a parameter
  bool whole_gradients = false;  // also where the policy would keep a shard, but with zero3, which
  bool largest_unit_only = false;  // keeps gradients, whole, of the largest unit alone
  double unit = 1.0;               // of what is printed: bytes in a GB
  std::string unit_name;
};

// sherd, zero-paper or deepspeed; the first depends on the precision.
SHERD_API StateConvention state_convention(const std::string& name, const Precision& precision);

struct ModelStates {
  double parameters = 0.0, gradients = 0.0, optimizer = 0.0;  // bytes of the first rank
  double largest_unit = 0.0;                                  // and of that while it computes
  double total() const { return parameters + gradients + optimizer + largest_unit; }
};

// units: parameters of each. Policy hybrid is that of zero3 over as many ranks as share a copy.
SHERD_API ModelStates model_states(const StateConvention& convention, ShardingPolicy policy,
                                   const std::vector<std::int64_t>& units, int ranks);

// All policies beside each other, for people.
SHERD_API std::string model_states_text(const StateConvention& convention,
                                        const std::vector<std::int64_t>& units, int ranks);

}  // namespace sherd
