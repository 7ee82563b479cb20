#include "harness/run/trace_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <limits>

#include "shardproof/base/check.h"

namespace harness {
namespace {

using nlohmann::json;
using shardproof::Span;
using Kind = Span::Kind;

const char* to_string(Kind kind) {
  switch (kind) {
    case Kind::computation: return "computation";
    case Kind::wait: return "wait";
    case Kind::collective: return "collective";
  }
  return "?";
}

// The threads of one sort that a rank needs, so that on each of them spans nest, or do not even that.
class Lanes {
 public:
  explicit Lanes(bool nesting) : nesting_(nesting) {}

  // The number of the first lane on which the span fits. Spans come in the order in which they begin.
  size_t lane_of(const Span& span) {
    for (size_t lane = 0; lane < ends_.size(); ++lane)
      if (fits(ends_[lane], span)) return lane;
    ends_.push_back({span.end_ns});
    return ends_.size() - 1;
  }
  size_t count() const { return ends_.size(); }

 private:
  bool fits(std::vector<int64_t>& open, const Span& span) const {
    while (!open.empty() && open.back() <= span.begin_ns) open.pop_back();
    if (!open.empty() && !(nesting_ && span.end_ns <= open.back())) return false;
    open.push_back(span.end_ns);
    return true;
  }

  bool nesting_;
  std::vector<std::vector<int64_t>> ends_;  // of each lane: the ends of what is open, the innermost at the back
};

json event_of(const Span& span, int64_t rank, int64_t thread, int64_t origin_ns) {
  const bool waits = span.kind == Kind::wait;
  const std::string name = (waits ? "wait for " : "") + span.name + (span.unit.empty() ? "" : " " + span.unit);
  json arguments = {{"what", span.name}, {"unit", span.unit}};
  if (span.kind != Kind::computation) arguments.update({{"group", span.group}, {"bytes", span.bytes}});
  return {{"ph", "X"},
          {"pid", rank},
          {"tid", thread},
          {"ts", static_cast<double>(span.begin_ns - origin_ns) / 1000},
          {"dur", static_cast<double>(span.end_ns - span.begin_ns) / 1000},
          {"name", name},
          {"cat", to_string(span.kind)},
          {"args", arguments}};
}

json label(const char* what, int64_t rank, int64_t thread, const json& arguments) {
  return {{"ph", "M"}, {"name", what}, {"pid", rank}, {"tid", thread}, {"args", arguments}};
}

void add_rank(json& events, int64_t rank, std::vector<Span> spans, int64_t origin_ns) {
  // Of two that begin at once the longer one is outside.
  std::stable_sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return a.begin_ns != b.begin_ns ? a.begin_ns < b.begin_ns : a.end_ns > b.end_ns;
  });
  std::map<std::string, Lanes> lanes;  // by group; "": of computations and waits
  std::vector<std::pair<std::string, size_t>> placed;
  for (const Span& span : spans) {
    const std::string sort = span.kind == Kind::collective ? span.group : "";
    placed.emplace_back(sort, lanes.try_emplace(sort, Lanes(sort.empty())).first->second.lane_of(span));
  }
  events.push_back(label("process_name", rank, 0, {{"name", fmt::format("rank {}", rank)}}));
  events.push_back(label("process_sort_index", rank, 0, {{"sort_index", rank}}));
  std::map<std::string, int64_t> first;  // thread of each sort; the map has "" first
  int64_t next = 0;
  for (const auto& [sort, of_sort] : lanes) {
    first[sort] = next;
    for (size_t lane = 0; lane < of_sort.count(); ++lane, ++next) {
      const std::string name = sort.empty() ? "computation" : "collectives along " + sort;
      events.push_back(label("thread_name", rank, next, {{"name", lane == 0 ? name : fmt::format("{} ({})", name, lane + 1)}}));
      events.push_back(label("thread_sort_index", rank, next, {{"sort_index", next}}));
    }
  }
  for (size_t i = 0; i < spans.size(); ++i)
    events.push_back(event_of(spans[i], rank, first[placed[i].first] + static_cast<int64_t>(placed[i].second), origin_ns));
}

}  // namespace

void write_spans(const SpansOfRanks& ranks, const std::string& first, const std::string& prefix) {
  for (const auto& [rank, spans] : ranks) {
    const auto begin = std::find_if(spans.begin(), spans.end(), [&](const Span& span) { return span.name == first; });
    json lines = json::array();
    for (auto span = begin; span != spans.end(); ++span)
      lines.push_back({static_cast<int>(span->kind), span->name, span->unit, span->group, span->bytes, span->begin_ns,
                       span->end_ns});
    std::ofstream file(fmt::format("{}.{}", prefix, rank));
    file << lines << std::flush;
    SHARD_REQUIRE(file.good(), "trace", "cannot write {}.{}", prefix, rank);
  }
}

SpansOfRanks read_spans(const std::string& prefix, int64_t ranks) {
  SpansOfRanks all;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    std::ifstream file(fmt::format("{}.{}", prefix, rank));
    SHARD_REQUIRE(file.good(), "trace", "rank {} left no spans in {}.{}", rank, prefix, rank);
    for (const json& line : json::parse(file))
      all[rank].push_back({static_cast<Kind>(line.at(0).get<int>()), line.at(1), line.at(2), line.at(3), line.at(4), line.at(5),
                           line.at(6)});
  }
  return all;
}

json chrome_trace(const SpansOfRanks& ranks) {
  int64_t origin_ns = std::numeric_limits<int64_t>::max();
  for (const auto& [rank, spans] : ranks)
    for (const Span& span : spans) origin_ns = std::min(origin_ns, span.begin_ns);
  json events = json::array();
  for (const auto& [rank, spans] : ranks) add_rank(events, rank, spans, origin_ns);
  return {{"displayTimeUnit", "ms"}, {"traceEvents", events}};
}

}  // namespace harness
