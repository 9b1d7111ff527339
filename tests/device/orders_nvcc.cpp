// SPDX-License-Identifier: Apache-2.0
#include "device_support.h"

namespace sherd::test {

void in_all_orders(const std::function<void()>& body) {
  body();
}

void with_late_streams(const std::function<void()>& body) {
  body();
}

}  // namespace sherd::test
