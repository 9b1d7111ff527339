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

void with_late_streams(const std::function<void()>& body) {
  emulator::set_streams(emulator::Streams::threads, 3000);
  body();
  emulator::set_streams(emulator::Streams::in_place);
}

}  // namespace sherd::test
