// How the learning rate of a training run moves. No Torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace harness {

struct TrainSchedule {
  std::string kind = "constant";  // one of schedule_kinds()
  int64_t warmup = 0;             // steps
  int64_t total = 0;              // the step at which cosine, linear and wsd end
  int64_t decay = 0;              // of wsd (warm-up, stable, decay): the last so many steps before that
  double last = 0;                // the factor of the learning rate there
  bool ends() const { return kind == "cosine" || kind == "linear" || kind == "wsd"; }
};

std::vector<std::string> schedule_kinds();
// Throws Error for a kind that is not there, or numbers that it cannot have.
void validate(const TrainSchedule& schedule);
// The factor of the learning rate in a step (shardproof/optim/lr_schedule.h).
double lr_factor(const TrainSchedule& schedule, int64_t step);

}  // namespace harness
