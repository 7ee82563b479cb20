#include <algorithm>
#include <map>
#include <set>

#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/checksums.h"
#include "internal/checkpoint/format/crc32.h"

namespace shardproof::checkpoint {

std::optional<uint32_t> joined_crc(uint64_t bytes, std::vector<SummedRun> runs, const std::string& name) {
  std::sort(runs.begin(), runs.end(), [](const SummedRun& a, const SummedRun& b) { return a.begin < b.begin; });
  std::map<uint64_t, uint32_t> sums{{0, 0}};  // of all bytes before a place that a row of runs reaches
  for (const SummedRun& run : runs) {
    const auto before = sums.find(run.begin);
    if (before == sums.end() || run.end() > bytes) return std::nullopt;
    const uint32_t crc = crc32_join(before->second, run.crc, run.bytes);
    const auto [after, is_first] = sums.emplace(run.end(), crc);
    SHARD_REQUIRE(is_first || after->second == crc, "checkpoint",
                  "{}: bytes {} to {} were read twice and were not the same. Is the disk damaged, or did somebody write?", name,
                  run.begin, run.end());
  }
  std::sort(runs.begin(), runs.end(), [](const SummedRun& a, const SummedRun& b) { return a.end() > b.end(); });
  std::set<uint64_t> leading{bytes};  // places from which a row of runs reaches the end
  for (const SummedRun& run : runs) {
    if (!leading.contains(run.end())) return std::nullopt;
    leading.insert(run.begin);
  }
  const auto whole = sums.find(bytes);
  return whole == sums.end() ? std::nullopt : std::optional(whole->second);
}

}  // namespace shardproof::checkpoint
