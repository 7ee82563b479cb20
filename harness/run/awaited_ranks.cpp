#include "harness/run/awaited_ranks.h"

#include <string>
#include <utility>
#include <vector>

#include "harness/run/policies.h"
#include "harness/run/sharded_run.h"

namespace harness {
namespace {

using namespace shardproof;

class Awaited final : public Comm {
 public:
  explicit Awaited(std::shared_ptr<Comm> comm) : comm_(std::move(comm)) {}

  int64_t rank() const override { return comm_->rank(); }
  int64_t size() const override { return comm_->size(); }
  const std::string& name() const override { return comm_->name(); }
  std::shared_ptr<Comm> split(int64_t color, int64_t key, std::string name) override {
    std::shared_ptr<Comm> group = comm_->split(color, key, std::move(name));
    return group ? awaited(std::move(group)) : nullptr;
  }
  std::shared_ptr<Comm> split_ranks(const std::vector<int64_t>& ranks, std::string name) override {
    return awaited(comm_->split_ranks(ranks, std::move(name)));
  }
  at::Tensor shared_memory(int64_t bytes) override { return comm_->shared_memory(bytes); }
  c10::DataPtr allocate(Op op, int64_t bytes, c10::Device device) override { return comm_->allocate(op, bytes, device); }
  bool premultiplies() const override { return comm_->premultiplies(); }

 private:
  Work start(Call call) override {
    const bool is_message = call.op == Op::send || call.op == Op::recv;
    Work work = comm_->issue(std::move(call));
    if (is_message) return work;
    work.wait();
    return Work();
  }

  std::shared_ptr<Comm> comm_;
};

class AwaitedRanks final : public Ranks {
 public:
  Steps train(const Case& c, const golden::Run& run) override {
    CaseCheckpoints checkpoints(c);
    return run_sharded(c, run, checkpoints, on_threads(policy_of(c.interleaving), awaited));
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
