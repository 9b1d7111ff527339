// SPDX-License-Identifier: Apache-2.0
#include <sherd/runtime/device.h>
#include <sherd/runtime/error.h>

namespace sherd {

std::string_view name_of(Device device) {
  switch (device) {
    case Device::cpu: return "cpu";
    case Device::cuda: return "cuda";
    case Device::meta: return "meta";
  }
  fail("name_of: unknown device {}", static_cast<int>(device));
}

Device device_from_name(std::string_view name) {
  for (const Device device : {Device::cpu, Device::cuda, Device::meta}) {
    if (name == name_of(device)) return device;
  }
  fail("unknown device '{}': expected cpu, cuda or meta", name);
}

}  // namespace sherd
