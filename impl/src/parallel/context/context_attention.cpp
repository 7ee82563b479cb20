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

void require_own(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut, const AttentionSight& sight,
                 const Comm& group, const char* what) {
  SHARD_REQUIRE(q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() && q.size(0) == k.size(0) && k.size(1) > 0 &&
                    q.size(1) % k.size(1) == 0 && q.size(3) == k.size(3),
                "context_parallel",
                "{}: needs q [B, heads, T, head] and k, v of a divisor of the heads, got {}, {} and {} on rank {} of '{}'",
                what, fmt::join(q.sizes(), "x"), fmt::join(k.sizes(), "x"), fmt::join(v.sizes(), "x"), group.rank(),
                group.name());
  for (const at::Tensor* x : {&q, &k, &v}) require_own(*x, 2, cut, group, what);
  sight.require_fit(q.size(0), cut.length);
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

// x with zeros behind what it has of dim, up to `length`.
at::Tensor padded(const at::Tensor& x, int64_t dim, int64_t length) {
  if (x.size(dim) == length) return x;
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes[static_cast<size_t>(dim)] = length - x.size(dim);
  return at::cat({x, at::zeros(sizes, x.options())}, dim);
}

// Every rank's positions of x, in order, with zeros for those that a rank has fewer of while they are on the way. `sum`: of the
// gradients.
at::Tensor gathered(const at::Tensor& own, int64_t dim, const DimCut& cut, Comm& group, const collective::Sum& sum = {}) {
  if (group.size() == 1) return own;
  const int64_t most = most_positions(cut);
  const at::Tensor rows = padded(own.movedim(dim, 0), 0, most);
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

// The position of each of the ranks' rows behind each other, `most` of each; rows that a rank has too many are the first
// position once more.
at::Tensor positions_by_rank(const DimCut& cut, int64_t most, c10::Device device) {
  std::vector<int64_t> rows;
  for (int64_t rank = 0; rank < cut.parts; ++rank) {
    const std::vector<int64_t> positions = cut.positions(rank);
    rows.insert(rows.end(), positions.begin(), positions.end());
    rows.resize(static_cast<size_t>((rank + 1) * most), 0);
  }
  return at::tensor(rows, at::kLong).to(device);
}

// attend(q, k, v, dropout) of whole sequences of this rank's share of the heads; what it gives goes back to the positions. A
// key head and the query heads that it serves stay together, so no rank has a part of a key's gradient.
template <class Attend>
at::Tensor exchanging_heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut,
                            std::optional<AttentionDropout> dropout, Comm& group, const Attend& attend) {
  if (group.size() == 1) return attend(q, k, v, dropout);
  constexpr int64_t kHeads = 1, kPositions = 3;  // of [B, key heads, queries of each, then key and value, T, head]
  const int64_t kv_heads = k.size(1), served = q.size(1) / kv_heads, most = most_positions(cut), rows = most * group.size();
  // In one collective, as in gathered_attention.
  const at::Tensor own = at::cat({q.unflatten(1, {kv_heads, served}), k.unsqueeze(2), v.unsqueeze(2)}, 2);
  const at::Tensor by_rank = collective::all_to_all(padded(own, kPositions, most), kHeads, kPositions, rows, group);
  const at::Tensor whole = by_rank.index_select(kPositions, places(cut, most, q.device()));
  if (dropout) {
    const Interval heads = piece({}, kv_heads, group.size(), group.rank());
    std::vector<int64_t>& all = dropout->heads.rows;
    all = {all.begin() + heads.begin * served, all.begin() + heads.end * served};
  }
  const at::Tensor queries = whole.narrow(2, 0, served).flatten(1, 2);
  const at::Tensor attended =
      queries.size(1) == 0 ? queries : attend(queries, whole.select(2, served), whole.select(2, served + 1), dropout);
  const at::Tensor back = attended.unflatten(1, {queries.size(1) / served, served})
                              .index_select(kPositions, positions_by_rank(cut, most, q.device()));
  return collective::all_to_all(back, kPositions, kHeads, kv_heads, group).narrow(kPositions, 0, q.size(2)).flatten(1, 2);
}

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

at::Tensor gathered_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut,
                              const AttentionSight& sight, const std::optional<AttentionDropout>& dropout, Comm& group) {
  require_own(q, k, v, cut, sight, group, "gathered_attention");
  // In one collective, for the order in which a backward would enter two is not the same on every rank.
  const at::Tensor both = context_gather(at::cat({k, v}, 1), 2, cut, group);
  const DimRows own{cut.positions(group.rank()), cut.length};
  const at::Tensor queries = at::tensor(own.rows, at::kLong).to(q.device()),
                   keys = at::arange(cut.length, q.options().dtype(at::kLong));
  return masked_attention(q, both.narrow(1, 0, k.size(1)), both.narrow(1, k.size(1), v.size(1)), sight.hidden(queries, keys),
                          dropout, own, whole_rows(cut.length));
}

at::Tensor canonical_gathered_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut,
                                        const AttentionSight& sight, const std::optional<AttentionDropout>& dropout,
                                        const std::string& name, Comm& group) {
  require_own(q, k, v, cut, sight, group, "canonical_gathered_attention");
  const auto sum = collective::Sum::exact(name + ", gradients of keys and values");
  const at::Tensor both = gathered(at::cat({k, v}, 1), 2, cut, group, sum);
  const DimRows own{cut.positions(group.rank()), cut.length};
  at::Tensor mask;
  if (dropout)
    mask =
        dropout_mask(dropout->site, {dropout->samples, dropout->heads, own, whole_rows(cut.length)}, at::kDouble, q.device());
  const at::Tensor hidden = sight.hidden_besides(own.rows, whole_rows(cut.length).rows, cut.length, q.device());
  return canonical_ops::attention(q, both.narrow(1, 0, k.size(1)), both.narrow(1, k.size(1), v.size(1)), own.rows, sight.causal,
                                  name, mask, hidden);
}

at::Tensor ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut,
                          const AttentionSight& sight, const std::optional<AttentionDropout>& dropout, Comm& group) {
  require_own(q, k, v, cut, sight, group, "ring_attention");
  return RingAttention::apply(q, k, v, c10::make_intrusive<ContextRing>(cut, sight, dropout, group));
}

at::Tensor canonical_ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut,
                                    const AttentionSight& sight, const std::optional<AttentionDropout>& dropout,
                                    const std::string& name, Comm& group) {
  require_own(q, k, v, cut, sight, group, "canonical_ring_attention");
  return ExactRingAttention::apply(q, k, v, c10::make_intrusive<ExactRing>(cut, sight, dropout, name, group));
}

at::Tensor ulysses_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut,
                             const AttentionSight& sight, const std::optional<AttentionDropout>& dropout, Comm& group) {
  require_own(q, k, v, cut, sight, group, "ulysses_attention");
  const auto attend = [&](const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, const auto& of_heads) {
    return whole_attention(queries, keys, values, sight, of_heads);
  };
  return exchanging_heads(q, k, v, cut, dropout, group, attend);
}

at::Tensor canonical_ulysses_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut,
                                       const AttentionSight& sight, const std::optional<AttentionDropout>& dropout,
                                       const std::string& name, Comm& group) {
  require_own(q, k, v, cut, sight, group, "canonical_ulysses_attention");
  // On every rank, also on those that get no heads and would not look.
  for (const at::Tensor* x : {&q, &k, &v}) fixed::require_double(*x, name);
  fixed::require_terms(std::max(cut.length, q.size(3)), name);
  const auto attend = [&](const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, const auto& of_heads) {
    return canonical_whole_attention(queries, keys, values, sight, of_heads, name);
  };
  return exchanging_heads(q, k, v, cut, dropout, group, attend);
}

}  // namespace shardproof
