// Words out of which a user chooses on the command line. A word that is none of them is an error that names the nearest.
#pragma once

#include <string>
#include <vector>

#include "shardproof/algebra/mesh.h"
#include "shardproof/algebra/strategy.h"

namespace harness {

// The word that was probably meant: the one that the fewest edits lead to, if those are few for its length. An edit inserts,
// deletes or replaces a letter, or swaps two neighbours. Empty if no word is near.
std::string nearest(const std::string& word, const std::vector<std::string>& words);

// " Did you mean 'zero1'?", or nothing.
std::string did_you_mean(const std::string& word, const std::vector<std::string>& words);

// The mesh of --mesh. Its axes are dp_replicate, dp_shard, cp and tp, the only ones that the harness knows.
shardproof::Mesh chosen_mesh(const std::string& text);

// The strategy of --strategy.
const shardproof::Strategy& chosen_strategy(const std::string& name);

}  // namespace harness
