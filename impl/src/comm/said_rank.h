// Errors that leave the ranks say which rank they are of.
#pragma once

#include <fmt/format.h>

#include <cctype>
#include <cstdint>
#include <string>
#include <string_view>

namespace shardproof {

// What stands before the message of an error of this rank: "rank 1 of 4: ". Nothing, if the message begins with its rank
// itself, as in "[gradient] rank 1, step 3: ...". A "rank 1 of 'tp'" counts within a group, and is no rank of the world.
inline std::string said_rank(std::string_view message, int64_t rank, int64_t world) {
  if (const size_t end = message.find("] "); message.starts_with('[') && end != message.npos) message.remove_prefix(end + 2);
  const std::string own = fmt::format("rank {}", rank), prefix = fmt::format("{} of {}: ", own, world);
  if (message.starts_with(prefix)) return "";
  if (!message.starts_with(own)) return prefix;
  message.remove_prefix(own.size());
  const bool is_longer = !message.empty() && std::isdigit(static_cast<unsigned char>(message[0])) != 0;
  return is_longer || message.starts_with(" of ") ? prefix : "";
}

}  // namespace shardproof
