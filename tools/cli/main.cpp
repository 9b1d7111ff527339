// SPDX-License-Identifier: Apache-2.0
#include "command.h"

#include <sherd/runtime/error.h>
#include <sherd/runtime/suggest.h>
#include <sherd/tools/trainer/ranks.h>
#include <sherd/tools/trainer/train.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>

namespace {

using namespace sherd;

// The innermost command that was given.
CLI::App* given_command(CLI::App* app) {
  for (CLI::App* command : app->get_subcommands()) return given_command(command);
  return app;
}

void allow_unknown_words(CLI::App* app) {
  app->allow_extras();
  for (CLI::App* command : app->get_subcommands({})) allow_unknown_words(command);
}

// The message for words the parser did not know: flags and commands get a suggestion.
std::string unknown_words(CLI::App* app, const std::string& word) {
  std::string path = app->get_name();
  for (CLI::App* parent = app->get_parent(); parent != nullptr; parent = parent->get_parent()) {
    path = parent->get_name() + " " + path;
  }
  if (!word.starts_with("-")) {
    std::vector<std::string> commands;
    for (const CLI::App* command : app->get_subcommands({}))
      commands.push_back(command->get_name());
    if (commands.empty())
      return fmt::format("unexpected argument '{}'; see `{} --help`", word, path);
    return fmt::format("unknown command '{}'{}", word, did_you_mean(word, commands));
  }
  std::vector<std::string> known;
  for (const CLI::Option* option : app->get_options()) {
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  }
  const std::string name = word.substr(0, word.find('='));
  std::string hint = did_you_mean(name, known);
  if (hint.starts_with("; known")) hint = fmt::format("; see `{} --help`", path);
  return fmt::format("unknown flag '{}'{}", name, hint);
}

// Whoever cannot hear the message, as stderr is gone too, still gets the status.
int report(const std::exception& error) {
  std::fflush(stdout);
  std::fputs(fmt::format("sherd: {}\n", error.what()).c_str(), stderr);
  return 1;
}

// "--world: expected INT, got 'large'" for the parser's "Could not convert: --world = large".
std::string message_of(const CLI::ConversionError& error, CLI::App* given) {
  const std::string text = error.what();
  const std::size_t colon = text.find(": "), equals = text.find(" = ");
  if (colon == std::string::npos || equals == std::string::npos || equals < colon) return text;
  const std::string name = text.substr(colon + 2, equals - colon - 2);
  const CLI::Option* option = given->get_option_no_throw(name);
  if (option == nullptr) return text;
  return fmt::format("{}: expected {}, got '{}'", name, option->get_type_name(),
                     text.substr(equals + 3));
}

int run(int argc, char** argv) {
  CLI::App app{
      "Sherd trains Vision Transformers.\n\n"
      "  sherd train                         train on Fashion-MNIST with the default settings\n"
      "  sherd train run.toml --lr 5e-4      settings from a file, one changed\n"
      "  sherd train --ranks 4 --shard zero3 four ranks, parameters sharded\n"
      "  sherd eval runs/NAME                accuracy of a run's weights\n"
      "  sherd inspect model                 the model names, and the parameters of one\n"
      "  sherd inspect checkpoint RUN        what its newest checkpoint holds, --verify checks it\n"
      "  sherd inspect events --ranks 4      what a sharded step does, in order\n"
      "  sherd plan --ranks 64 ...           what a step will hold, send and take, before it is "
      "run\n"
      "  sherd convert SOURCE DEST           weights from one format to another\n"
      "  sherd bench step                    speed of a training step on this machine\n"
      "  sherd bench matrix --out DIR        every policy, model and precision, beside PyTorch\n"
      "  sherd bench kernels                 speed of each kernel beside what the device can do\n"
      "  sherd bench comm                    speed of what ranks say to each other\n"
      "  sherd bench disk --dir DIR          speed of a disk that state is kept on\n"};
  app.name("sherd");
  app.set_version_flag("--version", "sherd " + version() + " (" + build_description() + ")");
  const cli::Command commands[] = {cli::add_train(app),   cli::add_eval(app), cli::add_inspect(app),
                                   cli::add_convert(app), cli::add_plan(app), cli::add_bench(app)};
  allow_unknown_words(&app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ConversionError& error) {
    fail("{}", message_of(error, given_command(&app)));
  } catch (const CLI::ParseError& error) {
    // --help and --version
    if (error.get_exit_code() == 0) return is_first_process() ? app.exit(error) : 0;
    fail("{}", error.what());
  }
  CLI::App* given = given_command(&app);
  const std::vector<std::string> rest = app.remaining(true);
  if (!rest.empty()) fail("{}", unknown_words(given, rest.front()));
  if (!given->get_subcommands({}).empty()) {  // a command of commands alone
    if (is_first_process()) fmt::print(stderr, "{}", given->help());
    return 2;
  }
  for (const cli::Command& command : commands) {
    if (command.app->parsed()) return command.run();
  }
  fail("no command");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    int status = 0;
    try {
      status = run(argc, argv);
    } catch (const GroupEnded&) {
      throw;
    } catch (const std::exception& error) {
      report_to_launched(error.what());
      throw;
    }
    SHERD_CHECK(std::fflush(stdout) == 0 && std::ferror(stdout) == 0,
                "the output could not be written: {}", std::strerror(errno));
    return status;
  } catch (const GroupEnded& error) {
    return is_first_process() ? report(error) : 1;
  } catch (const std::exception& error) {
    return report(error);
  }
}
