// SPDX-License-Identifier: Apache-2.0
// PatchEmbed: a convolution whose kernel equals its stride, a linear layer over patches. images [B,
// C, H, W] → [B, (H / p)(W / p), dim]; weight [dim, C, p, p], bias [dim]
#pragma once

#include <sherd/kernels/tokens.h>
#include <sherd/models/module.h>

namespace sherd {

class SHERD_API PatchEmbed : public Module {
 public:
  // Starts as torch's Conv2d does: uniform within 1 / sqrt(fan_in).
  PatchEmbed(std::int64_t channels, std::int64_t patch, std::int64_t dim);

 protected:
  Variable forward(const Variable& images) override;

 private:
  PatchSize patch_;
  std::shared_ptr<Parameter> weight_, bias_;
};

}  // namespace sherd
