// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/device.h>
#include <sherd/runtime/error.h>

namespace sherd {

std::string_view name_of(Device device) {
  return device == Device::cpu ? "cpu" : "meta";
}

Device device_from_name(std::string_view name) {
  if (name == "cpu") return Device::cpu;
  if (name == "meta") return Device::meta;
  fail("unknown device '{}': this build has cpu and meta", name);
}

}  // namespace sherd
