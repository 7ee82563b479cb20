// `shardproof sample`: text from a model that `train` saved, or of a Hugging Face folder.
#include <CLI/CLI.hpp>
#include <memory>

#include "harness/commands/choices.h"
#include "harness/commands/commands.h"
#include "harness/commands/json_lines.h"
#include "harness/commands/launch_options.h"
#include "harness/train/sample.h"
#include "harness/train/train_weights.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

struct Arguments {
  std::string checkpoint, weights, prompt = "\n", mesh = "dp_shard=1", json;
  std::vector<int64_t> prompt_tokens;
  SampleOptions options;
  Launched launched;
  bool mesh_given = false, prompt_given = false;
};

SavedModel model_of(const Arguments& arguments) {
  SHARD_REQUIRE(arguments.checkpoint.empty() != arguments.weights.empty(), "sample",
                "give a checkpoint of `train`, or --weights with a folder of a Hugging Face model, and not both");
  return arguments.weights.empty() ? saved_model(arguments.checkpoint) : model_in_weights(arguments.weights);
}

std::vector<int64_t> prompt_of(const Arguments& arguments, const SavedModel& saved) {
  SHARD_REQUIRE(arguments.prompt_tokens.empty() || !arguments.prompt_given, "sample",
                "--prompt and --prompt-tokens exclude each other; leave one of them out");
  if (!arguments.prompt_tokens.empty()) return arguments.prompt_tokens;
  if (saved.are_weights) require_bytes(saved.model, saved.folder, "sample", "Give --prompt-tokens");
  SHARD_REQUIRE(saved.type == TokenType::uint8, "sample",
                "this model was trained on tokens of {}, not on bytes: give --prompt-tokens", to_string(saved.type));
  std::vector<int64_t> tokens;
  for (const char c : arguments.prompt) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

int run_sample(Arguments& arguments) {
  const auto processes = arguments.launched.start(arguments.mesh_given ? arguments.mesh : "");
  if (processes && !arguments.mesh_given) arguments.mesh = fmt::format("dp_shard={}", processes->size());
  SampleOptions& options = arguments.options;
  options.device = arguments.launched.device();
  options.mesh = chosen_mesh(arguments.mesh);
  options.strategy = chosen_strategy(options.strategy).name;
  on_each(processes.get(), [&](shardproof::Comm*) {
    options.saved = model_of(arguments);
    options.prompt = prompt_of(arguments, options.saved);
  });
  const bool bytes = options.saved.type == TokenType::uint8;
  const bool speaks = !processes || processes->rank() == 0;
  JsonLines json(speaks ? arguments.json : "");
  std::vector<int64_t> tokens;
  std::string text;
  const auto put = [&](int64_t token) {
    tokens.push_back(token);
    text += bytes ? std::string(1, static_cast<char>(token)) : fmt::format("{}{}", text.empty() ? "" : " ", token);
    if (bytes)
      std::fputc(static_cast<int>(token), stdout);
    else
      fmt::print("{}{}", tokens.size() == 1 ? "" : " ", token);
    std::fflush(stdout);
  };
  if (speaks && arguments.prompt_tokens.empty()) fmt::print("{}", arguments.prompt);
  sample(options, put, processes.get());
  if (!speaks) return 0;
  fmt::print("\n");
  json.write({{"type", "sample"},
              {options.saved.are_weights ? "weights" : "checkpoint", options.saved.folder},
              {"prompt", options.prompt},
              {"tokens", tokens},
              {"text", bytes ? nlohmann::json(text) : nlohmann::json()}});
  return 0;
}

}  // namespace

void add_sample_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand(
      "sample", "print text from a model that `train` saved, whatever mesh it was trained on, or of a Hugging Face folder");
  auto a = std::make_shared<Arguments>();
  SampleOptions& o = a->options;
  command->add_option("checkpoint", a->checkpoint, "a checkpoint of `train`, or a folder of them, of which the last is taken");
  command->add_option("--weights", a->weights, "instead of a checkpoint: a folder of a Hugging Face model");
  CLI::Option* const prompt = command->add_option("--prompt", a->prompt, "the text to go on with; by default a new line");
  command->add_option("--prompt-tokens", a->prompt_tokens, "the tokens to go on with, where the model was trained on tokens");
  command->add_option("--length", o.length, "how many tokens to add")->capture_default_str();
  command->add_option("--temperature", o.temperature, "below 1 likely tokens become likelier; 0: always the likeliest one")
      ->capture_default_str();
  command->add_option("--top-k", o.top_k, "draw among so many of the likeliest tokens; 0: among all")->capture_default_str();
  command->add_option("--seed", o.seed, "the seed of the draws")->capture_default_str();
  CLI::Option* const mesh =
      command->add_option("--mesh", a->mesh, "the ranks over which parameters are cut: dp_shard=N")->capture_default_str();
  command->add_option("--strategy", o.strategy, strategy_help())->capture_default_str();
  command->add_option("--json", a->json, "also write the tokens as a JSON object to this file");
  a->launched.add_to(*command);
  command->callback([a, prompt, mesh, &exit_code] {
    a->mesh_given = mesh->count() > 0;
    a->prompt_given = prompt->count() > 0;
    exit_code = run_sample(*a);
  });
}

}  // namespace harness
