// SPDX-License-Identifier: Apache-2.0
#include "resident_meter.h"

#include "command.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace sherd::cli {
namespace {

// "VmHWM" of proc(5); getrusage's maximum also counts what the process was before it was sherd.
std::int64_t high_water_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) * 1024;
  }
  return peak_resident_bytes();
}

}  // namespace

void ResidentMeter::resume() {
  std::ofstream("/proc/self/clear_refs") << 5;  // sets the high water mark to what is held now
}

void ResidentMeter::pause() {
  peak_ = std::max(peak_, high_water_bytes());
}

}  // namespace sherd::cli
