// SPDX-License-Identifier: Apache-2.0
#include "command.h"
#include "stop_signal.h"

#include <sherd/runtime/ledger.h>
#include <sherd/tools/trainer/convert.h>

namespace sherd::cli {
namespace {

int convert_command(const std::string& source, const std::string& destination,
                    const ConvertOptions& options) {
  watch_stop_signals();
  ProgressLine line;
  const ConvertResult result =
      convert_weights(source, destination, options, [&](std::uint64_t done, std::uint64_t all) {
        line.show(fmt::format("{} {} of {}",
                              bar(static_cast<double>(done) / static_cast<double>(all), 30),
                              format_bytes(static_cast<std::int64_t>(done)),
                              format_bytes(static_cast<std::int64_t>(all))));
        return !stop_requested();
      });
  line.clear();
  fmt::print("from            {}\n", result.from);
  fmt::print("to              {} ({}, {} file{})\n", destination, result.to, result.files,
             result.files == 1 ? "" : "s");
  fmt::print("                {} tensors, {}\n",
             group_digits(static_cast<std::int64_t>(result.tensors)),
             format_bytes(static_cast<std::int64_t>(result.bytes)));
  for (const std::string& note : result.notes) fmt::print("note            {}\n", note);
  if (result.resumable) {
    fmt::print("note            sherd train --resume {} goes on from it\n", destination);
  }
  return 0;
}

}  // namespace

Command add_convert(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand(
      "convert",
      "Weights from one format to another, tensor by tensor, so that a large model needs little\n"
      "memory. Nothing that is there is overwritten, and nothing half done is left. SOURCE is any "
      "of\n"
      "  a run, or a checkpoint of it\n"
      "  safetensors; split files: their directory, or model.safetensors.index.json\n"
      "  PyTorch's .pt, .pth, .bin; a directory of torch.distributed.checkpoint (.metadata)\n"
      "  a directory of DeepSpeed's ZeRO (latest, *_optim_states.pt)\n\n"
      "  sherd convert runs/a a.safetensors                       the newest checkpoint's weights\n"
      "  sherd convert runs/a/checkpoints/best hf/model.safetensors --names transformers\n"
      "  sherd convert vit_huge.safetensors huge --to split --max-file-size 1GB\n"
      "  sherd convert model.pt half.safetensors --dtype bf16     PyTorch's file, 16 bits\n"
      "  sherd convert hf/pytorch_model.bin vit.safetensors --names timm\n"
      "  sherd convert runs/a b --to checkpoint --pieces 4        other files; a run goes on from\n"
      "                                                           it: sherd train --resume b\n"
      "  sherd convert runs/a state.safetensors --optimizer yes   also optimizer.NAME.exp_avg, "
      "...\n");
  struct State {
    std::string source, destination, max_file_size;
    ConvertOptions options;
  };
  auto state = std::make_shared<State>();
  ConvertOptions& options = state->options;
  app->add_option("source", state->source, "what to read")->type_name("SOURCE");
  app->add_option("destination", state->destination, "what to write; must not be there")
      ->type_name("DEST");
  app->add_option("--to", options.to,
                  "safetensors, split or checkpoint [safetensors where DEST ends in .safetensors]")
      ->type_name("FORMAT");
  app->add_option("--names", options.names,
                  "timm or transformers: rename a Vision Transformer's weights [as they are]")
      ->type_name("NAMES");
  app->add_option("--dtype", options.dtype,
                  "fp32, bf16, fp16 or fp64 for the weights; the optimizer's state stays [as-is]")
      ->type_name("TYPE");
  app->add_option("--optimizer", options.optimizer,
                  "yes or no: the optimizer's state too [yes to a checkpoint where SOURCE has one]")
      ->type_name("yes|no");
  app->add_option("--max-file-size", state->max_file_size,
                  "of the tensors in one of split files [5GB]")
      ->type_name("SIZE");
  CLI::Option* pieces =
      app->add_option("--pieces", options.pieces, "files of a checkpoint [1]")->type_name("N");
  return {app, [state, pieces] {
            check_one_process("convert");
            SHERD_CHECK(!state->source.empty() && !state->destination.empty(),
                        "convert: give SOURCE and DEST; see `sherd convert --help`");
            ConvertOptions& given = state->options;
            given.max_file_size = parse_bytes(state->max_file_size, "--max-file-size");
            SHERD_CHECK(pieces->count() == 0 || given.pieces > 0,
                        "--pieces: expected 1 or more, got {}", given.pieces);
            return convert_command(state->source, state->destination, given);
          }};
}

}  // namespace sherd::cli
