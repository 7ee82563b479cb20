// What the watching thread does at every look: mark what is over, find what is overdue or failed, tell and be told.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>

#include "comm/nccl/nccl_engine.h"

namespace shardproof::nccl {
namespace {

using Clock = std::chrono::steady_clock;

std::chrono::milliseconds beat_of(double timeout_s) {
  return std::chrono::milliseconds(std::clamp<int64_t>(static_cast<int64_t>(timeout_s * 1000 / 50), 5, 100));
}

double now_s() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

}  // namespace

void Engine::run_watch() {
  api_->use_device();
  std::unique_lock lock(wake_mutex_);
  while (!stop_) {
    lock.unlock();
    try {
      look();
    } catch (const std::exception& error) {
      const std::lock_guard state(state_mutex_);
      if (!ended_) end_ = {true, fmt::format("rank {} cannot tell or hear the others: {}", rank_, error.what())};
      ended_ = true;
    }
    if (ended_) {
      const std::lock_guard nccl(mutex_);
      // The next body may have begun meanwhile, and its lanes are others.
      if (ended_) abort_lanes();
    }
    lock.lock();
    wake_.wait_for(lock, beat_of(options_.timeout_seconds), [this] { return stop_; });
  }
}

void Engine::look() {
  int64_t body = 0;
  {
    const std::lock_guard state(state_mutex_);
    body = body_;
  }
  watch_.publish(state());
  if (ended_) return;
  collect_complete();
  find_async_errors(body);
  if (const auto late = first_overdue()) end(body, {true, overdue_text(*late)});
  if (const auto said = watch_.end(body)) end(body, *said);
}

std::shared_ptr<Operation> Engine::first_overdue() {
  const std::lock_guard state(state_mutex_);
  const auto late = std::find_if(flying_.begin(), flying_.end(), [this](const auto& operation) {
    return std::chrono::duration<double>(Clock::now() - operation->begun).count() > options_.timeout_seconds;
  });
  return late == flying_.end() ? nullptr : *late;
}

std::string Engine::overdue_text(const Operation& operation) {
  std::vector<std::string> missing;
  for (const int64_t rank : operation.group->world_ranks) {
    const auto state = rank == rank_ ? std::nullopt : watch_.state_of(rank);
    if (!state || operation.is_message()) continue;
    const auto calls = state->calls.find(operation.group->id);
    if (calls != state->calls.end() && calls->second > operation.sequence) continue;
    missing.push_back(fmt::format("rank {} has not made it{}", rank,
                                  state->last_call.empty() ? "" : fmt::format(" (its last call is {})", state->last_call)));
  }
  if (missing.empty())
    missing.emplace_back(operation.is_message() ? "the other end may not have made it"
                                                : "all ranks have made a call of this number; their flight records show "
                                                  "whether it is the same one");
  return fmt::format("rank {}: {} is not over after {} s: {}{}", rank_, operation.title(), options_.timeout_seconds,
                     fmt::join(missing, "; "), unheard(operation.group->world_ranks));
}

std::string Engine::unheard(const std::vector<int64_t>& ranks) {
  std::vector<std::pair<int64_t, int64_t>> beats;
  const auto beat = [&](int64_t rank) {
    const auto state = watch_.state_of(rank);
    return state ? state->beat : -1;
  };
  for (const int64_t rank : ranks)
    if (rank != rank_) beats.emplace_back(rank, beat(rank));
  std::this_thread::sleep_for(5 * beat_of(options_.timeout_seconds));
  std::string text;
  for (const auto& [rank, before] : beats)
    if (beat(rank) == before) text += fmt::format("; rank {} gives no sign of life", rank);
  return text;
}

void Engine::require_sign_of_life(int64_t rank, Pulse& pulse, const std::string& doing) {
  if (rank == rank_) return;
  const double silent_s = pulse.silent_s(rank, watch_.state_of(rank), now_s());
  if (silent_s <= options_.timeout_seconds) return;
  end(body_, {true, fmt::format("rank {} has given no sign of life for {:.1f} s", rank, silent_s)});
  require_alive(doing);
}

// Where the caller is at NCCL itself it finds them on its own.
void Engine::find_async_errors(int64_t body) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return;
  for (const auto& group : groups_)
    for (Lane& lane : group->lanes) {
      if (!lane.communicator) continue;
      const NcclResult result = api_->async_error(lane.communicator);
      if (result == NcclResult::success || result == NcclResult::in_progress) continue;
      std::string doing;
      {
        const std::lock_guard state(state_mutex_);
        const auto at =
            std::find_if(flying_.begin(), flying_.end(), [&](const auto& operation) { return &operation->lane() == &lane; });
        if (at != flying_.end()) doing = fmt::format(" in {}", (*at)->title());
      }
      return end(body,
                 {true, fmt::format("rank {}: NCCL failed{}: {}", rank_, doing, api_->error_text(result, lane.communicator))});
    }
}

void Engine::end(int64_t body, const WorldEnd& mine) {
  WorldEnd first = mine;
  try {
    first = watch_.say_end(body, mine);
  } catch (const std::exception& error) {
    first.text += fmt::format(" (and the store is gone: {})", error.what());
    first.lost = true;
  }
  const std::lock_guard state(state_mutex_);
  if (ended_ || (body != body_ && !first.lost)) return;
  end_ = first;
  ended_ = true;
  for (const auto& operation : flying_) calls_.mark(*operation, FlightCall::State::failed);
  const std::string trouble = calls_.write(options_.flight_directory, first.text);
  if (!trouble.empty()) end_.text += fmt::format(" ({})", trouble);
}

// Under mutex_. Everything that is on its way on them ends; what waits for it goes on. As a group: one communicator's kernel
// may be waiting behind another's. What was being split from one is there once that one was aborted.
void Engine::abort_lanes() {
  for (bool found = true; found;) {
    found = false;
    api_->group_start();
    // An abort waits for what is in progress, and that may wait for a kernel of another lane: those lanes come last.
    for (const bool at_last : {false, true})
      for (const auto& group : groups_)
        for (Lane& lane : group->lanes)
          if (lane.communicator && (at_last || api_->async_error(lane.communicator) != NcclResult::in_progress)) {
            found = true;
            api_->abort(std::exchange(lane.communicator, nullptr));
          }
    api_->group_end();
  }
}

RankState Engine::state() {
  const std::lock_guard state(state_mutex_);
  return {.calls = collectives_, .last_call = calls_.last()};
}

}  // namespace shardproof::nccl
