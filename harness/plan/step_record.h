// What one rank does in a step, in its order: operators, and collectives that it starts and waits for. It says what happens,
// and not how long it takes; timeline.h does that for a machine.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "shardproof/comm/comm.h"

namespace harness {

// One operator: the products that it computes, and what it reads and writes.
struct Operator {
  double flops = 0;  // a product and its addition are two
  double bytes = 0;
  at::ScalarType dtype = at::kFloat;  // of its products
};

struct RankGroup {
  std::string name;
  std::vector<int64_t> ranks;  // of the world, in the group's order
};

struct Collective {
  shardproof::Op op = shardproof::Op::barrier;
  size_t group = 0;   // an index into StepRecord::groups
  int64_t bytes = 0;  // of the larger of the call's two tensors, e.g. the whole buffer of an all_gather
  at::ScalarType dtype = at::kFloat;
  bool to_one = false;  // an all_to_all in which the rank sends to one other only, as in a ring
};

struct StepEvent {
  enum class Kind { compute, start, wait } kind = Kind::compute;
  size_t index = 0;  // into `operators` or `collectives`
};

struct StepRecord {
  std::vector<StepEvent> events;
  std::vector<Operator> operators;
  std::vector<Collective> collectives;
  std::vector<RankGroup> groups;  // the first one is the world
};

// Between `clear` and `record`, what a thread does to it is a step.
class StepRecorder {
 public:
  size_t group(std::string name, std::vector<int64_t> ranks);
  void compute(const Operator& what);
  size_t start(const Collective& what);
  void wait(size_t collective);
  // Forgets events. Groups stay, and a collective that was started before and is awaited later is no event.
  void clear();
  const StepRecord& record() const { return record_; }
  // Of memory that the ranks of a group share, the parts of the others. A rank alone allocates them too.
  void share(int64_t neighbours_bytes) { neighbours_bytes_ += neighbours_bytes; }
  int64_t neighbours_bytes() const { return neighbours_bytes_; }

 private:
  StepRecord record_;
  size_t forgotten_ = 0;  // collectives that were started before the last `clear`
  int64_t neighbours_bytes_ = 0;
};

// Writes the calls and waits of every group into the recorder, which must live as long. `ranks`: those of `inner` in the world.
std::shared_ptr<shardproof::Comm> recorded(std::shared_ptr<shardproof::Comm> inner, StepRecorder& recorder);

}  // namespace harness
