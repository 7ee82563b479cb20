#include "harness/commands/choices.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "shardproof/base/check.h"

namespace harness {
namespace {

const std::vector<std::string> kAxes = {"dp_replicate", "dp_shard", "cp", "tp"};

size_t edits(const std::string& from, const std::string& to) {
  std::vector<std::vector<size_t>> least(from.size() + 1, std::vector<size_t>(to.size() + 1));
  for (size_t i = 0; i <= from.size(); ++i)
    for (size_t j = 0; j <= to.size(); ++j) {
      if (i == 0 || j == 0) {
        least[i][j] = i + j;
        continue;
      }
      least[i][j] = std::min({least[i - 1][j] + 1, least[i][j - 1] + 1, least[i - 1][j - 1] + (from[i - 1] != to[j - 1])});
      if (i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1])
        least[i][j] = std::min(least[i][j], least[i - 2][j - 2] + 1);
    }
  return least[from.size()][to.size()];
}

}  // namespace

std::string nearest(const std::string& word, const std::vector<std::string>& words) {
  std::string found;
  size_t fewest = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string& candidate : words)
    if (const size_t count = edits(word, candidate); count < fewest) {
      fewest = count;
      found = candidate;
    }
  return found;
}

std::string did_you_mean(const std::string& word, const std::vector<std::string>& words) {
  const std::string found = nearest(word, words);
  return found.empty() ? "" : fmt::format(" Did you mean '{}'?", found);
}

shardproof::Mesh chosen_mesh(const std::string& text) {
  shardproof::Mesh mesh = shardproof::Mesh::parse(text);
  for (const shardproof::Axis& axis : mesh.axes())
    SHARD_REQUIRE(std::ranges::find(kAxes, axis.name) != kAxes.end(), "mesh", "--mesh has the axis '{}'; there are {}.{}",
                  axis.name, fmt::join(kAxes, ", "), did_you_mean(axis.name, kAxes));
  return mesh;
}

const shardproof::Strategy& chosen_strategy(const std::string& name) {
  try {
    return shardproof::strategy(name);
  } catch (const shardproof::Error& error) {
    std::vector<std::string> names;
    for (const shardproof::Strategy& row : shardproof::strategies()) names.push_back(row.name);
    throw shardproof::Error(fmt::format("{}.{}", error.what(), did_you_mean(name, names)));
  }
}

}  // namespace harness
