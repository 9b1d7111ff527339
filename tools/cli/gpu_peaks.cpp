// SPDX-License-Identifier: Apache-2.0
#include "gpu_peaks.h"

#include <algorithm>
#include <cctype>

namespace sherd::cli {
namespace {

// As whole words: "A10" is not in "NVIDIA A100-SXM4-80GB".
bool names(std::string_view text, std::string_view part) {
  const auto letter = [&](std::size_t at) {
    return at < text.size() && std::isalnum(static_cast<unsigned char>(text[at])) != 0;
  };
  const std::size_t at = text.find(part);
  return at != std::string_view::npos && (at == 0 || !letter(at - 1)) && !letter(at + part.size());
}

}  // namespace

double peak_bf16_flops(std::string_view gpu_name) {
  static constexpr struct {
    std::string_view name;
    double tera_flops;
  } kPeaks[] = {
      // A name that holds another comes first.
      {"B200", 2250},    {"GB200", 2500},    {"H200 NVL", 835}, {"H200", 989},     {"GH200", 989},
      {"H100 NVL", 835}, {"H100 PCIe", 756}, {"H100", 989},     {"A100", 312},     {"A30", 165},
      {"A10", 125},      {"L40S", 362},      {"L4", 121},       {"RTX 4090", 165},
  };
  const auto* const found =
      std::ranges::find_if(kPeaks, [&](const auto& peak) { return names(gpu_name, peak.name); });
  return found == std::end(kPeaks) ? 0.0 : found->tera_flops * 1e12;
}

}  // namespace sherd::cli
