// Errors that leave the ranks say which rank they are of.
#pragma once

#include <fmt/format.h>

#include <cctype>
#include <cstdint>
#include <string>
#include <string_view>

namespace shardproof {

// What stands before the message of an error of this rank: "rank 1 of 4: ". Nothing, if the message begins with its rank
// itself, as in "[gradient] rank 1, step 3: ...".
inline std::string said_rank(std::string_view message, int64_t rank, int64_t world) {
  if (const size_t end = message.find("] "); message.starts_with('[') && end != message.npos) message.remove_prefix(end + 2);
  const std::string own = fmt::format("rank {}", rank);
  const bool says_it = message.starts_with(own) &&
                       (message.size() == own.size() || !std::isdigit(static_cast<unsigned char>(message[own.size()])));
  return says_it ? "" : fmt::format("rank {} of {}: ", rank, world);
}

}  // namespace shardproof
