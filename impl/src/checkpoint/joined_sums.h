// Checksums of entries that several ranks read in parts: each rank sums what it reads, and the sums are joined.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "shardproof/checkpoint/box_read.h"

namespace shardproof::checkpoint {

// Of an entry that a rank wants and has not read.
inline constexpr uint64_t kUnread = UINT64_MAX;

// What a rank tells the others; "" when there is nothing to tell. An entry whose payload_bytes are kUnread is not read yet.
std::string text_of(const std::vector<PartlyRead>& parts);

// From what all ranks told, the same on every rank: the entries whose sums do not make up their checksums, by file and offset.
// The sums of all others are compared by `reader`. Throws Error when one is wrong.
using EntryPlace = std::pair<std::string, uint64_t>;
std::set<EntryPlace> compare_joined(const std::vector<std::string>& told, BoxReader& reader);

}  // namespace shardproof::checkpoint
