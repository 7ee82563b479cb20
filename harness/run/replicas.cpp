#include "harness/run/replicas.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <map>
#include <optional>
#include <utility>

#include "harness/case/problem.h"
#include "harness/compare/pieces.h"

namespace harness {
namespace {

using shardproof::Piece;
using Pieces = std::vector<const std::vector<Piece>*>;  // of each rank

uint32_t bits_of(const HeldPiece& held, int64_t element) {
  return std::bit_cast<uint32_t>(held.piece->data.const_data_ptr<float>()[element - held.piece->run.begin]);
}

std::map<std::string, std::vector<HeldPiece>> by_tensor(const Pieces& pieces) {
  std::map<std::string, std::vector<HeldPiece>> all;
  for (size_t rank = 0; rank < pieces.size(); ++rank)
    for (const Piece& piece : *pieces[rank]) all[piece.name].push_back({rank, &piece});
  return all;
}

// The first element of which two pieces have other bits.
std::optional<int64_t> first_difference(const HeldPiece& a, const HeldPiece& b) {
  const int64_t begin = std::max(a.piece->run.begin, b.piece->run.begin);
  const int64_t end = std::min(a.piece->run.end, b.piece->run.end);
  for (int64_t i = begin; i < end; ++i)
    if (bits_of(a, i) != bits_of(b, i)) return i;
  return {};
}

std::vector<std::vector<int64_t>> groups_at(const std::vector<HeldPiece>& pieces, int64_t element) {
  std::map<uint32_t, std::vector<int64_t>> by_bits;
  for (const HeldPiece& held : pieces)
    if (held.piece->run.begin <= element && element < held.piece->run.end)
      by_bits[bits_of(held, element)].push_back(static_cast<int64_t>(held.rank));
  std::vector<std::vector<int64_t>> groups;
  for (auto& [bits, ranks] : by_bits) groups.push_back(std::move(ranks));
  std::ranges::sort(groups);
  return groups;
}

bool find_in(const std::string& kind, const Pieces& pieces, Replicas& replicas) {
  for (const auto& [name, held] : by_tensor(pieces))
    for (size_t other = 1; other < held.size(); ++other)
      for (size_t one = 0; one < other; ++one)
        if (const auto element = first_difference(held[one], held[other])) {
          replicas.tensor = kind.empty() ? name : fmt::format("{} of {}", kind, name);
          replicas.groups = groups_at(held, *element);
          return true;
        }
  return false;
}

bool find_in(const std::vector<RankStep>& ranks, Replicas& replicas) {
  Pieces parameters;
  for (const RankStep& rank : ranks) parameters.push_back(&rank.parameters);
  if (find_in("", parameters, replicas)) return true;
  for (size_t slot = 0; slot < ranks.front().state.size(); ++slot) {
    Pieces state;
    for (const RankStep& rank : ranks)
      if (slot < rank.state.size()) state.push_back(&rank.state[slot].second);
    if (state.size() == ranks.size() && find_in(ranks.front().state[slot].first, state, replicas)) return true;
  }
  return false;
}

bool has_complaint(const std::vector<RankStep>& ranks) {
  return std::ranges::any_of(ranks, [](const RankStep& rank) {
    return std::ranges::any_of(rank.complaints, [](const PropertyComplaint& c) { return c.property == "fingerprint"; });
  });
}

}  // namespace

Replicas first_disagreement(const std::vector<std::vector<RankStep>>& steps) {
  Replicas replicas;
  for (size_t step = 0; step < steps.size(); ++step) {
    if (replicas.found < 0 && has_complaint(steps[step])) replicas.found = static_cast<int64_t>(step);
    if (replicas.step < 0 && find_in(steps[step], replicas)) replicas.step = static_cast<int64_t>(step);
  }
  return replicas;
}

Replicas replicas_of(const Case& c, Ranks& ranks) {
  Case checked = c;
  if (ranks.is_library()) try_change(checked, [&] { checked.options.fingerprint = 1; });
  golden::Run run = make_run(checked);
  run.device = ranks.device();
  try {
    return first_disagreement(ranks.train(checked, run));
  } catch (const std::exception&) {
    return {};  // that error is what went wrong, and it has been told
  }
}

std::string in_words(const Replicas& replicas, bool has_check) {
  if (replicas.step < 0) return "";
  std::vector<std::string> groups;
  for (const std::vector<int64_t>& ranks : replicas.groups)
    groups.push_back(fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", ")));
  std::string text =
      fmt::format("after step {} {} hold different bits of {}", replicas.step + 1, fmt::join(groups, " and "), replicas.tensor);
  if (!has_check) return text;
  return text + (replicas.found < 0 ? "; --check=fingerprint does not find it"
                                    : fmt::format("; --check=fingerprint finds it in step {}", replicas.found + 1));
}

}  // namespace harness
