#include "harness/commands/judge.h"

#include <algorithm>
#include <thread>
#include <vector>

#include "harness/run/picture.h"
#include "harness/run/replicas.h"
#include "harness/run/running_cases.h"
#include "harness/run/schedules.h"
#include "shardproof/base/check.h"

namespace harness {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Difference, value, tensor, element, rank, round, says)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Verdict, outcome, step, difference, origin, says, values_compared, ratio_max,
                                   smallest_found, properties, steps_clipped, steps_not_clipped, steps_skipped)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Explanation, where, first, replicas, guess)

namespace {

// Unlike JSON's text this keeps numbers that are not finite and texts that are no UTF-8.
std::string to_text(const nlohmann::json& value) {
  std::string text;
  nlohmann::json::to_cbor(value, text);
  return text;
}

// What an engine cannot train, of simpler variants of a case, holds. So does what is known to go wrong.
Verdict verdict_in(const Engine& engine, const Case& c) {
  const Engine::Fitted fitted = engine.fit(c);
  return fitted.reason.empty() && fitted.known.empty() && fitted.c == c ? engine.run(c) : held_verdict();
}

// After which step replicas differ, and after which their check complains, counted from 1; 0: never.
nlohmann::json replicas_json(const Case& c, Ranks& ranks) {
  const Replicas replicas = replicas_of(c, ranks);
  return {{"differ", replicas.step + 1}, {"found", replicas.found + 1}};
}

int64_t workers_of(const VerifyOptions& options) {
  if (!has_workers(options)) return 0;
  if (options.jobs > 0) return options.jobs;
  return options.make_ranks ? 1 : std::max<int64_t>(1, std::thread::hardware_concurrency());
}

}  // namespace

// What a worker answered, or how it ended.
struct Judge::Reply {
  nlohmann::json answer;  // null where it crashed
  Verdict crash;
  double seconds = 0;
};

bool has_workers(const VerifyOptions& options) {
  return !options.ranks && !options.engine;
}

Judge::Judge(const VerifyOptions& options)
    : options_(options), workers_(workers_of(options), [this](const std::string& request) {
        return to_text(answer(nlohmann::json::from_cbor(request)));
      }) {}

Verdict Judge::verdict_of(const Case& c) {
  const Reply reply = ask({{"case", c.str()}, {"schedules", 0}});
  return reply.answer.is_null() ? reply.crash : reply.answer.at("verdict").get<Verdict>();
}

Judged Judge::try_case(const Case& c) {
  const Reply reply = ask({{"case", c.str()}, {"schedules", options_.schedules}});
  if (reply.answer.is_null()) return {.c = c, .verdict = reply.crash, .seconds = reply.seconds};
  return {.c = Case::parse(reply.answer.at("case").get<std::string>()),
          .verdict = reply.answer.at("verdict").get<Verdict>(),
          .schedules = reply.answer.at("runs").get<int64_t>(),
          .schedules_distinct = reply.answer.at("distinct").get<int64_t>(),
          .seconds = reply.seconds};
}

CloseUp Judge::look_at(const Case& minimal, const Verdict& verdict, const Case& original) {
  if (verdict.outcome == Verdict::Outcome::crash) return {};
  const Reply reply = ask({{"case", minimal.str()}, {"verdict", verdict}, {"original", original.str()}});
  if (reply.answer.is_null()) return {};
  return {.looks_like = reply.answer.at("looks_like").get<Explanation>(),
          .picture = reply.answer.at("picture"),
          .replicas = reply.answer.at("replicas")};
}

Judge::Reply Judge::ask(const nlohmann::json& request) {
  const Answer answer = workers_.ask(to_text(request));
  if (!answer.error.empty()) throw shardproof::Error(answer.error);
  if (!answer.crash.empty())
    return {.crash = {.outcome = Verdict::Outcome::crash, .origin = answer.crash}, .seconds = answer.seconds};
  return {.answer = nlohmann::json::from_cbor(answer.text), .seconds = answer.seconds};
}

// In a worker, where there are workers.
nlohmann::json Judge::answer(const nlohmann::json& request) {
  Case c = Case::parse(request.at("case").get<std::string>());
  const RunningCase running(c.str());
  if (const auto original = request.find("original"); original != request.end()) {
    const Verdict verdict = request.at("verdict").get<Verdict>();
    const bool has_replicas = !options_.engine && verdict.outcome != Verdict::Outcome::error;  // engines have no check
    nlohmann::json seen = {{"looks_like", explain(c, verdict.outcome, ranks())}, {"picture", nullptr}, {"replicas", nullptr}};
    if (!options_.engine) seen["picture"] = to_json(picture_of(c, verdict.step));
    if (has_replicas)
      seen["replicas"] = {{"minimal", replicas_json(c, ranks())},
                          {"original", replicas_json(Case::parse(original->get<std::string>()), ranks())}};
    return seen;
  }
  const auto judged = [&] { return options_.engine ? verdict_in(*options_.engine, c) : run_case(c, ranks()); };
  Verdict verdict = judged();
  Schedules found;
  const auto schedules = request.at("schedules").get<int64_t>();
  if (schedules > 0 && verdict.held() && !c.interleaving) found = try_schedules(c, schedules);
  if (found.failing) {
    // Once more, so that the verdict is the one that its replay has.
    c.interleaving = found.failing;
    verdict = judged();
    if (verdict.held()) {
      verdict.outcome = Verdict::Outcome::schedule;
      verdict.says = fmt::format("it fails once and then holds: {}", found.what);
    }
  }
  return {{"case", c.str()}, {"verdict", verdict}, {"runs", found.runs}, {"distinct", found.distinct}};
}

Ranks& Judge::ranks() {
  if (options_.engine) return options_.engine->ranks();
  if (options_.ranks) return *options_.ranks;
  if (!options_.make_ranks) return thread_ranks();
  if (!own_ranks_) own_ranks_ = options_.make_ranks();
  return *own_ranks_;
}

}  // namespace harness
