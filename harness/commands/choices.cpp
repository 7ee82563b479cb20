#include "harness/commands/choices.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <map>

#include "harness/case/case_options.h"
#include "harness/case/mesh_order.h"
#include "shardproof/base/check.h"
#include "shardproof/sharding/named_options.h"

namespace harness {
namespace {

// What PyTorch and its users call them.
const std::map<std::string, std::string> kAxesOfPeers = {{"dp", "dp_shard"},      {"fsdp", "dp_shard"},
                                                         {"data", "dp_shard"},    {"shard", "dp_shard"},
                                                         {"ddp", "dp_replicate"}, {"replicate", "dp_replicate"}};
const std::map<std::string, std::string> kStrategiesOfPeers = {
    {"fsdp", "zero3"},   {"fsdp2", "zero3"}, {"full_shard", "zero3"}, {"shard_grad_op", "zero2"}, {"hybrid_shard", "hsdp"},
    {"no_shard", "ddp"}, {"dp", "ddp"}};

std::string suggestion(const std::string& word, const std::map<std::string, std::string>& of_peers,
                       const std::vector<std::string>& names) {
  const auto found = of_peers.find(word);
  return found == of_peers.end() ? did_you_mean(word, names) : fmt::format(" Did you mean '{}'?", found->second);
}

std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  for (const shardproof::Strategy& row : shardproof::strategies()) names.push_back(row.name);
  return names;
}

}  // namespace

shardproof::Mesh chosen_mesh(const std::string& text) {
  shardproof::Mesh mesh = shardproof::Mesh::parse(text);
  for (const shardproof::Axis& axis : mesh.axes())
    SHARD_REQUIRE(std::ranges::find(mesh_axes(), axis.name) != mesh_axes().end(), "mesh",
                  "--mesh has the axis '{}'; there are {}.{}", axis.name, fmt::join(mesh_axes(), ", "),
                  suggestion(axis.name, kAxesOfPeers, mesh_axes()));
  return mesh;
}

Machine chosen_machine(const std::string& text) {
  std::vector<std::string> names;
  for (const Machine& machine : known_machines()) {
    if (machine.name == text) return machine;
    names.push_back(machine.name);
  }
  std::error_code is_no_path;
  SHARD_REQUIRE(std::filesystem::exists(text, is_no_path) && !std::filesystem::is_directory(text, is_no_path), "plan",
                "--machine is '{}', which is no file; known machines are {}.{}", text, fmt::join(names, ", "),
                did_you_mean(text, names));
  return read_machine(text);
}

std::string strategy_help() {
  return fmt::format("the strategy, one of {}, or a row_* (docs/strategies.md)", fmt::join(strategy_names(), ", "));
}

const shardproof::Strategy& chosen_strategy(const std::string& name) {
  try {
    return shardproof::strategy(name);
  } catch (const shardproof::Error& error) {
    throw shardproof::Error(fmt::format("{}, and rows without a name, row_* (docs/strategies.md).{}", error.what(),
                                        suggestion(name, kStrategiesOfPeers, strategy_names())));
  }
}

void add_sharding_options(CLI::App& app, std::vector<std::string>& texts) {
  std::vector<std::string> names;
  for (const shardproof::NamedOption& option : shardproof::named_options()) names.push_back(option.name);
  app.add_option("--set", texts,
                 fmt::format("an option of fully_shard as name=value; may be repeated. docs/options.md has them: {}",
                             fmt::join(names, ", ")))
      ->take_all()
      ->check([](const std::string& text) -> std::string {
        try {
          shardproof::ShardOptions options;
          shardproof::set_options(options, {text});
        } catch (const shardproof::Error& error) {
          return error.what();
        }
        return {};
      });
}

void add_context_attention(CLI::App& app, int64_t& attention) {
  // Its words are those of cases.
  const std::vector<std::string>& words = std::ranges::find(option_rows(), "attention", &OptionRow::key)->names;
  app.add_option_function<std::string>(
         "--context-attention",
         [&words, &attention](const std::string& word) { attention = std::ranges::find(words, word) - words.begin(); },
         "how queries see the keys of other ranks along cp")
      ->check(CLI::IsMember(words))
      ->default_str(words.front());
}

std::string table_of_sharding_options() {
  std::string table = "| option | values | default | |\n| --- | --- | --- | --- |\n";
  for (const shardproof::NamedOption& option : shardproof::named_options()) {
    using Kind = shardproof::NamedOption::Kind;
    const std::string values = option.kind == Kind::word    ? fmt::format("`{}`", fmt::join(option.words, "`, `"))
                               : option.kind == Kind::flag  ? "`true`, `false`"
                               : option.kind == Kind::whole ? fmt::format("a whole number from {:g}", option.least)
                                                            : fmt::format("a number from {:g}", option.least);
    table += fmt::format("| `{}` | {} | `{}` | {} |\n", option.name, values, option.text(option.standard()), option.about);
  }
  return table;
}

}  // namespace harness
