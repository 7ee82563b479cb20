#include "shardproof/parallel/context/context_attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "parallel/context/context_ring.h"
#include "parallel/context/exact_ring.h"
#include "shardproof/base/check.h"
#include "shardproof/nn/dropout_mask.h"
#include "shardproof/parallel/collective_ops.h"

namespace shardproof {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

void require_own(const at::Tensor& x, int64_t dim, const DimCut& cut, const Comm& group, const char* what) {
  SHARD_REQUIRE(cut.parts == group.size(), "context_parallel", "a cut for {} ranks on the {} ranks of '{}'", cut.parts,
                group.size(), group.name());
  SHARD_REQUIRE(dim >= 0 && dim < x.dim() && x.size(dim) == cut.count(group.rank()), "context_parallel",
                "{}: rank {} of {} in '{}' must hold {} of the {} positions along dim {}, and holds sizes {}. Cut whole "
                "sequences with ContextParallel::cut, which also says how long they are",
                what, group.rank(), group.size(), group.name(), cut.count(group.rank()), cut.length, dim,
                fmt::join(x.sizes(), "x"));
}

int64_t most_positions(const DimCut& cut) {
  int64_t most = 0;
  for (int64_t rank = 0; rank < cut.parts; ++rank) most = std::max(most, cut.count(rank));
  return most;
}

// Where each position is among the ranks' rows behind each other, `most` of each.
at::Tensor places(const DimCut& cut, int64_t most, c10::Device device) {
  std::vector<int64_t> place(static_cast<size_t>(cut.length));
  for (int64_t rank = 0; rank < cut.parts; ++rank) {
    int64_t row = rank * most;
    for (const int64_t position : cut.positions(rank)) place[static_cast<size_t>(position)] = row++;
  }
  return at::tensor(place, at::kLong).to(device);
}

// Every rank's positions of x, in order, with zeros for those that a rank has fewer of while they are on the way. `sum`: of the
// gradients.
at::Tensor gathered(const at::Tensor& own, int64_t dim, const DimCut& cut, Comm& group, const collective::Sum& sum = {}) {
  if (group.size() == 1) return own;
  const int64_t most = most_positions(cut);
  at::Tensor rows = own.movedim(dim, 0);
  if (const int64_t missing = most - rows.size(0); missing > 0) {
    std::vector<int64_t> sizes = rows.sizes().vec();
    sizes[0] = missing;
    rows = at::cat({rows, at::zeros(sizes, rows.options())});
  }
  const at::Tensor all = collective::all_gather(rows, 0, most * group.size(), group, sum);
  return all.index_select(0, places(cut, most, own.device())).movedim(0, dim);
}

struct RingAttention : torch::autograd::Function<RingAttention> {
  static Variable forward(AutogradContext* ctx, const Variable& q, const Variable& k, const Variable& v,
                          const c10::intrusive_ptr<ContextRing>& ring) {
    const auto [output, log_sum] = ring->forward(q, k, v);
    ctx->save_for_backward({q, k, v, output, log_sum});
    ctx->saved_data["ring"] = c10::IValue::make_capsule(ring);
    return output;
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    const variable_list saved = ctx->get_saved_variables();
    const auto ring = c10::static_intrusive_pointer_cast<ContextRing>(ctx->saved_data["ring"].toCapsule());
    const ContextRing::Gradients gradients = ring->backward({saved[0], saved[1], saved[2], saved[3], saved[4]}, dy[0]);
    return {gradients.q, gradients.k, gradients.v, {}};
  }
};

struct ExactRingAttention : torch::autograd::Function<ExactRingAttention> {
  static Variable forward(AutogradContext* ctx, const Variable& q, const Variable& k, const Variable& v,
                          const c10::intrusive_ptr<ExactRing>& ring) {
    const ExactRing::Kept kept = ring->forward(q, k, v);
    ctx->save_for_backward({kept.q, kept.k, kept.v, kept.output, kept.most, kept.divisor});
    ctx->saved_data["ring"] = c10::IValue::make_capsule(ring);
    return kept.output;
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    const variable_list saved = ctx->get_saved_variables();
    const auto ring = c10::static_intrusive_pointer_cast<ExactRing>(ctx->saved_data["ring"].toCapsule());
    const ExactRing::Gradients gradients =
        ring->backward({saved[0], saved[1], saved[2], saved[3], saved[4], saved[5]}, dy[0]);
    return {gradients.q, gradients.k, gradients.v, {}};
  }
};

}  // namespace

at::Tensor context_piece(const at::Tensor& x, int64_t dim, const DimCut& cut, int64_t rank) {
  SHARD_REQUIRE(dim >= -x.dim() && dim < x.dim() && x.size(dim) == cut.length, "context_parallel",
                "a tensor of sizes {} does not have {} positions along dim {}", fmt::join(x.sizes(), "x"), cut.length, dim);
  return x.index_select(dim, at::tensor(cut.positions(rank), at::kLong).to(x.device()));
}

at::Tensor context_gather(const at::Tensor& own, int64_t dim, const DimCut& cut, Comm& group) {
  if (dim < 0) dim += own.dim();
  require_own(own, dim, cut, group, "context_gather");
  return gathered(own, dim, cut, group);
}

at::Tensor gathered_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut, bool causal,
                              const std::optional<AttentionDropout>& dropout, Comm& group) {
  for (const at::Tensor* x : {&q, &k, &v}) require_own(*x, 2, cut, group, "gathered_attention");
  // In one collective, for the order in which a backward would enter two is not the same on every rank.
  const at::Tensor both = context_gather(at::cat({k, v}, 1), 2, cut, group);
  const DimRows own{cut.positions(group.rank()), cut.length}, all = whole_rows(cut.length);
  at::Tensor allowed;
  if (causal) {
    const at::Tensor positions = at::tensor(own.rows, at::kLong);
    allowed = (at::arange(cut.length, at::kLong).unsqueeze(0) <= positions.unsqueeze(1)).to(q.device());
  }
  return masked_attention(q, both.narrow(1, 0, k.size(1)), both.narrow(1, k.size(1), v.size(1)), allowed, dropout, own, all);
}

at::Tensor canonical_gathered_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut,
                                        bool causal, const std::optional<AttentionDropout>& dropout, const std::string& name,
                                        Comm& group) {
  for (const at::Tensor* x : {&q, &k, &v}) require_own(*x, 2, cut, group, "canonical_gathered_attention");
  const auto sum = collective::Sum::exact(name + ", gradients of keys and values");
  const at::Tensor both = gathered(at::cat({k, v}, 1), 2, cut, group, sum);
  const DimRows own{cut.positions(group.rank()), cut.length};
  at::Tensor mask;
  if (dropout)
    mask =
        dropout_mask(dropout->site, {dropout->samples, dropout->heads, own, whole_rows(cut.length)}, at::kDouble, q.device());
  return canonical_ops::attention(q, both.narrow(1, 0, k.size(1)), both.narrow(1, k.size(1), v.size(1)), own.rows, causal, name,
                                  mask);
}

at::Tensor canonical_ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut,
                                    bool causal, const std::optional<AttentionDropout>& dropout, const std::string& name,
                                    Comm& group) {
  for (const at::Tensor* x : {&q, &k, &v}) require_own(*x, 2, cut, group, "canonical_ring_attention");
  return ExactRingAttention::apply(q, k, v, c10::make_intrusive<ExactRing>(cut, causal, dropout, name, group));
}

at::Tensor ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut, bool causal,
                          const std::optional<AttentionDropout>& dropout, Comm& group) {
  for (const at::Tensor* x : {&q, &k, &v}) require_own(*x, 2, cut, group, "ring_attention");
  return RingAttention::apply(q, k, v, c10::make_intrusive<ContextRing>(cut, causal, dropout, group));
}

}  // namespace shardproof
