// Words out of which a user chooses on the command line. A word that is none of them is an error that names the nearest.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "harness/plan/machine.h"
#include "shardproof/algebra/mesh.h"
#include "shardproof/algebra/strategy.h"
#include "shardproof/base/nearest.h"

namespace CLI {
class App;
}

namespace harness {

using shardproof::did_you_mean;
using shardproof::nearest;

// The mesh of --mesh. Its axes are dp_replicate, dp_shard, cp and tp, the only ones that the harness knows.
shardproof::Mesh chosen_mesh(const std::string& text);

// The machine of --machine: one that the program knows, or a file.
Machine chosen_machine(const std::string& text);

// What --help says of --strategy: the strategies by name, those that a program registered among them.
std::string strategy_help();

// The strategy of --strategy.
const shardproof::Strategy& chosen_strategy(const std::string& name);

// --context-attention: how queries see the keys of other ranks along cp, a number of shardproof::ContextAttention.
void add_context_attention(CLI::App& app, int64_t& attention);

// --set name=value, options of fully_shard (shardproof/sharding/named_options.h). What is wrong with one is said at once.
void add_sharding_options(CLI::App& app, std::vector<std::string>& texts);
// What they are, as docs/options.md lists them.
std::string table_of_sharding_options();

}  // namespace harness
