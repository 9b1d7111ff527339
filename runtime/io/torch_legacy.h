// SPDX-License-Identifier: Apache-2.0
// What torch.save wrote before PyTorch 1.6, and writes still with
// _use_new_zipfile_serialization=False: five pickles one after the other (a magic number, the
// format's version, facts about the machine, the objects, the keys of the storages), then for each
// key the number of elements (8 bytes, little-endian) and the elements. Part of torch_file.cpp.
#pragma once

#include <sherd/runtime/io/unpickler.h>

#include <map>
#include <span>
#include <string>
#include <string_view>

namespace sherd {

struct LegacyTorchFile {
  PickleTree tree;                                                     // of the objects
  std::map<std::string_view, std::span<const std::uint8_t>> storages;  // by key
};

// By its first bytes.
bool is_legacy_torch_file(std::span<const std::uint8_t> file);

LegacyTorchFile read_legacy_torch_file(std::span<const std::uint8_t> file, const std::string& path,
                                       const PickleNames& names);

}  // namespace sherd
