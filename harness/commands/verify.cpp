#include "harness/commands/verify.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "harness/case/failures.h"
#include "harness/commands/allocator.h"
#include "harness/commands/findings.h"
#include "harness/commands/json_lines.h"
#include "harness/commands/judge.h"
#include "harness/commands/progress.h"
#include "harness/compare/oracle.h"
#include "harness/run/verbosity.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

// Empty if an engine's run of the case is compared.
const std::string& why_left_out(const Engine::Fitted& fitted) {
  return fitted.reason.empty() ? fitted.known : fitted.reason;
}

// What decides which cases are drawn, but for their number and the part: two runs with one text draw the same cases.
std::string drawn_from(const VerifyOptions& options) {
  const Limits& limits = options.limits;
  std::string text = fmt::format("seed {}", options.seed);
  if (limits.strategy) text += fmt::format(" --strategy {}", *limits.strategy);
  if (limits.mesh) text += fmt::format(" --mesh {}", limits.mesh->str());
  if (limits.mode) text += fmt::format(" --mode {}", to_string(*limits.mode));
  if (limits.tiny) text += " --tiny";
  if (!limits.above_ten) text += fmt::format(" --world-max {}", limits.world_max);
  if (options.engine) text += fmt::format(" --engine {}", options.engine->name());
  return text;
}

constexpr int64_t kOracleSample = 400;  // the oracle looks for kinds among so many cases
constexpr int64_t kAhead = 32;          // so many cases of each job may wait for one before them

class Campaign {
 public:
  Campaign(const VerifyOptions& options, const std::atomic<bool>& interrupted)
      : options_(options),
        interrupted_(interrupted),
        judge_(options),
        failures_(options.failures_directory),
        json_(options.json),
        findings_(options, interrupted, judge_, [this](const nlohmann::json& line) { tell(line); }),
        replays_(all_replays()) {
    result_.left_out = static_cast<int64_t>(std::erase_if(replays_, [&](const Replay& replay) { return !can_run(replay.c); }));
  }

  VerifyResult run() {
    validate(generate(options_.seed, 0, options_.limits));
    failures_.require_writable();
    start_oracle();
    std::vector<std::jthread> jobs;
    running_ = judge_.size();
    try {
      for (int64_t job = running_; job > 0; --job) jobs.emplace_back([this] { run_job(); });
      watch();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      stop_ = true;
      throw;
    }
    for (std::jthread& job : jobs) job.join();
    progress_.clear();
    if (error_) std::rethrow_exception(error_);
    finish_oracle();
    result_.failures = findings_.take();
    result_.interrupted = interrupted_;
    result_.seconds = progress_.seconds();
    result_.combinations = result_.coverage.combinations().figures(options_.limits);
    write_summary();
    return std::move(result_);
  }

 private:
  void run_job() {
    if (!has_workers(options_)) at::set_num_threads(1);
    try {
      work();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
      stop_ = true;
    }
    --running_;
  }

  struct Replay {
    Case c;
    bool of_corpus = false;
  };

  // What became of a place in the order of cases: replays first, and then those that are drawn.
  struct Tried {
    const Replay* replay = nullptr;  // null: it was drawn
    std::string refused = {};        // why it was not tried, by an engine; else ""
    Judged judged = {};
  };

  // Of the corpus, this part's cases. Each machine has failures of its own.
  std::vector<Replay> all_replays() const {
    std::vector<Replay> replays;
    if (!options_.corpus_directory.empty()) {
      const std::vector<Case> corpus = Failures(options_.corpus_directory).all(/*strict=*/true);
      for (int64_t i = options_.shard; i < std::ssize(corpus); i += options_.shard_count)
        replays.push_back({corpus[static_cast<size_t>(i)], true});
    }
    for (Case& c : failures_.all()) replays.push_back({std::move(c), false});
    return replays;
  }

  // Whether a case that was not drawn here suits these ranks.
  bool can_run(const Case& c) const {
    const bool has_threads = options_.ranks_max == 0 || !c.interleaving;
    return has_threads && (options_.ranks_max == 0 || c.largest_world() <= options_.ranks_max);
  }

  int64_t index_of(int64_t number) const { return options_.shard + number * options_.shard_count; }
  int64_t own_cases() const {
    return std::max<int64_t>(0, (options_.cases - options_.shard + options_.shard_count - 1) / options_.shard_count);
  }

  void start_oracle() {
    if (!options_.python) return;
    std::vector<Case> cases;
    for (int64_t i = 0; i < (options_.minutes > 0 ? kOracleSample : std::min(own_cases(), kOracleSample)); ++i)
      cases.push_back(generate(options_.seed, index_of(i), options_.limits));
    oracle_ = std::make_unique<Oracle>(one_of_each_kind(cases));
  }

  void finish_oracle() {
    if (!oracle_) return;
    const Oracle::Outcome outcome = oracle_->finish(interrupted_);
    result_.oracle_compared = outcome.compared;
    for (const auto& [c, what] : outcome.differences) {
      result_.oracle_differences.push_back(fmt::format("{}\n  {}", what, c.str()));
      tell({{"type", "oracle"}, {"case", c.str()}, {"what", what}});
    }
  }

  bool is_stopped() const { return stop_ || interrupted_ || findings_.enough(); }

  void work() {
    while (const std::optional<int64_t> place = next_place()) report(*place, tried(*place));
  }

  // Nothing where no other case is to run. Waits while a case long before has not been reported, for example because it fails
  // and is being shrunk: if it is the last failure that was asked for, what comes behind it is of no interest.
  std::optional<int64_t> next_place() {
    std::unique_lock lock(order_);
    while (!is_stopped() && given_ - reported_ >= kAhead * judge_.size()) came_.wait_for(lock, std::chrono::milliseconds(20));
    const int64_t drawn = given_ - std::ssize(replays_);
    const bool is_over = options_.minutes > 0 ? progress_.seconds() >= options_.minutes * 60 : drawn >= own_cases();
    if (is_stopped() || (drawn >= 0 && is_over)) return {};
    return given_++;
  }

  Tried tried(int64_t place) {
    const int64_t drawn = place - std::ssize(replays_);
    if (drawn < 0) {
      const Replay& replay = replays_[static_cast<size_t>(place)];
      return {.replay = &replay, .judged = judge_.try_case(replay.c)};
    }
    const Case c = generate(options_.seed, index_of(drawn), options_.limits);
    if (!options_.engine) return {.judged = judge_.try_case(c)};
    const Engine::Fitted fitted = options_.engine->fit(c);
    const std::string& reason = why_left_out(fitted);
    if (!reason.empty()) return {.refused = reason};
    return {.judged = judge_.try_case(fitted.c)};
  }

  // In the order of places, by whichever thread has the next one, so that a run says the same however many jobs it has.
  void report(int64_t place, Tried tried) {
    std::unique_lock lock(order_);
    waiting_.emplace(place, std::move(tried));
    if (is_reporting_) return;
    is_reporting_ = true;
    for (auto next = waiting_.begin(); next != waiting_.end() && next->first == reported_; next = waiting_.begin()) {
      const Tried now = std::move(next->second);
      waiting_.erase(next);
      lock.unlock();
      if (!findings_.enough()) add(now);
      lock.lock();
      ++reported_;
      came_.notify_all();
    }
    is_reporting_ = false;
  }

  void add(const Tried& tried) {
    if (tried.replay) ++(tried.replay->of_corpus ? result_.from_corpus : result_.replayed);
    if (options_.engine && !tried.replay) ++result_.drawn;
    if (!tried.refused.empty()) {
      ++result_.refused[tried.refused];
      return;
    }
    const auto& [c, verdict, schedules, schedules_distinct, seconds] = tried.judged;
    const bool passes = verdict.held() || (verdict.diverged() && !tried.replay);  // not a random case's fault
    result_.schedules += schedules;
    result_.schedules_distinct += schedules_distinct;
    {
      const std::lock_guard lock(mutex_);
      result_.coverage.add(c, verdict, passes);
    }
    const int64_t cases = result_.coverage.cases();
    nlohmann::json line = {{"type", "case"}, {"case", c.str()}, {"held", passes}, {"seconds", seconds}, {"cases", cases}};
    if (c.mode == Mode::fast) {
      line["ratio"] = verdict.ratio_max;
      line["precision"] = c.options.compute == fp32 ? "float32" : "low precision";
    }
    if (options_.engine) line["engine"] = options_.engine->name();
    tell(line);
    say(c, verdict, seconds);
    if (tried.replay && passes) failures_.forget(c);
    if (!passes) findings_.add(c, verdict, cases);
  }

  void say(const Case& c, const Verdict& verdict, double seconds) {
    if (verbosity() != Verbosity::verbose) return;
    progress_.clear();
    fmt::print(stderr, "{} {:>6.2f} s  {}\n",
               verdict.diverged() ? "diverged"
               : verdict.held()   ? "held    "
                                  : "FAILED  ",
               seconds, c.str());
  }

  void tell(const nlohmann::json& line) {
    json_.write(line);
    if (options_.also) options_.also(line);
  }

  // Progress, until all jobs are through.
  void watch() {
    while (running_ > 0) {
      if (oracle_ && oracle_->failed()) stop_ = true;
      int64_t cases = 0, failures = 0;
      {
        const std::lock_guard lock(mutex_);
        cases = result_.coverage.cases();
        failures = result_.coverage.failures();
      }
      const double seconds = progress_.seconds();
      const double fraction = options_.minutes > 0
                                  ? seconds / (options_.minutes * 60)
                                  : static_cast<double>(cases) / static_cast<double>(std::max<int64_t>(1, own_cases()));
      progress_.show(std::min(fraction, 1.0), fmt::format("{} cases, {:.0f} a minute, {} failures", cases,
                                                          static_cast<double>(cases) * 60 / std::max(seconds, 1e-3), failures));
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

  void write_summary() {
    nlohmann::json features = result_.coverage.features();
    if (options_.engine)
      tell({{"type", "engine"},
            {"engine", options_.engine->name()},
            {"drawn", result_.drawn},
            {"trained", result_.coverage.cases()},
            {"refused", result_.refused}});
    tell({{"type", "summary"},
          {"drawn_from", drawn_from(options_)},
          {"asked",
           options_.minutes > 0 ? fmt::format("{} minutes", options_.minutes) : fmt::format("{} cases", options_.cases)},
          {"part", options_.shard + 1},
          {"parts", options_.shard_count},
          {"cases", result_.coverage.cases()},
          {"failures", result_.coverage.failures()},
          {"seconds", result_.seconds},
          {"interrupted", result_.interrupted},
          {"allocator", allocator_name()},
          {"covered", features},
          {"pairs", result_.coverage.pairs()},
          {"combinations", to_json(result_.combinations)},
          {"schedules", result_.schedules},
          {"schedules_distinct", result_.schedules_distinct},
          {"oracle_compared", result_.oracle_compared},
          {"oracle_differences", result_.oracle_differences.size()},
          {"values_compared", result_.coverage.values_compared()},
          {"ratio_max", result_.coverage.ratio_max()},
          {"properties", result_.coverage.properties()},
          {"smallest_found", result_.coverage.smallest_found()}});
  }

  const VerifyOptions& options_;
  const std::atomic<bool>& interrupted_;
  Judge judge_;  // before there are threads
  Failures failures_;
  JsonLines json_;
  Findings findings_;
  std::vector<Replay> replays_;
  Progress progress_;
  std::unique_ptr<Oracle> oracle_;

  std::atomic<int64_t> running_{0};
  std::atomic<bool> stop_{false};
  std::mutex order_;  // what follows
  std::condition_variable came_;
  int64_t given_ = 0, reported_ = 0;  // places
  std::map<int64_t, Tried> waiting_;  // for places before them
  bool is_reporting_ = false;
  std::mutex mutex_;     // the coverage, and what follows
  VerifyResult result_;  // of it, and of what is told, only one thread at a time makes more
  std::exception_ptr error_;
};

}  // namespace

VerifyResult verify(const VerifyOptions& options, const std::atomic<bool>& interrupted) {
  return Campaign(options, interrupted).run();
}

}  // namespace harness
