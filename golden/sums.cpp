#include "golden/sums.h"

#include <ATen/ATen.h>

namespace golden {
namespace {

constexpr double kFixedPointScale = 0x1p44;

Tensors converted(const Tensors& tensors, at::ScalarType dtype) {
  Tensors result;
  for (const at::Tensor& t : tensors) result.push_back(t.to(dtype, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous));
  return result;
}

// The first term is taken as it is, the rest are added: zeros keep their sign.
void add(Tensors& sum, const Tensors& terms) {
  if (sum.empty()) {
    sum = terms;
    return;
  }
  for (size_t i = 0; i < terms.size(); ++i) sum[i] = sum[i] + terms[i];
}

// The sum of what ranks hold, as it comes off the wire, in `gradient`.
Tensors reduced(const std::vector<Tensors>& ranks, const Precision& precision) {
  if (ranks.size() == 1) return ranks[0];
  Tensors sum;
  for (const Tensors& terms : ranks) {
    const Tensors wire = converted(terms, precision.reduce);
    add(sum, precision.float32_sums ? converted(wire, at::kFloat) : wire);
  }
  return converted(converted(sum, precision.reduce), precision.gradient);
}

Tensors canonical(const Step& step, const std::function<Tensors(size_t, size_t)>& gradients) {
  Tensors sum;
  for (size_t round = 0; round < step.microbatches.size(); ++round)
    for (size_t rank = 0; rank < step.microbatches[round].size(); ++rank) {
      Tensors terms;
      for (const at::Tensor& g : gradients(round, rank)) terms.push_back((g.to(at::kDouble) * kFixedPointScale).round().to(at::kLong));
      add(sum, terms);
    }
  for (at::Tensor& s : sum) s = s.to(at::kFloat) / kFixedPointScale;
  return sum;
}

}  // namespace

Tensors summed_gradients(const Step& step, const SumOrder& order, const Precision& given, at::ScalarType dtype,
                         const std::function<Tensors(size_t round, size_t rank)>& gradients) {
  if (order.canonical && dtype == at::kFloat) return canonical(step, gradients);
  const Precision precision = dtype == at::kFloat ? given : Precision{dtype, dtype, dtype, false};
  const size_t rounds = step.microbatches.size(), ranks = step.microbatches.front().size();
  const auto shards = static_cast<size_t>(order.shards);
  std::vector<Tensors> local(ranks);            // since the last reduction
  std::vector<Tensors> replicas(ranks / shards);  // over reductions, when replicas come last
  Tensors total;
  for (size_t round = 0; round < rounds; ++round) {
    for (size_t rank = 0; rank < ranks; ++rank) add(local[rank], converted(gradients(round, rank), precision.gradient));
    const bool reduces = round + 1 == rounds || (!step.reduce_after.empty() && step.reduce_after[round]);
    if (!reduces) continue;
    if (step.divide_before != 1)
      for (Tensors& terms : local)
        for (at::Tensor& term : terms) term = term / at::scalar_tensor(step.divide_before, at::kDouble).to(term.scalar_type());
    std::vector<Tensors> sums;
    for (size_t replica = 0; replica < replicas.size(); ++replica)
      sums.push_back(reduced({local.begin() + static_cast<int64_t>(replica * shards),
                              local.begin() + static_cast<int64_t>((replica + 1) * shards)}, precision));
    local.assign(ranks, {});
    if (!order.replicas_last) add(total, reduced(sums, precision));
    else
      for (size_t replica = 0; replica < replicas.size(); ++replica) add(replicas[replica], sums[replica]);
  }
  if (order.replicas_last) total = reduced(replicas, precision);
  return converted(total, dtype);
}

}  // namespace golden
