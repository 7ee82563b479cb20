#include "harness/commands/flight.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "shardproof/base/check.h"

namespace harness {
namespace {

using nlohmann::json;

std::string text_of(const json& object, const char* key) {
  return shardproof::escaped(object.at(key).get<std::string>());
}

FlightLine line_of(const json& line) {
  FlightLine call{.group = text_of(line, "group"),
                  .name = text_of(line, "name"),
                  .call = text_of(line, "op"),
                  .label = text_of(line, "for"),
                  .state = text_of(line, "state"),
                  .ranks = line.at("ranks"),
                  .sequence = line.at("sequence")};
  const std::string reduce = text_of(line, "reduce"), dtype = text_of(line, "dtype");
  if (call.call == "all_to_all")  // how much each rank moves is its own affair
    call.call += fmt::format("({})", dtype);
  else if (!dtype.empty())
    call.call += fmt::format("({}{}{} x {})", reduce, reduce.empty() ? "" : ", ", dtype, line.at("numel").get<int64_t>());
  if (line.at("op") == "broadcast") call.call += fmt::format(" from {}", line.at("peer").get<int64_t>());
  return call;
}

Flight read_flight(const std::filesystem::path& path) {
  std::ifstream file(path);
  Flight flight;
  std::string text;
  try {
    SHARD_REQUIRE(static_cast<bool>(std::getline(file, text)), "flight", "the record {} is empty", path.string());
    const json head = json::parse(text);
    flight.rank = head.at("rank");
    flight.world = head.at("world");
    flight.why = shardproof::escaped_lines(head.at("why").get<std::string>());
    while (std::getline(file, text)) flight.calls.push_back(line_of(json::parse(text)));
  } catch (const json::exception& error) {
    throw shardproof::Error(shardproof::message("[flight] {} is no flight record: {}", path.string(), error.what()));
  }
  return flight;
}

bool is_collective(const FlightLine& call) {
  return !call.call.starts_with("send") && !call.call.starts_with("recv");
}

// One group's calls: [sequence][rank].
struct GroupCalls {
  std::string name;
  std::vector<int64_t> ranks;
  std::map<int64_t, std::map<int64_t, const FlightLine*>> calls;
};

std::map<std::string, GroupCalls> by_group(const std::map<int64_t, Flight>& flights) {
  std::map<std::string, GroupCalls> groups;
  for (const auto& [rank, flight] : flights)
    for (const FlightLine& call : flight.calls) {
      if (!is_collective(call)) continue;
      GroupCalls& group = groups[call.group];
      group.name = call.name;
      group.ranks = call.ranks;
      group.calls[call.sequence][rank] = &call;
    }
  return groups;
}

std::string label_of(const FlightLine& call) {
  return call.label.empty() ? "" : ", for " + call.label;
}

// What the ranks did at one place; "" when they did the same.
std::string disagreement_at(const GroupCalls& group, int64_t sequence, const std::map<int64_t, const FlightLine*>& made,
                            const std::map<int64_t, Flight>& flights) {
  const FlightLine& first = *made.begin()->second;
  const std::string where =
      fmt::format("call {} of '{}' (ranks {}){}", sequence, group.name, fmt::join(group.ranks, ","), label_of(first));
  for (const auto& [rank, call] : made)
    if (call->call != first.call)
      return fmt::format("{}: rank {} called {}, rank {} called {}", where, made.begin()->first, first.call, rank, call->call);
  std::vector<std::string> absent;
  for (const int64_t rank : group.ranks) {
    if (made.count(rank)) continue;
    if (!flights.count(rank)) {
      absent.push_back(fmt::format("rank {} left no record", rank));
      continue;
    }
    // Older calls than the record holds are no disagreement.
    const bool forgotten = std::any_of(group.calls.begin(), group.calls.end(), [&](const auto& later) {
      return later.first > sequence && later.second.count(rank) > 0;
    });
    if (forgotten) continue;
    const Flight& flight = flights.at(rank);
    absent.push_back(fmt::format("rank {} never called it; its last call was {}", rank,
                                 flight.calls.empty() ? "none"
                                                      : fmt::format("{}, call {} of '{}'", flight.calls.back().call,
                                                                    flight.calls.back().sequence, flight.calls.back().name)));
  }
  const bool open = std::any_of(made.begin(), made.end(), [](const auto& each) { return each.second->state != "done"; });
  if (absent.empty() || !open) return "";
  std::vector<int64_t> callers;
  for (const auto& [rank, call] : made) callers.push_back(rank);
  return fmt::format("{}: {} called by {}; {}", where, first.call, fmt::join(callers, ","), fmt::join(absent, "; "));
}

}  // namespace

std::map<int64_t, Flight> read_flights(const std::string& directory) {
  std::map<int64_t, Flight> flights;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("rank_") || !name.ends_with(".jsonl")) continue;
    Flight flight = read_flight(entry.path());
    flights.emplace(flight.rank, std::move(flight));
  }
  SHARD_REQUIRE(!flights.empty(), "flight", "no flight records rank_N.jsonl in {}; give the folder of --flight-dir", directory);
  return flights;
}

std::string first_disagreement(const std::map<int64_t, Flight>& flights) {
  // The group whose calls part earliest in a rank's own order: what comes later follows from it.
  std::string found;
  for (const auto& [id, group] : by_group(flights))
    for (const auto& [sequence, made] : group.calls) {
      const std::string here = disagreement_at(group, sequence, made, flights);
      if (here.empty()) continue;
      const bool parts = here.find(" called ") != std::string::npos && here.find("called by") == std::string::npos;
      if (found.empty() || parts) found = here;
      if (parts) return found;
      break;
    }
  return found;
}

std::string describe(const std::map<int64_t, Flight>& flights) {
  std::string text;
  const int64_t world = flights.begin()->second.world;
  for (int64_t rank = 0; rank < world; ++rank) {
    const auto found = flights.find(rank);
    text += found == flights.end()
                ? fmt::format("rank {}: no record\n", rank)
                : fmt::format("rank {}: {} calls recorded; {}\n", rank, found->second.calls.size(), found->second.why);
  }
  const std::string difference = first_disagreement(flights);
  return text + (difference.empty() ? "The records agree in every call.\n" : "FIRST DISAGREEMENT: " + difference + "\n");
}

}  // namespace harness
