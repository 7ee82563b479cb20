#include "harness/run/picture.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "harness/case/problem.h"
#include "harness/run/sharded_options.h"
#include "harness/run/sharded_run.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/threads/threads.h"

namespace harness {
namespace {

using nlohmann::json;
using shardproof::TraceRecord;

constexpr size_t kTensorsMax = 24, kRunsMax = 256, kCallsMax = 400;

// What ranks tell while they train.
class Watched {
 public:
  Watched() : trace_(std::make_shared<shardproof::Trace>()) {}

  const std::shared_ptr<shardproof::Trace>& trace() const { return trace_; }

  void tell(int64_t rank, size_t step, bool ended, const shardproof::Sharded& sharded) {
    const auto calls = trace_->of_rank(rank).size();
    const std::lock_guard lock(mutex_);
    auto& [first, last] = calls_[step][rank];
    (ended ? last : first) = calls;
    if (!ended) last = SIZE_MAX;
    if (!ended && rank == 0) placements_[step] = sharded.placements();
  }

  Picture picture(const Case& c, int64_t step) const {
    if (calls_.empty()) return {};
    const size_t last = calls_.rbegin()->first, shown = step < 0 ? last : std::min(static_cast<size_t>(step), last);
    const auto placements = placements_.find(shown);
    Picture picture{.step = static_cast<int64_t>(shown), .mesh = c.at(shown).mesh, .placements = {}, .calls = {}};
    if (placements != placements_.end()) picture.placements = placements->second;
    std::vector<std::vector<TraceRecord>> calls(static_cast<size_t>(picture.mesh.size()));
    for (const auto& [rank, range] : calls_.at(shown)) {
      const std::vector<TraceRecord> all = trace_->of_rank(rank);
      calls.at(static_cast<size_t>(rank))
          .assign(all.begin() + static_cast<int64_t>(range.first),
                  all.begin() + static_cast<int64_t>(std::min(range.second, all.size())));
    }
    picture.calls = in_columns(calls);
    return picture;
  }

 private:
  std::shared_ptr<shardproof::Trace> trace_;
  std::mutex mutex_;
  std::map<size_t, std::map<int64_t, std::pair<size_t, size_t>>> calls_;  // [step][rank]: first, and behind the last
  std::map<size_t, std::map<std::string, shardproof::ParameterPlacement>> placements_;
};

bool of_two_ranks(const TraceRecord& record) {
  return record.op == "send" || record.op == "recv";
}

// The next calls of ranks, each of them with its group and its number in that group.
class Columns {
 public:
  explicit Columns(const std::vector<std::vector<TraceRecord>>& calls)
      : calls_(calls), next_(calls.size()), placed_(calls.size()) {
    for (size_t rank = 0; rank < calls.size(); ++rank) {
      std::map<std::string, int64_t> in_group;
      for (const TraceRecord& record : calls[rank]) {
        const Key key{record.group, in_group[record.group]++};
        keys_[rank].push_back(key);
        members_[key].push_back(rank);
      }
    }
  }

  std::vector<std::vector<PicturedCall>> placed() {
    for (std::vector<size_t> together; !(together = ready()).empty();) place(together);
    return std::move(placed_);
  }

 private:
  using Key = std::pair<std::string, int64_t>;

  bool has_next(size_t rank) const { return next_[rank] < calls_[rank].size(); }
  const Key& key(size_t rank) const { return keys_.at(rank)[next_[rank]]; }

  // Ranks whose next calls belong together. Where ranks disagree about the order no call has all of its ranks; then the first
  // rank's call stands alone.
  std::vector<size_t> ready() {
    std::vector<size_t> alone;
    for (size_t rank = 0; rank < calls_.size(); ++rank) {
      if (!has_next(rank)) continue;
      const std::vector<size_t>& members = members_.at(key(rank));
      if (std::ranges::all_of(members, [&](size_t other) { return has_next(other) && key(other) == key(rank); }))
        return members;
      if (alone.empty()) alone = {rank};
    }
    for (const size_t rank : alone) {
      std::erase(members_.at(key(rank)), rank);
      apart_.insert(key(rank));
    }
    return alone;
  }

  void place(const std::vector<size_t>& ranks) {
    int64_t column = 0;
    for (const size_t rank : ranks)
      if (!placed_[rank].empty()) column = std::max(column, placed_[rank].back().column + 1);
    const TraceRecord& first = calls_[ranks.front()][next_[ranks.front()]];
    const bool differs = apart_.contains(key(ranks.front())) || std::ranges::any_of(ranks, [&](size_t rank) {
                           const TraceRecord& record = calls_[rank][next_[rank]];
                           return record.op != first.op && !(of_two_ranks(record) && of_two_ranks(first));
                         });
    for (const size_t rank : ranks) placed_[rank].push_back({column, calls_[rank][next_[rank]++], differs});
  }

  const std::vector<std::vector<TraceRecord>>& calls_;
  std::vector<size_t> next_;
  std::vector<std::vector<PicturedCall>> placed_;
  std::map<size_t, std::vector<Key>> keys_;
  std::map<Key, std::vector<size_t>> members_;
  std::set<Key> apart_;
};

// The runs of each rank; null when they are too many to be drawn.
json runs_of(const shardproof::Shape& shape, const shardproof::Placement& at) {
  json ranks = json::array();
  for (int64_t rank = 0; rank < at.mesh.size(); ++rank) {
    json runs = json::array();
    for (const shardproof::OwnedRun& run : owned_runs(shape, at.mesh, at.layout, rank))
      runs.push_back({run.whole.begin, run.whole.end});
    if (runs.size() > kRunsMax) return nullptr;
    ranks.push_back(std::move(runs));
  }
  return {{"layout", at.layout.str()}, {"ranks", std::move(ranks)}};
}

json tensors_of(const Picture& picture) {
  json tensors = json::array();
  for (const auto& [name, placement] : picture.placements) {
    if (tensors.size() == kTensorsMax) break;
    json parameter = runs_of(placement.shape, placement.parameter), state = runs_of(placement.shape, placement.state);
    if (parameter.is_null() || state.is_null()) continue;
    tensors.push_back({{"name", name},
                       {"shape", placement.shape},
                       {"parameter", std::move(parameter)},
                       {"state", std::move(state)}});
  }
  return tensors;
}

}  // namespace

std::vector<std::vector<PicturedCall>> in_columns(const std::vector<std::vector<TraceRecord>>& calls) {
  return Columns(calls).placed();
}

Picture picture_of(const Case& c, int64_t step) {
  const golden::Run run = make_run(c);
  Watched watched;
  const RunWorld run_world = [&](const Case& now, const RankBody& body) {
    const auto traced_body = [&](std::shared_ptr<shardproof::Comm> comm) {
      body(shardproof::traced(std::move(comm), watched.trace()));
    };
    run_threads(now.mesh.size(), traced_body, threads_options(now));
  };
  const StepWatch watch = [&](int64_t rank, size_t at, bool ended, const shardproof::Sharded& sharded) {
    watched.tell(rank, at, ended, sharded);
  };
  try {
    run_sharded({.c = c, .run = run, .run_world = run_world, .watch = watch});
  } catch (const std::exception&) {
    // This is the failure, and it has been told already.
  }
  return watched.picture(c, step);
}

json to_json(const Picture& picture) {
  json axes = json::array(), ranks = json::array();
  for (const shardproof::Axis& axis : picture.mesh.axes()) axes.push_back({axis.name, axis.size});
  size_t left_out = 0;
  for (const std::vector<PicturedCall>& calls : picture.calls) {
    json own = json::array();
    for (const PicturedCall& call : calls)
      if (static_cast<size_t>(call.column) < kCallsMax)
        own.push_back({{"column", call.column},
                       {"op", call.record.op},
                       {"group", call.record.group},
                       {"call", call.record.call},
                       {"bytes", call.record.bytes},
                       {"differs", call.differs}});
    left_out += calls.size() - own.size();
    ranks.push_back(std::move(own));
  }
  json tensors = tensors_of(picture);
  const size_t tensors_left_out = picture.placements.size() - tensors.size();
  return {{"step", picture.step},          {"axes", std::move(axes)},
          {"tensors", std::move(tensors)}, {"tensors_left_out", tensors_left_out},
          {"calls", std::move(ranks)},     {"calls_left_out", left_out}};
}

}  // namespace harness
