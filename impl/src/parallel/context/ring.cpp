#include "parallel/context/ring.h"

#include <ATen/ATen.h>

#include <optional>

namespace shardproof {

// One step: what this rank has goes to the next, and what the rank before has arrives. Underway until wait(). It is one call,
// since process groups of NCCL may block a host that sends until the peer receives.
class Ring::Pass {
 public:
  Pass(const at::Tensor& mine, at::Tensor arriving, int64_t next, int64_t previous, Comm& group)
      : mine_(mine), arriving_(std::move(arriving)) {
    std::vector<int64_t> sent(static_cast<size_t>(group.size())), received(sent);
    sent[static_cast<size_t>(next)] = mine_.numel();
    received[static_cast<size_t>(previous)] = arriving_.numel();
    work_ = group.all_to_all(arriving_, mine_, received, sent);
  }
  at::Tensor wait() {
    work_.wait();
    return arriving_;
  }

 private:
  at::Tensor mine_, arriving_;
  Work work_;
};

Ring::Pass Ring::pass_on(const at::Tensor& mine, int64_t source) const {
  std::vector<int64_t> sizes = mine.sizes().vec();
  sizes[sizes.size() - 2] = cut_.count(before(source));
  return Pass(mine, at::empty(sizes, mine.options()), (rank() + 1) % group_->size(), before(rank()), *group_);
}

void Ring::go_round(at::Tensor mine, const std::function<void(const at::Tensor&, int64_t)>& visit) const {
  go_round_adding(std::move(mine), {},
                  [&](const at::Tensor& theirs, const at::Tensor&, int64_t source) { visit(theirs, source); });
}

at::Tensor Ring::go_round_adding(at::Tensor mine, at::Tensor sum, const AddingVisit& visit) const {
  const int64_t ranks = group_->size();
  for (int64_t source = rank(), step = 0; step < ranks; ++step, source = before(source)) {
    std::optional<Pass> passing;
    if (step + 1 < ranks) passing.emplace(pass_on(mine, source));
    visit(mine, sum, source);
    if (passing) mine = passing->wait();
    if (sum.defined() && ranks > 1) sum = pass_on(sum, source).wait();
  }
  return sum;
}

}  // namespace shardproof
