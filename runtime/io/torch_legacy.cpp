// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/error.h>
#include <sherd/runtime/io/quote.h>
#include <sherd/runtime/io/torch_legacy.h>
#include <sherd/runtime/io/torch_types.h>

#include <algorithm>
#include <array>
#include <utility>

namespace sherd {
namespace {

constexpr std::array<std::uint8_t, 15> kMagic{0x80, 2,    0x8a, 10,   0x6c, 0xfc, 0x9c, 0x46,
                                              0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, '.'};
constexpr std::int64_t kVersion = 1001;

// Bytes of an element of each storage, as the references to it say.
std::map<std::string_view, std::uint64_t> element_sizes(const PickleTree& tree,
                                                        const std::string& path) {
  std::map<std::string_view, std::uint64_t> sizes;
  for (const PickleValue& value : tree.values) {
    const auto* outside = std::get_if<PicklePersistent>(&value);
    const auto* parts = outside == nullptr ? nullptr : tree.get<PickleTuple>(outside->id);
    constexpr std::size_t kParts = 3;  // "storage", type, key
    if (parts == nullptr || parts->items.size() < kParts) continue;
    const std::string type_name = tree.global_name(parts->items[1]);
    const TorchType* type = torch_type_of_storage(type_name);
    const auto* key = tree.get<std::string_view>(parts->items[2]);
    constexpr std::size_t kLongestKey = 256;  // comparing longer ones often would take long
    if (key == nullptr || key->size() > kLongestKey) continue;
    if (type == nullptr && type_name != kUntypedStorage) continue;
    const std::uint64_t size = type == nullptr ? 1 : type->bytes;
    SHERD_CHECK(sizes.emplace(*key, size).first->second == size,
                "'{}': the storage {} has elements of different sizes", path, quote(*key));
  }
  return sizes;
}

}  // namespace

bool is_legacy_torch_file(std::span<const std::uint8_t> file) {
  return file.size() >= kMagic.size() && std::ranges::equal(file.first(kMagic.size()), kMagic);
}

LegacyTorchFile read_legacy_torch_file(std::span<const std::uint8_t> file, const std::string& path,
                                       const PickleNames& names) {
  std::span<const std::uint8_t> rest = file.subspan(kMagic.size());
  const auto next = [&] {
    PickleTree tree = read_pickle(rest.first(std::min(rest.size(), kMaxPickle)), path, names);
    rest = rest.subspan(tree.used);
    return tree;
  };
  const PickleTree version = next();
  const auto* number = version.get<std::int64_t>(version.root);
  SHERD_CHECK(number != nullptr && *number == kVersion,
              "'{}' is in a version of PyTorch's old format other than {}; save it again with "
              "PyTorch 1.6 or later",
              path, kVersion);
  const PickleTree machine = next();
  const auto* facts = machine.get<PickleDict>(machine.root);
  const PickleId* order = facts == nullptr ? nullptr : machine.find(*facts, "little_endian");
  const bool* little = order == nullptr ? nullptr : machine.get<bool>(*order);
  SHERD_CHECK(little != nullptr && *little,
              "'{}' does not say that its bytes are in little-endian order; save it again on such "
              "a machine",
              path);
  LegacyTorchFile result;
  result.tree = next();
  const PickleTree keys = next();
  const auto* list = keys.get<PickleList>(keys.root);
  SHERD_CHECK(list != nullptr, "'{}': its storages' keys are {}, expected a list", path,
              kind_of(keys[keys.root]));
  const auto sizes = element_sizes(result.tree, path);
  for (const PickleId id : list->items) {
    const auto* key = keys.get<std::string_view>(id);
    SHERD_CHECK(key != nullptr, "'{}': a storage's key is {}, expected a str", path,
                kind_of(keys[id]));
    const auto size = sizes.find(*key);
    SHERD_CHECK(size != sizes.end(), "'{}': no tensor says what lies in the storage {}", path,
                quote(*key));
    constexpr std::size_t kCount = 8;
    SHERD_CHECK(rest.size() >= kCount, "'{}' is truncated before its storage {}; fetch it again",
                path, quote(*key));
    std::uint64_t count = 0;
    for (std::size_t i = kCount; i-- > 0;) count = count << 8 | rest[i];
    rest = rest.subspan(kCount);
    SHERD_CHECK(count <= rest.size() / size->second,
                "'{}' is truncated: its storage {} has {} elements of {} bytes, {} bytes follow; "
                "fetch it again",
                path, quote(*key), count, size->second, rest.size());
    const auto bytes = rest.first(count * size->second);
    rest = rest.subspan(bytes.size());
    SHERD_CHECK(result.storages.emplace(*key, bytes).second, "'{}': the storage {} appears twice",
                path, quote(*key));
  }
  SHERD_CHECK(rest.empty(), "'{}': {} bytes follow its last storage", path, rest.size());
  return result;
}

}  // namespace sherd
