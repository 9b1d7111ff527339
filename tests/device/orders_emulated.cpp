// SPDX-License-Identifier: Apache-2.0
#include "device_support.h"

#include <emulator/emulator.h>

namespace sherd::test {

void in_all_orders(const std::function<void()>& body) {
  using emulator::Order;
  for (const Order order : {Order::forward, Order::reverse, Order::random}) {
    emulator::set_order(order, 1);
    body();
  }
  emulator::set_order(Order::forward);
}

}  // namespace sherd::test
