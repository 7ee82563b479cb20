// What of a checkpoint fits a model and its optimizer.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/state_names.h"

namespace shardproof::checkpoint {

// What becomes of the optimizer's state of a parameter.
struct Restored {
  std::string parameter;
  int64_t updates = 0;
  std::vector<std::string> state_names;  // none: it has no state in the checkpoint
  std::vector<std::string> scalar_names = {};
};

// What is loaded, and what does not fit. The same on every rank.
struct Matched {
  std::vector<std::pair<std::string, std::string>> parameters;  // name, key
  std::vector<std::string> plain, extra;
  std::set<std::string> kept_along;  // keys
  std::vector<Restored> states;
  std::vector<std::string> misfits;
};

// `groups`: of the optimizer; null without one. `updates_of`: how often a parameter was updated when it was saved; below 0:
// the checkpoint does not say.
Matched match_state(const Checkpoint& checkpoint, const ModelNames& names, const std::vector<OptimizerState::Group>* groups,
                    const std::function<int64_t(const std::string&)>& updates_of);

}  // namespace shardproof::checkpoint
