#include "sharding/replicas.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "parallel/tensor/parallel_state.h"
#include "sharding/state_groups.h"
#include "shardproof/base/check.h"
#include "internal/base/call_label.h"

namespace shardproof {
namespace {

constexpr double kTolerance = 0.01;
constexpr int64_t kElementsAtOnce = int64_t{1} << 20;

bool is_replica(const Bucket& bucket, int64_t member) {
  return bucket.gradient.final() && bucket.trains(member) && bucket.rules().grad_partial_ranks == 1 &&
         !bucket.layout().members()[member].is_cut();
}

// Adds up the elements of a segment of the gradient in two ways that do not depend on how ranks share them: times weights by
// their place in the parameter, and squared. Sums are in double.
void add_elements(const at::Tensor& gradient, const Segment& segment, const at::Tensor& sums) {
  for (int64_t at = 0; at < gradient.numel(); at += kElementsAtOnce) {
    const int64_t count = std::min(kElementsAtOnce, gradient.numel() - at);
    const at::Tensor values = gradient.narrow(0, at, count).to(at::kDouble);
    at::Tensor places = at::arange(at, at + count, values.options().dtype(at::kLong));
    if (segment.times > 1) places += at::floor_divide(places, segment.run.size()) * (segment.stride - segment.run.size());
    const at::Tensor weights = places.add_(segment.run.begin).to(at::kDouble).mul_(2.4).cos_();
    sums[0] += at::dot(values, weights).cpu();
    sums[1] += at::dot(values, values).cpu();
  }
}

struct Replicas {
  std::vector<std::string> names;  // the same on every rank
  at::Tensor sums;                 // [names, 2], of this rank's elements
};

Replicas find_replicas(const std::vector<Bucket*>& buckets) {
  Replicas found;
  std::vector<at::Tensor> sums;
  for (const Bucket* bucket : buckets) {
    const auto& members = bucket->layout().members();
    std::vector<at::Tensor> of_member(members.size());
    for (int64_t member = 0; member < std::ssize(members); ++member) {
      if (!is_replica(*bucket, member)) continue;
      found.names.push_back(members[member].name);
      sums.push_back(of_member[member] = at::zeros({2}, at::kDouble));
    }
    for (const Segment& segment : bucket->layout().state().segments)
      if (const at::Tensor& own = of_member[segment.member]; own.defined())
        add_elements(bucket->gradient.values().narrow(0, segment.local, segment.size()), segment, own);
  }
  if (!sums.empty()) found.sums = at::stack(sums);
  return found;
}

// Not finite ones are for loss scaling, or for who looks for them.
bool differ(const double* a, const double* b) {
  const double norm_a = std::sqrt(a[1]), norm_b = std::sqrt(b[1]), allowed = kTolerance * std::max(norm_a, norm_b);
  return std::isfinite(norm_a + norm_b) && (std::abs(a[0] - b[0]) > allowed || std::abs(norm_a - norm_b) > allowed);
}

void require_equal_in(const StateGroup& group, int64_t step, MeshComm& comms, const ParallelState& parallel) {
  const Replicas own = find_replicas(group.buckets);
  if (own.names.empty()) return;
  group.all_reduce(own.sums, Reduce::sum);
  const int64_t parts = parallel.parts(), count = std::ssize(own.names);
  at::Tensor all = at::empty({parts * count, 2}, at::kDouble);
  comms.along({parallel.axis()}).all_gather(all, own.sums).wait();
  const double* sums = all.const_data_ptr<double>();
  for (int64_t i = 0; i < count; ++i)
    for (int64_t part = 1; part < parts; ++part) {
      const double *first = sums + 2 * i, *other = sums + 2 * (part * count + i);
      SHARD_REQUIRE(
          !differ(first, other), "tensor_parallel",
          "rank {}, step {}: every rank along {} has the whole parameter {}, and their gradients differ: ranks 0 and {} of "
          "the axis have gradients of norm {} and {}, and would train it apart. Where its module computes on what a cut gave "
          "it, as a norm of the queries of some heads does, give the module the style PartialGradients; where it sees a "
          "piece of the sequence, SequenceParallel. Otherwise the ranks were given different batches or drew different "
          "random numbers. The plan's compare_replicas = false (in Python False) leaves this check out",
          comms.rank(), step, parallel.axis(), own.names[static_cast<size_t>(i)], part, std::sqrt(first[1]),
          std::sqrt(other[1]));
    }
}

}  // namespace

void require_equal_replicas(const Schedule& schedule, MeshComm& comms, const ParallelState& parallel) {
  const at::NoGradGuard no_grad;
  const CallLabel label("the comparison of whole parameters' gradients");
  for (const StateGroup& group : state_groups(schedule)) require_equal_in(group, schedule.current_step(), comms, parallel);
}

}  // namespace shardproof
