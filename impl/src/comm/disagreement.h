// What a backend says where ranks make different calls, or the same call for different things.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <utility>

namespace shardproof {

// One rank's side: its number in the world, its call in words, and what the call is for (CallLabel::purpose).
struct SaidCall {
  int64_t rank = 0;
  std::string call, purpose;
};

inline std::string disagreement(int64_t sequence, const std::string& group, SaidCall a, SaidCall b,
                                const std::string& sizes = "") {
  if (a.rank > b.rank) std::swap(a, b);
  const bool alike = a.purpose == b.purpose;
  const auto said = [&](const SaidCall& side) {
    return fmt::format("rank {} calls {}{}", side.rank, side.call,
                       alike || side.purpose.empty() ? "" : fmt::format(" for \"{}\"", side.purpose));
  };
  return fmt::format("ranks disagree on call {} of '{}'{}: {}, {}{}; all ranks of a group must make the same calls in the "
                     "same order",
                     sequence, group, alike && !a.purpose.empty() ? ", for " + a.purpose : "", said(a), said(b), sizes);
}

}  // namespace shardproof
