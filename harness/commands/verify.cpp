#include "harness/commands/verify.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>

#include "harness/case/failures.h"
#include "harness/commands/allocator.h"
#include "harness/commands/findings.h"
#include "harness/commands/json_lines.h"
#include "harness/commands/progress.h"
#include "harness/compare/oracle.h"
#include "harness/run/running_cases.h"
#include "harness/run/schedules.h"
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

class Campaign {
 public:
  Campaign(const VerifyOptions& options, const std::atomic<bool>& interrupted)
      : options_(options),
        interrupted_(interrupted),
        failures_(options.failures_directory),
        json_(options.json),
        findings_(
            options, interrupted, idle_, [this](const Case& c) { return judge(c); },
            [this](const nlohmann::json& line) {
              const std::lock_guard lock(mutex_);
              tell(line);
            }),
        replays_(all_replays()) {
    result_.left_out = static_cast<int64_t>(std::erase_if(replays_, [&](const Replay& replay) { return !can_run(replay.c); }));
  }

  VerifyResult run() {
    validate(generate(options_.seed, 0, options_.limits));
    failures_.require_writable();
    start_oracle();
    std::vector<std::thread> workers;
    const bool one_at_a_time = options_.ranks || options_.engine;
    running_ = one_at_a_time         ? 1
               : options_.jobs > 0   ? options_.jobs
                                     : std::max(1u, std::thread::hardware_concurrency());
    for (int64_t job = running_; job > 0; --job)
      workers.emplace_back([this] {
        at::set_num_threads(1);
        try {
          work();
        } catch (...) {
          const std::lock_guard lock(mutex_);
          if (!error_) error_ = std::current_exception();
          stop_ = true;
        }
        --running_;
        ++idle_;
      });
    watch();
    for (std::thread& worker : workers) worker.join();
    progress_.clear();
    if (error_) std::rethrow_exception(error_);
    finish_oracle();
    result_.failures = findings_.take();
    result_.interrupted = interrupted_;
    result_.from_corpus = from_corpus_;
    result_.replayed = replayed_;
    result_.seconds = progress_.seconds();
    result_.combinations = result_.coverage.combinations().figures(options_.limits);
    write_summary();
    return std::move(result_);
  }

 private:
  struct Replay {
    Case c;
    bool of_corpus = false;
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

  // What an engine cannot train, of simpler variants of a case, holds. So does what is known to go wrong.
  Verdict judge(const Case& c) const {
    const RunningCase running(c.str());
    if (!options_.engine) return run_case(c, ranks_of(options_));
    const Engine::Fitted fitted = options_.engine->fit(c);
    if (why_left_out(fitted).empty() && fitted.c == c) return options_.engine->run(c);
    return held_verdict();
  }

  void try_drawn(const Case& c) {
    if (!options_.engine) return try_case(c, false);
    const Engine::Fitted fitted = options_.engine->fit(c);
    const std::string& reason = why_left_out(fitted);
    if (reason.empty()) try_case(fitted.c, false);
    const std::lock_guard lock(mutex_);
    ++result_.drawn;
    if (!reason.empty()) ++result_.refused[reason];
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
  bool over() const {
    if (is_stopped()) return true;
    return options_.minutes > 0 ? progress_.seconds() >= options_.minutes * 60 : next_ >= own_cases();
  }

  void work() {
    for (;;) {
      const int64_t replay = next_replay_++;
      if (replay >= static_cast<int64_t>(replays_.size())) break;
      if (is_stopped()) return;
      const Replay& found = replays_[static_cast<size_t>(replay)];
      ++(found.of_corpus ? from_corpus_ : replayed_);
      try_case(found.c, true);
    }
    while (!over()) {
      findings_.wait_for_turn();
      if (over()) return;
      const int64_t number = next_++;
      if (options_.minutes <= 0 && number >= own_cases()) return;
      try_drawn(generate(options_.seed, index_of(number), options_.limits));
    }
  }

  // Of a case that held, under many schedules. What fails is run once more, so that the verdict is the one that its replay has.
  void judge_schedules(Case& c, Verdict& verdict) {
    if (options_.schedules == 0 || !verdict.held() || c.interleaving) return;
    const Schedules found = try_schedules(c, options_.schedules);
    {
      const std::lock_guard lock(mutex_);
      result_.schedules += found.runs;
      result_.schedules_distinct += found.distinct;
    }
    if (!found.failing) return;
    c.interleaving = found.failing;
    verdict = judge(c);
    if (!verdict.held()) return;
    verdict.outcome = Verdict::Outcome::schedule;
    verdict.says = fmt::format("it fails once and then holds: {}", found.what);
  }

  void try_case(Case c, bool is_replay) {
    const RunningCase running(c.str());
    const auto start = std::chrono::steady_clock::now();
    Verdict verdict = judge(c);
    judge_schedules(c, verdict);
    const bool passes = verdict.held() || (verdict.diverged() && !is_replay);  // not a random case's fault
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    int64_t cases = 0;
    {
      const std::lock_guard lock(mutex_);
      result_.coverage.add(c, verdict, passes);
      cases = result_.coverage.cases();
      nlohmann::json line = {{"type", "case"}, {"case", c.str()}, {"held", passes}, {"seconds", seconds}, {"cases", cases}};
      if (c.mode == Mode::fast) {
        line["ratio"] = verdict.ratio_max;
        line["precision"] = c.options.compute == fp32 ? "float32" : "low precision";
      }
      if (options_.engine) line["engine"] = options_.engine->name();
      tell(line);
      say(c, verdict, seconds);
      if (is_replay && passes) failures_.forget(c);
    }
    if (passes) return;
    findings_.add(c, verdict, cases);
  }

  // Under the lock.
  void say(const Case& c, const Verdict& verdict, double seconds) {
    if (verbosity() != Verbosity::verbose) return;
    progress_.clear();
    fmt::print(stderr, "{} {:>6.2f} s  {}\n",
               verdict.diverged() ? "diverged"
               : verdict.held()   ? "held    "
                                  : "FAILED  ",
               seconds, c.str());
  }

  // Under the lock, or when all workers are through.
  void tell(const nlohmann::json& line) {
    json_.write(line);
    if (options_.also) options_.also(line);
  }

  // Progress, until all workers are through.
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
  Failures failures_;
  JsonLines json_;
  Findings findings_;
  std::vector<Replay> replays_;
  Progress progress_;
  std::unique_ptr<Oracle> oracle_;

  std::atomic<int64_t> next_{0}, next_replay_{0}, from_corpus_{0}, replayed_{0}, running_{0}, idle_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // what follows
  VerifyResult result_;
  std::exception_ptr error_;
};

}  // namespace

VerifyResult verify(const VerifyOptions& options, const std::atomic<bool>& interrupted) {
  return Campaign(options, interrupted).run();
}

}  // namespace harness
