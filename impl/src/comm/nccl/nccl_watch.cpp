#include "comm/nccl/nccl_watch.h"

#include <fmt/format.h>

#include <sstream>
#include <thread>
#include <utility>

namespace shardproof::nccl {
namespace {

const std::string kLost = "end/lost";

std::string end_name(int64_t body) {
  return fmt::format("end/{}", body);
}

}  // namespace

// "BEAT GROUP:CALLS GROUP:CALLS ...\nLAST CALL"
std::string to_text(const RankState& state) {
  std::string text = fmt::format("{}", state.beat);
  for (const auto& [group, calls] : state.calls) text += fmt::format(" {}:{}", group, calls);
  return text + '\n' + state.last_call;
}

RankState rank_state_from(const std::string& text) {
  RankState state;
  const size_t line = text.find('\n');
  std::istringstream words(text.substr(0, line));
  words >> state.beat;
  uint64_t group = 0;
  int64_t calls = 0;
  for (char colon = 0; words >> group >> colon >> calls;) state.calls[group] = calls;
  if (line != std::string::npos) state.last_call = text.substr(line + 1);
  return state;
}

void Watch::publish(RankState state) {
  state.beat = ++beat_;
  store_->set(fmt::format("state/{}", rank_), to_text(state));
}

std::optional<WorldEnd> Watch::end(int64_t body) {
  if (const auto text = store_->get(kLost)) return WorldEnd{true, *text};
  if (const auto text = store_->get(end_name(body))) return WorldEnd{false, *text};
  return std::nullopt;
}

WorldEnd Watch::say_end(int64_t body, const WorldEnd& end) {
  const std::string name = end.lost ? kLost : end_name(body);
  if (store_->count(name + "/said") == 1) {
    store_->set(name, end.text);
    return end;
  }
  // Whoever was first has counted and is about to say it; until then what this rank knows is as good.
  return this->end(body).value_or(end);
}

bool Watch::all_close(int64_t ranks, std::chrono::duration<double> patience) try {
  const auto name = [](int64_t rank) { return fmt::format("closing/{}", rank); };
  store_->set(name(rank_), "yes");
  const auto until = std::chrono::steady_clock::now() + patience;
  for (int64_t rank = 0; rank < ranks; ++rank)
    for (; !store_->get(name(rank)); std::this_thread::sleep_for(std::chrono::milliseconds(1)))
      if (std::chrono::steady_clock::now() > until) return false;
  return true;
} catch (const std::exception&) {  // the store is gone, and somebody with it
  return false;
}

std::optional<RankState> Watch::state_of(int64_t rank) {
  const auto text = store_->get(fmt::format("state/{}", rank));
  if (!text) return std::nullopt;
  return rank_state_from(*text);
}

double Pulse::silent_s(int64_t rank, const std::optional<RankState>& state, double now_s) {
  const int64_t beat = state ? state->beat : -1;
  const auto [seen, is_new] = seen_.try_emplace(rank, Seen{beat, now_s});
  if (seen->second.beat != beat) seen->second = {beat, now_s};
  return now_s - seen->second.at_s;
}

}  // namespace shardproof::nccl

namespace shardproof {

void end_world(std::shared_ptr<NcclStore> store, const std::string& why) {
  constexpr int64_t kNoRank = -1;
  nccl::Watch(kNoRank, std::move(store)).say_end(0, {true, why});
}

std::optional<std::string> world_end(NcclStore& store) {
  return store.get(nccl::kLost);
}

}  // namespace shardproof
