#include "harness/commands/config_file.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <vector>

#include "harness/commands/choices.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

std::string without_comment(const std::string& line) {
  char quote = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    if (quote == 0 && line[i] == '#') return line.substr(0, i);
    if (quote == '"' && line[i] == '\\') ++i;
    if (quote == 0 ? line[i] == '"' || line[i] == '\'' : line[i] == quote) quote = quote == 0 ? line[i] : 0;
  }
  return line;
}

// CLI11 begins a comment at each '#', within quotes, too. So comments are cut here, and it is given a mark that no text has.
std::vector<CLI::ConfigItem> items_of(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  for (std::string line; std::getline(file, line);) text << without_comment(line) << '\n';
  SHARD_REQUIRE(file.eof(), "config", "cannot read {}; name another file with --config", path);
  CLI::ConfigTOML format;
  format.comment('\0');
  return format.from_config(text);
}

// Without dashes.
std::vector<std::string> names_of_options(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options())
    if (option->get_configurable())
      for (const std::string& name : option->get_lnames()) names.push_back(name);
  return names;
}

// A flag that is false, and an option that has its default, is one that is not given. So a file of all options, as
// `resolved_config` writes it, says no more than what was asked for. A flag that is true has the value that it has on a command
// line.
void give(CLI::Option& option, const CLI::ConfigItem& item) {
  if (item.inputs == std::vector<std::string>{option.get_default_str()}) return;
  if (option.get_expected_min() > 0) {
    option.add_result(item.inputs);
  } else {
    const std::string value = item.inputs.size() == 1 ? item.inputs.front() : "";
    if (value == "false") return;
    option.add_result(option.get_flag_value(item.name, value == "true" ? "" : value));
  }
  option.run_callback();
}

}  // namespace

void read_config(CLI::App& command, const std::string& path) {
  const std::vector<std::string> names = names_of_options(command);
  std::set<std::string> seen;
  for (const CLI::ConfigItem& item : items_of(path)) {
    SHARD_REQUIRE(item.parents.empty(), "config", "{}: tables such as [{}] mean nothing here; write NAME = VALUE", path,
                  item.parents.front());
    SHARD_REQUIRE(std::ranges::find(names, item.name) != names.end(), "config", "{}: there is no option '{}'.{}", path,
                  item.name, did_you_mean(item.name, names));
    SHARD_REQUIRE(seen.insert(item.name).second, "config", "{}: '{}' is there twice", path, item.name);
    CLI::Option& option = *command.get_option("--" + item.name);
    if (option.count() == 0) give(option, item);
  }
}

std::string resolved_config(const CLI::App& command, bool descriptions) {
  return command.config_to_str(/*default_also=*/true, descriptions);
}

}  // namespace harness
