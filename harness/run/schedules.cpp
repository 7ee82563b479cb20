#include "harness/run/schedules.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstring>
#include <set>

#include "harness/case/problem.h"
#include "harness/case/random.h"
#include "harness/run/message.h"
#include "harness/run/policies.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

using shardproof::Piece;

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() != b.numel() || a.scalar_type() != b.scalar_type()) return false;
  const at::Tensor one = a.contiguous(), other = b.contiguous();
  return one.numel() == 0 || std::memcmp(one.const_data_ptr(), other.const_data_ptr(), one.nbytes()) == 0;
}

bool same_bits(double a, double b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

std::optional<std::string> first_change(const std::vector<Piece>& before, const std::vector<Piece>& after, const char* what) {
  if (before.size() != after.size()) return fmt::format("{} pieces of {}s, and {}", before.size(), what, after.size());
  for (size_t p = 0; p < before.size(); ++p)
    if (before[p].name != after[p].name || !same_bits(before[p].data, after[p].data))
      return fmt::format("{} of {}", what, after[p].name);
  return std::nullopt;
}

std::optional<std::string> first_change(const RankStep& before, const RankStep& after) {
  if (!after.complaints.empty()) return fmt::format("{}: {}", after.complaints[0].property, after.complaints[0].what);
  if (before.losses.size() != after.losses.size()) return "number of losses";
  for (size_t round = 0; round < before.losses.size(); ++round)
    if (!same_bits(before.losses[round], after.losses[round]))
      return fmt::format("loss of round {}: {} and {}", round, before.losses[round], after.losses[round]);
  if (!same_bits(before.gradient_norm, after.gradient_norm))
    return fmt::format("gradient norm: {} and {}", before.gradient_norm, after.gradient_norm);
  if (auto change = first_change(before.gradients, after.gradients, "gradient")) return change;
  if (auto change = first_change(before.parameters, after.parameters, "parameter")) return change;
  if (auto change = first_change(before.compute_parameters, after.compute_parameters, "low-precision parameter")) return change;
  for (size_t s = 0; s < before.state.size(); ++s)
    if (auto change = first_change(before.state[s].second, after.state[s].second, before.state[s].first.c_str())) return change;
  if (before.skipped != after.skipped || !same_bits(before.loss_scale, after.loss_scale)) return "loss scale";
  return std::nullopt;
}

// What a case does under one schedule after another. Where a race makes the run without a schedule fail, so does the first
// schedule, since there is nothing to compare it with.
class Program {
 public:
  explicit Program(Case c) : case_(std::move(c)), run_(make_run(case_)) {
    case_.interleaving.reset();
    try {
      before_ = run_sharded({case_, run_});
    } catch (const std::exception& error) {
      failed_before_ = fmt::format("error without a schedule: {}", message_of(error));
    }
  }
  std::optional<std::string> operator()(const std::shared_ptr<shardproof::SchedulePolicy>& policy) const {
    if (failed_before_) return failed_before_;
    try {
      return first_change(before_, run_sharded({case_, run_, on_threads(policy)}));
    } catch (const std::exception& error) {
      return fmt::format("error: {}", message_of(error));
    }
  }

 private:
  Case case_;
  golden::Run run_;
  Steps before_;
  std::optional<std::string> failed_before_;
};

// Puts a run into the count. Returns whether it failed.
bool add(Schedules& found, std::set<uint64_t>& digests, const RecordedPolicy& policy, const Interleaving& schedule,
         const std::optional<std::string>& what) {
  ++found.runs;
  digests.insert(policy.digest());
  found.distinct = std::ssize(digests);
  if (what) found.failing = schedule, found.what = *what;
  return what.has_value();
}

}  // namespace

std::optional<std::string> first_change(const Steps& before, const Steps& after) {
  for (size_t step = 0; step < before.size(); ++step)
    for (size_t rank = 0; rank < before[step].size(); ++rank)
      if (auto change = first_change(before[step][rank], after[step][rank]))
        return fmt::format("step {}, rank {}: {}", step + 1, rank, *change);
  return std::nullopt;
}

Interleaving drawn_interleaving(const Case& c, int64_t number, int64_t steps) {
  using Kind = Interleaving::Kind;
  if (number == 0) return {.kind = Kind::eager};
  if (number == 1) return {.kind = Kind::latest};
  const uint64_t seed = Draws(c.seed, "schedules").bits(number) % 1'000'000;
  if (number % 3 == 2) return {.kind = Kind::random, .seed = seed};
  return {.kind = Kind::pct, .seed = seed, .depth = number % 3 == 0 ? 2 : 3, .steps = std::max<int64_t>(1, steps)};
}

Schedules try_schedules(const Case& c, int64_t count) {
  return try_schedules(c, count, Program(c));
}

Schedules try_schedules(const Case& c, int64_t count, const Scheduled& program) {
  Schedules found;
  std::set<uint64_t> digests;
  int64_t steps = 0;
  for (int64_t number = 0; number < count; ++number) {
    const Interleaving schedule = drawn_interleaving(c, number, steps);
    const auto policy = std::make_shared<RecordedPolicy>(make_policy(schedule));
    const auto what = program(policy);
    if (number == 0) steps = std::ssize(policy->points());
    if (add(found, digests, *policy, schedule, what)) break;
  }
  return found;
}

Schedules every_schedule(const Scheduled& program, int64_t delays_max, int64_t most) {
  Schedules found;
  std::set<uint64_t> digests;
  Interleaving schedule{.kind = Interleaving::Kind::choices};
  while (true) {
    const auto policy = std::make_shared<RecordedPolicy>(make_policy(schedule));
    if (add(found, digests, *policy, schedule, program(policy))) return found;
    // The last place at which there is another choice; the places before it stay.
    const auto& points = policy->points();
    std::vector<int64_t> delays = {0};  // before each place
    for (const RecordedPolicy::Point& point : points) delays.push_back(delays.back() + (point.chosen != 0 ? 1 : 0));
    size_t place = points.size();
    while (place > 0) {
      const RecordedPolicy::Point& point = points[place - 1];
      if (point.chosen + 1 < point.width && delays[place - 1] < delays_max) break;
      --place;
    }
    if (place == 0) return found;
    if (found.runs == most) {
      found.all = false;
      return found;
    }
    schedule.choices.clear();
    for (size_t p = 0; p < place; ++p) schedule.choices.push_back(points[p].chosen);
    ++schedule.choices.back();
  }
}

Schedules every_schedule(const Case& c, int64_t delays_max, int64_t most) {
  return every_schedule(Program(c), delays_max, most);
}

}  // namespace harness
