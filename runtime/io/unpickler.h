// SPDX-License-Identifier: Apache-2.0
// Reads pickles (Python's serialization, protocols 2 to 5) as far as they describe data, and runs
// nothing: a call that a pickle asks for, of a function on a list of known ones, stays a value that
// says which function and which arguments. Any other name is an Error.
//
// Note [Hostile pickles]
// A pickle is a program for a stack machine; whoever writes one chooses every byte. So here each
// operation costs constant time and memory beyond the bytes that it takes up itself: values are
// numbers of places in one array (no destructor recurses, cycles need no collector), strings are
// views of the pickle, and what is shared is never copied. All in all a pickle costs at most some
// eighty times its own size. Values may share, and contain themselves: who walks them must count.
#pragma once

#include <sherd/runtime/api.h>

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace sherd {

using PickleId = std::uint32_t;  // the place of a value in PickleTree::values

struct PickleNone {};
struct PickleBigInteger {  // one of more than 64 bits: two's complement, little-endian
  std::span<const std::uint8_t> bytes;
};
struct PickleBytes {
  std::span<const std::uint8_t> bytes;
};
struct PickleTuple {
  std::vector<PickleId> items;
};
struct PickleList {
  std::vector<PickleId> items;
};
struct PickleSet {
  std::vector<PickleId> items;
};
struct PickleDict {  // dict, OrderedDict, defaultdict; in the order of the pickle
  std::vector<std::pair<PickleId, PickleId>> items;
};
struct PickleGlobal {  // "torch", "float32"
  std::string_view module, name;
};
// What callee(*arguments) would have made; `state`: what the object's attributes were set from.
struct PickleCall {
  PickleId callee = 0, arguments = 0, state = 0;  // a global, a tuple, a value or None
};
struct PicklePersistent {  // an object outside of the pickle, by the value that names it
  PickleId id = 0;
};

// std::string_view: str.
using PickleValue = std::variant<PickleNone, bool, std::int64_t, double, std::string_view,
                                 PickleBigInteger, PickleBytes, PickleTuple, PickleList, PickleSet,
                                 PickleDict, PickleGlobal, PickleCall, PicklePersistent>;

struct SHERD_API PickleTree {
  std::deque<PickleValue> values;
  PickleId root = 0;
  std::size_t used = 0;  // bytes of the pickle

  const PickleValue& operator[](PickleId id) const { return values[id]; }
  // nullptr if the value is of another kind.
  template <typename T>
  const T* get(PickleId id) const {
    return std::get_if<T>(&values[id]);
  }
  // The value of a key that is this string, the last of several; nullptr if there is none.
  const PickleId* find(const PickleDict& dict, std::string_view key) const;
  // "torch.float32" of a global, "" of anything else.
  std::string global_name(PickleId id) const;
};

SHERD_API std::string_view kind_of(const PickleValue& value);  // "a list"

// The names that a format adds to those every pickle may have (collections.OrderedDict, set,
// argparse.Namespace, numpy's scalars, ...), as "module.name".
struct PickleNames {
  std::span<const std::string_view> callable;
  std::span<const std::string_view> constant;
  std::span<const std::string_view> objects = {};  // made bare; then their attributes are set
  std::string_view advice;                         // ends the error about any other name
};

constexpr std::size_t kMaxPickle = std::size_t{32} << 20;  // bytes of the longest that is read

// Reads one pickle from the beginning of `bytes`, which must outlive the tree; `path` only serves
// messages. Throws for names that are not listed, operations of other protocols, and whatever is
// damaged.
SHERD_API PickleTree read_pickle(std::span<const std::uint8_t> bytes, const std::string& path,
                                 const PickleNames& names);

}  // namespace sherd
