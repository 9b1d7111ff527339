// SPDX-License-Identifier: Apache-2.0
// The operations of a ViT's training step, at its sizes, for `sherd bench kernels`.
#pragma once

#include <sherd/models/vit.h>
#include <sherd/runtime/tensor.h>

#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

namespace sherd::cli {

struct KernelCase {
  std::string kernel;  // "attention forward"
  std::string shape;   // "B 64, H 12, N 197, D 64"
  DType dtype;
  // What it must read and write, each operand once; 0 where its products count, not its bytes.
  std::int64_t bytes = 0;
  std::function<void()> call;
};
// Is given one case after another, whose tensors die with it.
using KernelCaseVisitor = std::function<void(const KernelCase&)>;

struct KernelSizes {
  ViTSettings model;
  std::int64_t batch = 1;
  DType dtype = DType::bf16;
};

void visit_products(Context& context, const KernelSizes& sizes, const KernelCaseVisitor& visit);
// Self-attention of `tokens` tokens each, in about as many sequences as make batch * model tokens.
void visit_attention(Context& context, const KernelSizes& sizes, std::int64_t tokens,
                     const KernelCaseVisitor& visit);
// Normalisation, activation, loss, dropout, additions, casts, sums, patches and their embedding,
// update.
void visit_memory_bound(Context& context, const KernelSizes& sizes, const KernelCaseVisitor& visit);

}  // namespace sherd::cli
