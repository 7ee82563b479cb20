// Suggestions for names that are misspelt.
#pragma once

#include <string>
#include <vector>

namespace shardproof {

// The word that was probably meant: the one that the fewest edits lead to, if those are few for its length. An edit inserts,
// deletes or replaces a letter, or swaps two neighbours. Empty if no word is near.
std::string nearest(const std::string& word, const std::vector<std::string>& words);

// " Did you mean 'zero1'?", or nothing.
std::string did_you_mean(const std::string& word, const std::vector<std::string>& words);

}  // namespace shardproof
