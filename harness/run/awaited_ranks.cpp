#include "harness/run/awaited_ranks.h"

#include <string>
#include <utility>
#include <vector>

#include "harness/run/policies.h"
#include "harness/run/sharded_run.h"
#include "shardproof/comm/decorated.h"

namespace harness {
namespace {

using namespace shardproof;

class Awaited final : public DecoratedComm {
 public:
  explicit Awaited(std::shared_ptr<Comm> comm) : DecoratedComm(std::move(comm)) {}

 private:
  std::shared_ptr<Comm> decorate(std::shared_ptr<Comm> group) override { return awaited(std::move(group)); }

  Work start(Call call) override {
    const bool is_message = call.op == Op::send || call.op == Op::recv;
    Work work = inner().issue(std::move(call));
    if (is_message) return work;
    work.wait();
    return Work();
  }
};

class AwaitedRanks final : public Ranks {
 public:
  Steps train(const Case& c, const golden::Run& run) override {
    return run_sharded({.c = c, .run = run, .run_world = on_threads(policy_of(c.interleaving), awaited)});
  }
};

}  // namespace

std::shared_ptr<Comm> awaited(std::shared_ptr<Comm> comm) {
  return std::make_shared<Awaited>(std::move(comm));
}

Ranks& awaited_ranks() {
  static AwaitedRanks ranks;
  return ranks;
}

}  // namespace harness
