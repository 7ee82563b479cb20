// What the ranks know of each other through the store: how far each is, whether it lives, and what ended the world. Nothing
// here knows of NCCL or CUDA.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shardproof/comm/nccl/nccl_store.h"

namespace shardproof::nccl {

// Of one rank.
struct RankState {
  int64_t beat = 0;                        // another at every look of a rank that lives
  std::map<uint64_t, int64_t> calls = {};  // collectives of each group
  std::string last_call = {};
};
std::string to_text(const RankState& state);
RankState rank_state_from(const std::string& text);

// What ended a body, for all.
struct WorldEnd {
  bool lost = false;  // nothing can run any more; else only this body
  std::string text;
};

class Watch {
 public:
  Watch(int64_t rank, std::shared_ptr<NcclStore> store) : rank_(rank), store_(std::move(store)) {}

  void publish(RankState state);
  std::optional<RankState> state_of(int64_t rank);
  // The first end that any rank said of this body, or of the world. Bodies are numbered alike on all ranks.
  std::optional<WorldEnd> end(int64_t body);
  // Returns the first, which is this one unless another rank was before.
  WorldEnd say_end(int64_t body, const WorldEnd& end);
  // Whether all ranks come to close the world in time. Who then aborts is waited for by nobody.
  bool all_close(int64_t ranks, std::chrono::duration<double> patience);

 private:
  const int64_t rank_;
  const std::shared_ptr<NcclStore> store_;
  int64_t beat_ = 0;
};

// Seconds for which a rank has given no sign of life, by one observer.
class Pulse {
 public:
  double silent_s(int64_t rank, const std::optional<RankState>& state, double now_s);

 private:
  struct Seen {
    int64_t beat;
    double at_s;
  };
  std::map<int64_t, Seen> seen_;
};

}  // namespace shardproof::nccl
