// SPDX-License-Identifier: Apache-2.0
#include <sherd/tools/planner/published.h>

#include <sherd/runtime/error.h>
#include <sherd/runtime/suggest.h>

#include <algorithm>

namespace sherd {
namespace {

using Unit = PublishedCase::Unit;

// A model as a stack of blocks.
struct Stack {
  std::string about;
  std::int64_t dim, depth, heads, head_dim;
  double mlp_ratio;
  bool biases;
  std::int64_t tokens, vocabulary;
  int vocabulary_matrices = 1;  // 2: not the same at input and output
};

const Stack kGpt175B{"GPT, 174.6 billion parameters", 12288, 96, 96, 128, 4, true, 2048, 51200};
const Stack kGpt530B{"GPT, 529.6 billion parameters", 20480, 105, 128, 160, 4, true, 2048, 51200};
const Stack kMinGpt175B{"GPT, 175 billion parameters", 12288, 96, 96, 128, 4, true, 2048, 50000};
// Half of the blocks of T5 have attention to the encoder too: 1.5 times 128 heads in each are as
// many parameters, FLOPs and scores.
const Stack kT5{
    "T5-11B: 24 + 24 blocks, 128 heads of 128 (256 in the decoder) as 192 in each, hidden 65536",
    1024,
    48,
    192,
    128,
    64,
    false,
    512,
    32128};
// Queries and outputs 4096 x 4096, keys and values 1024 x 4096 each, an MLP of three matrices of
// 14336 x 4096: with full keys and values, an MLP of two matrices of 18432 x 4096 is as much.
const Stack kLlama8B{
    "Llama 3.1 8B: grouped queries and a gated MLP of 14336 as full ones and an MLP of 18432",
    4096,
    32,
    32,
    128,
    4.5,
    false,
    8192,
    128256,
    2};
const Stack kMpt7B{"MPT-7B, 6.66 billion parameters", 4096, 32, 32, 128, 4, false, 2048, 50432};
const Stack kMpt1B{"MPT-1B, 1.32 billion parameters", 2048, 24, 16, 128, 4, false, 2048, 50432};

void put(Assignments& settings, const char* key, const std::string& value) {
  settings.emplace_back(key, value);
}

double megatron_count(const Stack& stack) {
  return megatron_flops(static_cast<double>(stack.tokens), static_cast<double>(stack.depth),
                        static_cast<double>(stack.dim), static_cast<double>(stack.vocabulary));
}

// The case without what was published, and with a step of `sequences` of each rank in passes of
// `micro_batch`.
PublishedCase start(std::string name, const Stack& stack, std::string system, int ranks,
                    std::int64_t sequences, std::int64_t micro_batch) {
  PublishedCase c;
  c.name = std::move(name);
  c.model = stack.about;
  c.system = std::move(system);
  c.ranks = ranks;
  c.tokens = stack.tokens;
  c.sequences = sequences;
  c.vocabulary_flops = 6 * stack.tokens * stack.dim * stack.vocabulary;
  put(c.settings, "model.dim", std::to_string(stack.dim));
  put(c.settings, "model.depth", std::to_string(stack.depth));
  put(c.settings, "model.heads", std::to_string(stack.heads));
  put(c.settings, "model.head_dim", std::to_string(stack.head_dim));
  put(c.settings, "model.mlp_ratio", fmt::format("{}", stack.mlp_ratio));
  put(c.settings, "model.qkv_bias", stack.biases ? "yes" : "no");
  put(c.settings, "model.activation", "gelu_tanh");
  put(c.settings, "model.patch", "1");
  put(c.settings, "data.dataset", "synthetic");
  put(c.settings, "data.image_size", fmt::format("1x1x{}", stack.tokens - 1));
  put(c.settings, "data.classes", std::to_string(stack.vocabulary * stack.vocabulary_matrices));
  put(c.settings, "run.batch_size", std::to_string(sequences * ranks));
  put(c.settings, "run.micro_batch", std::to_string(micro_batch));
  put(c.settings, "sharding.shard", "zero3");
  return c;
}

// DeepSpeed ZeRO-3 as of early 2021 (deepspeed/runtime/zero: stage3.py, partition_parameters.py,
// about release 0.3.13): a parameter is gathered by a collective of its own, on a list of
// world-size tensors, each of which torch.distributed copies out of the flat buffer by a kernel of
// its own; the fetch of a module synchronizes the host with the device before its gather and after
// it, so that nothing is hidden behind it; parameters below 1e5 elements stay. With recomputation
// of all blocks, as in the paper. Attention of Megatron's kernels: scores are written, scaled,
// masked and normalised by one kernel, dropped by another and read (6 times); in backward 1 is
// written and 1 read by products, 2 and 3 by these kernels, 2 read by products (9).
PublishedCase zero3_of_2021(const std::string& name, const Stack& stack, int ranks,
                            std::int64_t micro_batch, double published) {
  PublishedCase c = start(name, stack, "dgx-a100", ranks, micro_batch, micro_batch);
  c.about = fmt::format("DeepSpeed ZeRO-3 without model parallelism, {} A100, micro-batch {}",
                        ranks, micro_batch);
  c.source = "arXiv 2104.04473, table 2";
  put(c.settings, "precision.precision", "fp16");
  put(c.settings, "memory.recompute", "block");
  put(c.settings, "sharding.unit", "params:1");
  put(c.settings, "sharding.prefetch", "0");
  put(c.settings, "sharding.persist_below", "100000");
  c.list_collectives = true;
  c.score_passes_forward = 6;
  c.score_passes_backward = 9;
  c.unit = Unit::tflops;
  c.published = published;
  c.flops_per_sequence = megatron_count(stack);
  return c;
}

// FSDP (VLDB 2023): a unit a block, gathered one ahead. Attention of PyTorch's kernels one by one:
// scores are written, scaled, masked, normalised, dropped and read (10 times); in backward 1 and 1
// by products, 2, 3, 2, 2 by these kernels, 2 by products (13).
PublishedCase fsdp_of_2023(const std::string& name, const Stack& stack, int ranks,
                           std::int64_t micro_batch) {
  PublishedCase c = start(name, stack, "dgx-a100", ranks, micro_batch, micro_batch);
  c.source = "PyTorch FSDP, VLDB 2023 (arXiv 2304.11277), section 5";
  put(c.settings, "precision.precision", "bf16");
  put(c.settings, "memory.recompute", "block");
  c.score_passes_forward = 10;
  c.score_passes_backward = 13;
  c.unit = Unit::tflops;
  c.flops_per_sequence = megatron_count(stack);
  return c;
}

PublishedCase torchtitan(const std::string& name, int ranks, double published, double gib,
                         const std::string& how) {
  PublishedCase c = start(name, kLlama8B, "grand-teton-h100", ranks, 2, 2);
  c.about = fmt::format("FSDP2, Llama 3.1 8B, {} H100 of 500 W, batch 2, {}", ranks, how);
  c.source = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md";
  put(c.settings, "precision.precision", "bf16");
  put(c.settings, "precision.reduce_dtype", "fp32");
  put(c.settings, "memory.recompute", "selective");
  c.attention_part = 0.5;
  c.unit = Unit::tokens;
  c.published = published;
  c.published_gib = gib;
  return c;
}

PublishedCase llm_foundry(const std::string& name, const Stack& stack, const std::string& system,
                          int ranks, std::int64_t sequences, std::int64_t micro_batch,
                          double tokens_of_all) {
  PublishedCase c = start(name, stack, system, ranks, sequences, micro_batch);
  c.about = fmt::format("FSDP FULL_SHARD of llm-foundry, {} on {} ranks, micro-batch {}",
                        stack.about.substr(0, stack.about.find(',')), ranks, micro_batch);
  c.source = "llm-foundry, scripts/train/benchmarking/README.md";
  put(c.settings, "precision.precision", "bf16");
  put(c.settings, "precision.reduce_dtype", "fp32");
  c.loss_bytes_moved = 6;  // its fused cross-entropy
  c.loss_bytes_held = 4;
  // FSDP reduces after each micro-batch, unless asked not to.
  if (micro_batch < sequences) put(c.settings, "sharding.reduce_every", "micro");
  c.attention_part = 0.5;
  c.unit = Unit::tokens;
  c.published = tokens_of_all / ranks;
  return c;
}

// Tensor and pipeline parallelism, which these settings cannot say yet. `batch`: of all ranks.
PublishedCase megatron(const std::string& name, const Stack& stack, int ranks, std::int64_t batch,
                       Unit unit, double published) {
  PublishedCase c =
      start(name, stack, "dgx-a100", ranks, std::max<std::int64_t>(1, batch / ranks), 1);
  std::ranges::find(c.settings, "run.batch_size", &Assignments::value_type::first)->second =
      std::to_string(batch);
  c.waiting = "tensor and pipeline parallelism";
  c.unit = unit;
  c.published = published;
  c.flops_per_sequence = megatron_count(stack);
  return c;
}

void add_megatron(std::vector<PublishedCase>& cases) {
  const Stack gpt22{"GPT, 22 billion parameters", 6144, 48, 64, 96, 4, true, 2048, 51200};
  const Stack gpt1000{"GPT, 1 trillion parameters", 25600, 128, 160, 160, 4, true, 2048, 51200};
  struct Row {
    const char* name;
    const Stack& stack;
    int ranks, pipeline;
    double full, selective;
  };
  for (const Row& row :
       {Row{"22b", gpt22, 8, 1, 1.42, 1.10}, Row{"175b", kGpt175B, 64, 8, 18.13, 13.75},
        Row{"530b", kGpt530B, 280, 35, 49.05, 37.83}, Row{"1t", gpt1000, 512, 64, 94.42, 71.49}}) {
    const std::int64_t batch = row.ranks == 8 ? 4 : row.ranks;
    for (const bool selective : {false, true}) {
      cases.push_back(megatron(fmt::format("{}-{}", selective ? 5 : 4, row.name), row.stack,
                               row.ranks, batch, Unit::seconds,
                               selective ? row.selective : row.full));
      cases.back().about = fmt::format(
          "{} A100, tensor parallel 8, pipeline parallel {}, {}", row.ranks, row.pipeline,
          selective ? "sequence parallel, selective recompute" : "full recompute");
      cases.back().source = "arXiv 2205.05198, table 5";
    }
  }
  for (const auto& [ranks, tflops] : {std::pair<int, double>{384, 153}, {768, 149}, {1536, 141}}) {
    cases.push_back(
        megatron(fmt::format("8-{}", ranks), kGpt175B, ranks, 1536, Unit::tflops, tflops));
    cases.back().about = fmt::format("{} A100, tensor and pipeline parallel", ranks);
    cases.back().source = "arXiv 2104.04473, table 2";
  }
}

std::vector<PublishedCase> make_cases() {
  std::vector<PublishedCase> cases;
  add_megatron(cases);
  cases.push_back(zero3_of_2021("6-384", kGpt175B, 384, 4, 144));
  cases.push_back(zero3_of_2021("6-768", kGpt175B, 768, 2, 88));
  cases.push_back(zero3_of_2021("6-1536", kGpt175B, 1536, 1, 44));
  cases.push_back(zero3_of_2021("7-640", kGpt530B, 640, 4, 138));
  cases.push_back(zero3_of_2021("7-1120", kGpt530B, 1120, 2, 98));
  cases.push_back(zero3_of_2021("7-2240", kGpt530B, 2240, 1, 48));
  for (const auto& [name, ranks, batch, tflops] :
       {std::tuple<const char*, int, int, double>{"9-128-b1", 128, 1, 173},
        {"9-512-b1", 512, 1, 173},
        {"9-256-b2", 256, 2, 186},
        {"9-512-b2", 512, 2, 186}}) {
    cases.push_back(fsdp_of_2023(name, kMinGpt175B, ranks, batch));
    cases.back().about = fmt::format("FSDP, GPT-175B, {} A100, batch {} a GPU", ranks, batch);
    cases.back().published = tflops;
  }
  // Products and scores of the forward pass, which runs twice, and backward is twice as much.
  const double t5_inner = 192 * 128;
  const double t5_forward =
      48 * (2 * 512 * (4 * 1024 * t5_inner + 2 * 1024 * 65536.0) + 4 * 512 * 512 * t5_inner);
  for (const int ranks : {8, 512}) {
    cases.push_back(fsdp_of_2023(fmt::format("10-{}", ranks), kT5, ranks, 8));
    cases.back().about = fmt::format("FSDP, T5-11B, {} A100, batch 8 a GPU", ranks);
    cases.back().flops_per_sequence = 4 * t5_forward;
    if (ranks == 512) {
      cases.back().ratio_to = "10-8";
      cases.back().published = 0.93;
    }
  }
  cases.push_back(torchtitan("11-8", 8, 5762, 82.4, "kernels of PyTorch one by one"));
  cases.push_back(torchtitan("11-128", 128, 5605, 67.0, "kernels of PyTorch one by one"));
  cases.push_back(torchtitan("11-8-compiled", 8, 6667, 77.0, "torch.compile"));
  cases.push_back(torchtitan("11-128-compiled", 128, 6514, 62.0, "torch.compile"));
  cases.push_back(llm_foundry("12-a100", kMpt7B, "dgx-a100", 8, 12, 6, 37130));
  cases.push_back(llm_foundry("12-h100", kMpt7B, "dgx-h100", 8, 6, 6, 85144));
  cases.push_back(llm_foundry("13-8", kMpt1B, "dgx-h100", 8, 14, 14, 363645));
  cases.push_back(llm_foundry("13-64", kMpt1B, "dgx-h100", 64, 20, 20, 2841754));
  return cases;
}

std::int64_t setting_of(const PublishedCase& published, std::string_view key) {
  const auto found = std::ranges::find(published.settings, key, &Assignments::value_type::first);
  SHERD_INTERNAL_CHECK(found != published.settings.end(), "case {} sets no {}", published.name,
                       key);
  return std::stoll(found->second);
}

}  // namespace

const std::vector<PublishedCase>& published_cases() {
  static const std::vector<PublishedCase> cases = make_cases();
  return cases;
}

const PublishedCase& published_case(std::string_view name) {
  const auto& cases = published_cases();
  const auto found = std::ranges::find(cases, name, &PublishedCase::name);
  if (found == cases.end()) {
    std::vector<std::string> names;
    for (const PublishedCase& c : cases) names.push_back(c.name);
    fail("there is no published case '{}'{}", name, did_you_mean(name, names));
  }
  return *found;
}

TrainSettings published_settings(const PublishedCase& published) {
  TrainSettings settings;
  for (const auto& [key, value] : published.settings) {
    assign(settings, key, value, "published case " + published.name);
  }
  return settings;
}

double published_figure(const PublishedCase& published, double step_seconds) {
  SHERD_CHECK(step_seconds > 0, "published case {}: a step of {} s: expected more than 0",
              published.name, step_seconds);
  const auto sequences = static_cast<double>(published.sequences);
  switch (published.unit) {
    case Unit::tflops: return published.flops_per_sequence * sequences / step_seconds / 1e12;
    case Unit::tokens: return static_cast<double>(published.tokens) * sequences / step_seconds;
    case Unit::seconds: break;
  }
  return step_seconds;
}

Work with_terms(const PublishedCase& published, const Work& work) {
  Work result = work;
  if (work.kind != Work::Kind::kernel || work.flops == 0) return result;
  // Attention is 2 products forward and 5 backward, each 2 * scores * head_dim FLOPs.
  const bool backward = work.name.find("backward") != std::string_view::npos;
  const std::int64_t head_dim = setting_of(published, "model.head_dim");
  const std::int64_t scores = work.flops / ((backward ? 5 : 2) * 2 * head_dim);
  const int passes = backward ? published.score_passes_backward : published.score_passes_forward;
  result.bytes += 2 * passes * scores;
  result.flops =
      static_cast<std::int64_t>(static_cast<double>(work.flops) * published.attention_part);
  return result;
}

double more_seconds(const PublishedCase& published, const Work& work, const System& system) {
  if (!published.list_collectives || work.kind != Work::Kind::collective) return 0;
  if (work.name != "all_gather" && work.name != "reduce_scatter") return 0;
  // For each piece the host makes a view and asks for a copy, which takes at least a kernel.
  const double each = std::max(system.smallest_kernel_seconds, 2 * system.launch_seconds);
  const double moved = 2 * static_cast<double>(work.bytes) /
                       (system.memory_bytes_per_second * system.memory_reached);
  return std::max(moved, work.group.size * each);
}

std::int64_t vocabulary_bytes(const PublishedCase& published) {
  const std::int64_t dim = setting_of(published, "model.dim");
  const std::int64_t vocabulary = published.vocabulary_flops / (6 * published.tokens * dim);
  const std::int64_t rows = setting_of(published, "run.micro_batch") * published.tokens;
  return published.loss_bytes_held * rows * vocabulary;
}

std::vector<Work> vocabulary_work(const PublishedCase& published) {
  const std::int64_t micro = setting_of(published, "run.micro_batch");
  const std::int64_t dim = setting_of(published, "model.dim");
  const std::int64_t rows = micro * published.tokens;
  const std::int64_t vocabulary = published.vocabulary_flops / (6 * published.tokens * dim);
  const DType dtype = dtype_from_name(published_settings(published).precision);
  const auto bytes_of = static_cast<std::int64_t>(size_of(dtype));
  const auto product = [&](std::string_view name, std::int64_t m, std::int64_t n, std::int64_t k) {
    Work work;
    work.kind = Work::Kind::product;
    work.name = name;
    work.dtype = dtype;
    work.m = m;
    work.n = n;
    work.k = k;
    work.flops = 2 * m * n * k;
    work.bytes = bytes_of * (m * k + k * n + m * n);
    return work;
  };
  Work loss;
  loss.name = "vocabulary_loss";
  loss.bytes = published.loss_bytes_moved * rows * vocabulary;
  std::vector<Work> works;
  for (std::int64_t done = 0; done < published.sequences; done += micro) {
    works.push_back(product("vocabulary_forward", rows, vocabulary, dim));
    works.push_back(loss);
    works.push_back(product("vocabulary_input_gradient", rows, dim, vocabulary));
    works.push_back(product("vocabulary_weight_gradient", vocabulary, dim, rows));
  }
  return works;
}

}  // namespace sherd
