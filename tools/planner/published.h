// SPDX-License-Identifier: Apache-2.0
// Published measurements of sharded training, as settings with which the unchanged step can be
// planned, to hold what a planner says against what others measured.
//
// Note [Language models as stacks of ViT blocks]
// A block of a decoder is a block of a ViT: attention, an MLP, two norms. A sequence of s tokens is
// an image of s - 1 patches of one pixel and a class token. Where a block is of another form, the
// MLP ratio is such that a block has as many parameters, and so as many FLOPs of products; `model`
// says how. The vocabulary's matrix is the head of the classifier (data.classes), so that its
// parameters are gathered, reduced and updated; but the head sees one token of a sequence, and the
// FLOPs of all tokens are a term of their own: vocabulary_flops.
//
// No term is fitted: each says what the published program did that the settings cannot say.
#pragma once

#include <sherd/runtime/schedule.h>
#include <sherd/tools/planner/system.h>
#include <sherd/tools/trainer/settings.h>

#include <string>
#include <string_view>
#include <vector>

namespace sherd {

struct PublishedCase {
  enum class Unit : std::uint8_t {
    tflops,  // model TFLOP/s of one rank: flops_per_sequence * sequences / seconds
    tokens,  // a second, of one rank
    seconds  // a step
  };

  std::string name;     // "6-384": the number in the list of cases, and what tells it from others
  std::string about;    // what it is, in a line
  std::string source;   // where it was published
  std::string model;    // how its blocks are a ViT's
  std::string waiting;  // not empty: what has to be there before it can be planned
  std::string system;   // of tools/systems
  int ranks = 1;
  Assignments settings;  // of setting_table(); with all other settings as they are
  std::int64_t tokens = 0;
  std::int64_t sequences = 1;  // of one rank in a step

  // Terms; all for one sequence of one rank in a step.
  std::int64_t vocabulary_flops = 0;  // of the products with the vocabulary's matrix, 3 * 2 s h V
  // Of the loss on its logits: bytes moved and held for each. 32 and 12 for kernels of PyTorch one
  // by one: to fp32 (2 + 4), the logarithm of the softmax (4 + 4), its gradient (8 + 4), back to 16
  // bits (4 + 2); held are logits and gradients in 16 bits and fp32. 6 and 4 for one kernel on 16.
  int loss_bytes_moved = 32, loss_bytes_held = 12;
  double attention_part = 1;  // of attention's FLOPs that were computed: 0.5 where a causal
                              // kernel leaves out what is masked
  // Attention of several kernels: how often scores [heads, s, s] in 16 bits are read or written.
  int score_passes_forward = 0, score_passes_backward = 0;
  // Collectives on lists of tensors: every rank's piece is copied by a kernel of its own.
  bool list_collectives = false;

  Unit unit = Unit::tflops;
  double published = 0;           // 0: none, a case that another is held against
  double flops_per_sequence = 0;  // of unit tflops: what the authors count
  std::string ratio_to;           // not empty: `published` is the figure over that of this case
  double published_gib = 0;       // most memory of a rank; 0: not published
};

SHERD_API const std::vector<PublishedCase>& published_cases();
// Throws, with the names there are, where there is none of this name.
SHERD_API const PublishedCase& published_case(std::string_view name);

// The settings of a case.
SHERD_API TrainSettings published_settings(const PublishedCase& published);
// What a step of these seconds is in the unit of the case. Of a ratio: before it is taken.
SHERD_API double published_figure(const PublishedCase& published, double step_seconds);

// A piece of the recorded work as the published program did it: attention's FLOPs and bytes.
SHERD_API Work with_terms(const PublishedCase& published, const Work& work);
// Seconds that the published program needed beside that: copies of lists.
SHERD_API double more_seconds(const PublishedCase& published, const Work& work,
                              const System& system);
// The work with the vocabulary's matrix of a rank in a step, one after the other: logits, the loss
// on them, and the gradients of both factors, for each micro-batch.
SHERD_API std::vector<Work> vocabulary_work(const PublishedCase& published);
// What the logits of a micro-batch and their gradients take at the end of the forward pass, when
// activations do most.
SHERD_API std::int64_t vocabulary_bytes(const PublishedCase& published);

// Megatron's count for one sequence, with all of the forward pass again in backward (arXiv
// 2104.04473, equation 3): 96 s l h^2 (1 + s / (6h) + V / (16 l h)).
constexpr double megatron_flops(double s, double l, double h, double v) {
  return 96 * s * l * h * h * (1 + s / (6 * h) + v / (16 * l * h));
}

}  // namespace sherd
