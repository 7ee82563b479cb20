#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "harness/commands.h"
#include "harness/json_lines.h"
#include "harness/run_case.h"

namespace harness {
namespace {

struct Arguments {
  std::string text, json;
};

}  // namespace

void add_replay_command(CLI::App& app, int& exit_code) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand("replay", "run one case; the verdict is the same every time");
  command->add_option("case", arguments->text, "the case, as verify printed it")->required();
  command->add_option("--json", arguments->json, "also write one JSON object here");
  command->callback([arguments, &exit_code] {
    const Case c = Case::parse(arguments->text);
    JsonLines json(arguments->json);
    at::set_num_threads(1);
    const Verdict verdict = run_case(c);
    fmt::print("{}\n", c.str());
    if (verdict.held) fmt::print("HELD: {} values compared\n", verdict.values_compared);
    else fmt::print("FAILED: {}\n", verdict.what);
    json.write({{"type", "replay"}, {"case", c.str()}, {"held", verdict.held}, {"what", verdict.what},
                {"values_compared", verdict.values_compared}});
    exit_code = verdict.held ? 0 : 1;
  });
}

}  // namespace harness
