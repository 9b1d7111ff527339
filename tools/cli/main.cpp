// SPDX-License-Identifier: Apache-2.0
#include "command.h"

#include <sherd/runtime/error.h>
#include <sherd/runtime/suggest.h>
#include <sherd/tools/trainer/train.h>

#include <cstdio>
#include <exception>

namespace {

using namespace sherd;

// The message for words the parser did not know: flags get a suggestion.
std::string unknown_words(const CLI::App& app, const std::vector<std::string>& words) {
  const std::string& word = words.front();
  if (!word.starts_with("-")) return fmt::format("unexpected argument '{}'", word);
  std::vector<std::string> known;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  }
  const std::string name = word.substr(0, word.find('='));
  std::string hint = did_you_mean(name, known);
  if (hint.starts_with("; known")) hint = "; see `sherd " + app.get_name() + " --help`";
  return fmt::format("unknown flag '{}'{}", name, hint);
}

int run(int argc, char** argv) {
  CLI::App app{
      "Sherd trains Vision Transformers.\n\n"
      "  sherd train                         train on Fashion-MNIST with the default settings\n"
      "  sherd train run.toml --lr 5e-4      settings from a file, one changed\n"
      "  sherd eval runs/NAME                accuracy of a run's weights\n"
      "  sherd inspect model                 the model names, and the parameters of one\n"
      "  sherd bench step                    speed of a training step on this machine\n"};
  app.name("sherd");
  app.require_subcommand(1);
  app.set_version_flag("--version", "sherd " + version() + " (" + build_description() + ")");
  const cli::Command commands[] = {cli::add_train(app), cli::add_eval(app), cli::add_inspect(app),
                                   cli::add_bench(app)};
  for (const cli::Command& command : commands) command.app->allow_extras();
  app.allow_extras();
  try {
    app.parse(argc, argv);
  } catch (const CLI::RequiredError&) {
    if (argc > 1) {
      std::vector<std::string> names;
      for (const cli::Command& command : commands) names.push_back(command.app->get_name());
      fail("unknown command '{}'{}", argv[1], did_you_mean(argv[1], names));
    }
    fmt::print("{}", app.help());
    return 2;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help and --version
    fail("{}", error.what());
  }
  for (const cli::Command& command : commands) {
    if (!command.app->parsed()) continue;
    std::vector<std::string> rest = command.app->remaining(true);
    if (rest.empty()) rest = app.remaining();
    if (!rest.empty()) fail("{}", unknown_words(*command.app, rest));
    return command.run();
  }
  fail("no command");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fflush(stdout);
    fmt::print(stderr, "sherd: {}\n", error.what());
    return 1;
  }
}
