#include "harness/commands/usage.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "harness/commands/choices.h"
#include "harness/run/verbosity.h"
#include "harness/train/train_schedule.h"
#include "shardproof/algebra/strategy.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/weight_names.h"

namespace harness {
namespace {

const std::map<std::string, std::string> kExamples = {
    {"verify",
     "  shardproof verify --cases 200                                random models, meshes and histories\n"
     "  shardproof verify --strategy zero3 --mesh dp_shard=3         only such cases\n"
     "  shardproof verify --minutes 10 --seed 7 --json cases.json    for ten minutes, with a report"},
    {"replay", "  shardproof replay 'mlp(widths=5-7-3) mesh(dp_shard=4) zero3 sgd(lr=0.1) ordered seed=3 : step*2'"},
    {"train",
     "  shardproof train --mesh dp_shard=2 --strategy zero3 --check            beside the unsharded run, bit for bit\n"
     "  shardproof train --data TEXT --steps 500 --checkpoint-dir RUN --save-every 50\n"
     "  shardproof train --data TEXT --steps 900 --checkpoint-dir RUN --resume --mesh dp_shard=4\n"
     "  shardproof train --config run.toml --lr 3e-4\n"
     "  shardproof train --data tokens.bin --token-type uint16 --shuffle --model "
     "'gpt(layers=4,hidden=128,heads=4,vocab=50257,positions=64)'\n"
     "  shardproof train --weights Qwen2.5-0.5B --data tokens.bin --token-type uint32 --mesh dp_shard=2,tp=2 --lr 1e-5"},
    {"sample",
     "  shardproof sample RUN --prompt 'def ' --length 300 --temperature 0.8\n"
     "  shardproof sample RUN/step_100 --prompt-tokens 464 2068 --top-k 40 --mesh dp_shard=2\n"
     "  shardproof sample --weights gpt2 --prompt-tokens 464 2068 --length 20"},
    {"plan",
     "  shardproof plan --mesh dp_replicate=4,dp_shard=64 --strategy hsdp\n"
     "  shardproof plan --model 'llama(layers=2,hidden=64,heads=4,vocab=256,positions=64)' --mesh dp_shard=2,tp=2 --pieces\n"
     "  shardproof plan --model config.json --length 4096 --mesh dp_shard=64,tp=8 --dtype bf16 --machine h100\n"
     "  shardproof plan --model config.json --length 4096 --search --ranks 512 --dtype bf16 --memory-max 80GiB"},
    {"bench", "  shardproof bench --against ddp,fsdp2                         beside PyTorch's, in rounds"},
    {"checkpoint",
     "  shardproof checkpoint inspect RUN/step_100\n"
     "  shardproof checkpoint convert RUN/step_100 OUT --to safetensors\n"
     "  shardproof checkpoint convert RUN/step_100 HF --to safetensors --family llama --dtype bf16\n"
     "  shardproof checkpoint convert Qwen2.5-0.5B OURS --family qwen2 --dtype float32\n"
     "  shardproof checkpoint reshard RUN/step_100 OUT --mesh dp_shard=4"},
};

std::vector<CLI::App*> commands_of(CLI::App& app) {
  return app.get_subcommands([](CLI::App*) { return true; });
}

std::vector<std::string> names_of(const std::vector<CLI::App*>& commands) {
  std::vector<std::string> names;
  for (const CLI::App* command : commands) names.push_back(command->get_name());
  return names;
}

// With the dashes.
std::vector<std::string> options_of(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

// The values of options that take one of a few words. An option of another command has the same words, or none.
std::vector<std::pair<std::string, std::vector<std::string>>> values() {
  std::vector<std::string> strategies;
  for (const shardproof::Strategy& row : shardproof::strategies()) strategies.push_back(row.name);
  return {{"--strategy", strategies},
          {"--mode", {"exact", "ordered", "canonical", "fast"}},
          {"--backend", {"threads", "mpi", "nccl"}},
          {"--device", {"cpu", "cuda"}},
          {"--dtype", {"float32", "bf16", "fp16"}},
          {"--sum", {"rank_order", "native"}},
          {"--token-type", {"uint8", "uint16", "uint32"}},
          {"--schedule", schedule_kinds()},
          {"--arithmetic", {"native", "canonical"}},
          {"--projections", {"family", "fused", "separate"}},
          {"--family", shardproof::checkpoint::weight_families()}};
}

// Visits a command and all below it, with the words that lead there: "", " bench", " bench kernels".
template <class Visit>
void walk(CLI::App& command, const std::string& path, const Visit& visit) {
  visit(command, path);
  for (CLI::App* below : commands_of(command)) walk(*below, path + " " + below->get_name(), visit);
}

// Words of the command line in front of the cursor that are commands say which command's options to offer. Where nothing is
// offered, the shell completes files.
std::string bash_script(CLI::App& app) {
  std::string paths, choices, known;
  walk(app, "", [&](CLI::App& command, const std::string& path) {
    paths += fmt::format("    '{}') words='{} {}' ;;\n", path, fmt::join(names_of(commands_of(command)), " "),
                         fmt::join(options_of(command), " "));
    if (!path.empty()) known += fmt::format("{}'{}'", known.empty() ? "" : "|", path);
  });
  for (const auto& [option, words] : values()) choices += fmt::format("    {}) words='{}' ;;\n", option, fmt::join(words, " "));
  return "_shardproof() {\n"
         "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} command='' words='' i\n"
         "  for ((i = 1; i < COMP_CWORD; ++i)); do\n"
         "    case \"$command ${COMP_WORDS[i]}\" in " +
         known +
         ") command=\"$command ${COMP_WORDS[i]}\" ;; esac\n"
         "  done\n"
         "  case $before in\n" +
         choices + "    *) case $command in\n" + paths +
         "    esac ;;\n"
         "  esac\n"
         "  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n"
         "}\n"
         "complete -o default -F _shardproof shardproof\n";
}

std::string quoted_for_fish(const std::string& text) {
  std::string out;
  for (const char letter : text) {
    if (letter == '\'' || letter == '\\') out += '\\';
    out += letter;
  }
  return "'" + out + "'";
}

std::string fish_script(CLI::App& app) {
  std::string out;
  const std::vector<std::string> first = names_of(commands_of(app));
  for (const CLI::App* command : commands_of(app))
    out += fmt::format("complete -c shardproof -n 'not __fish_seen_subcommand_from {}' -f -a {} -d {}\n", fmt::join(first, " "),
                       command->get_name(), quoted_for_fish(command->get_description()));
  for (CLI::App* command : commands_of(app)) {
    const std::string seen = fmt::format("complete -c shardproof -n '__fish_seen_subcommand_from {}'", command->get_name());
    for (const CLI::App* below : commands_of(*command))
      out += fmt::format("{} -f -a {} -d {}\n", seen, below->get_name(), quoted_for_fish(below->get_description()));
    for (const CLI::Option* option : command->get_options())
      for (const std::string& name : option->get_lnames())
        out += fmt::format("{} -l {} -d {}\n", seen, name, quoted_for_fish(option->get_description()));
  }
  for (const auto& [option, words] : values())
    out += fmt::format("complete -c shardproof -l {} -x -a '{}'\n", option.substr(2), fmt::join(words, " "));
  return out;
}

// The one option that may have a value takes it behind an equals sign. "" for other words that nobody expected.
std::string of_check(const CLI::App& command, const std::string& value) {
  for (const CLI::Option* option : command.get_options())
    if (option->check_lname("check") && option->count() > 0)
      return fmt::format("A value of --check stands behind an equals sign: --check={}\n", value);
  return "";
}

}  // namespace

void add_examples(CLI::App& app) {
  app.footer("`shardproof COMMAND --help` has the options of a command, and examples.");
  for (CLI::App* command : commands_of(app))
    for (const auto& [name, text] : kExamples)
      if (command->get_name() == name) command->footer(command->get_footer() + "Examples:\n" + text);
}

void add_verbosity(CLI::App& command, const std::string& quiet, const std::string& verbose) {
  CLI::Option* less = command.add_flag_callback("-q,--quiet", [] { verbosity() = Verbosity::quiet; }, quiet);
  less->configurable(false);
  if (verbose.empty()) return;
  CLI::Option* more = command.add_flag_callback("-v,--verbose", [] { verbosity() = Verbosity::verbose; }, verbose);
  more->configurable(false)->excludes(less);
}

void add_completion_command(CLI::App& app) {
  auto shell = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("completion", "print a script that completes commands and options in a shell");
  command->add_option("shell", *shell, "bash, zsh or fish")->required();
  command->footer(
      "Examples:\n"
      "  source <(build/shardproof completion bash)              in ~/.bashrc; zsh in ~/.zshrc\n"
      "  build/shardproof completion fish > ~/.config/fish/completions/shardproof.fish");
  command->callback([&app, shell] {
    const std::vector<std::string> shells = {"bash", "zsh", "fish"};
    SHARD_REQUIRE(std::ranges::find(shells, *shell) != shells.end(), "completion",
                  "there is no script for '{}'; there are {}.{}", *shell, fmt::join(shells, ", "),
                  did_you_mean(*shell, shells));
    if (*shell == "zsh") fmt::print("autoload -U +X bashcompinit && bashcompinit\n");
    fmt::print("{}", *shell == "fish" ? fish_script(app) : bash_script(app));
  });
}

std::string suggestions(const CLI::App& app) {
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().back();
  std::vector<std::string> commands;
  for (const CLI::App* below : command->get_subcommands([](const CLI::App*) { return true; }))
    commands.push_back(below->get_name());
  std::string out;
  for (const std::string& word : app.remaining(true)) {
    const std::string name = word.substr(0, word.find('='));
    if (name.starts_with("--"))
      out += fmt::format("There is no option '{}'.{}\n", name, did_you_mean(name, options_of(*command)));
    else if (!commands.empty())
      out += fmt::format("There is no command '{}'.{}\n", name, did_you_mean(name, commands));
    else
      out += of_check(*command, name);
  }
  return out;
}

}  // namespace harness
