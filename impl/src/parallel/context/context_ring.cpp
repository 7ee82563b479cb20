#include "parallel/context/context_ring.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <cmath>

#include "shardproof/base/check.h"
#include "shardproof/nn/dropout_mask.h"

namespace shardproof {
namespace {

// q in the dtype of sums, times what scores are scaled by.
at::Tensor scaled(const at::Tensor& q, double scale) {
  return q.to(at::toOpMathType(q.scalar_type())) * scale;
}
double scale_of(const at::Tensor& q) {
  return 1 / std::sqrt(static_cast<double>(q.size(-1)));
}

}  // namespace

ContextRing::ContextRing(const DimCut& cut, AttentionSight sight, std::optional<AttentionDropout> dropout, Comm& group)
    : ring_(cut, group), sight_(std::move(sight)), dropout_(std::move(dropout)) {}

at::Tensor ContextRing::Run::rows(c10::Device device) const {
  return at::arange(positions.begin, positions.end, at::TensorOptions(at::kLong).device(device));
}

std::vector<ContextRing::Run> ContextRing::runs_of(int64_t rank) const {
  std::vector<Run> runs;
  int64_t local = 0;
  for (const SplitRun& run : ring_.cut().runs(rank)) {
    const Interval positions = run.whole;
    runs.push_back({positions, local});
    local += positions.size();
  }
  return runs;
}

bool ContextRing::hides(const Run& queries, const Run& keys) const {
  const bool later = sight_.causal && queries.positions.end <= keys.positions.begin;
  return later || (sight_.window > 0 && keys.positions.end <= queries.positions.begin - sight_.window + 1);
}

Block ContextRing::block(const Run& queries, const Run& keys, const at::Tensor& both) const {
  const auto dtype = at::toOpMathType(both.scalar_type());
  Block block{keys.of(both[0]).to(dtype), keys.of(both[1]).to(dtype), {}};
  const bool all = sight_.sees_all_before(queries.positions.end - keys.positions.begin) &&
                   (!sight_.causal || keys.positions.end <= queries.positions.begin);
  if (!all) block.hidden = sight_.hidden(queries.rows(both.device()), keys.rows(both.device()));
  if (!dropout_) return block;
  const auto rows = [&](const Run& run) {
    DimRows dim{{}, ring_.cut().length};
    for (int64_t position = run.positions.begin; position < run.positions.end; ++position) dim.rows.push_back(position);
    return dim;
  };
  const std::vector<DimRows> dims = {dropout_->samples, dropout_->heads, rows(queries), rows(keys)};
  block.mask = grouped_rows(dropout_mask(dropout_->site, dims, dtype, both.device()), both.size(2));
  return block;
}

std::pair<at::Tensor, at::Tensor> ContextRing::forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const {
  const std::vector<Run> own = runs_of(ring_.rank());
  const at::Tensor queries = scaled(q, scale_of(q));
  std::vector<RunningSoftmax> softmax;
  for (const Run& run : own) softmax.emplace_back(grouped_rows(run.of(queries), k.size(1)));
  ring_.go_round(at::stack({k, v}), [&](const at::Tensor& both, int64_t source) {
    for (const Run& keys : runs_of(source))
      for (size_t i = 0; i < own.size(); ++i)
        if (!hides(own[i], keys)) softmax[i].add(block(own[i], keys, both));
  });
  at::Tensor output = at::empty_like(q, at::MemoryFormat::Contiguous);
  at::Tensor log_sum = at::empty({q.size(0), q.size(1), q.size(2), 1}, queries.options());
  for (size_t i = 0; i < own.size(); ++i) {
    own[i].of(output).copy_(heads_of_rows(softmax[i].output(), q.size(1)));
    own[i].of(log_sum).copy_(heads_of_rows(softmax[i].log_sum(), q.size(1)));
  }
  return {output, log_sum};
}

ContextRing::Gradients ContextRing::backward(const Kept& kept, const at::Tensor& output_gradient) const {
  const int64_t kv_heads = kept.k.size(1), heads = kept.q.size(1);
  const double scale = scale_of(kept.q);
  const at::Tensor queries = scaled(kept.q, scale), gradient = output_gradient.to(queries.scalar_type());
  const at::Tensor delta = (gradient * kept.output).sum(-1, /*keepdim=*/true);
  const std::vector<Run> own = runs_of(ring_.rank());
  const at::Tensor own_keys = at::stack({kept.k, kept.v});
  at::Tensor of_queries = at::zeros_like(queries, at::MemoryFormat::Contiguous);
  const auto visit = [&](const at::Tensor& both, const at::Tensor& of_both, int64_t source) {
    for (const Run& keys : runs_of(source))
      for (const Run& run : own) {
        if (hides(run, keys)) continue;
        const auto rows = [&](const at::Tensor& x) { return grouped_rows(run.of(x), kv_heads); };
        const BlockGradients add =
            block_backward(rows(queries), block(run, keys, both), rows(kept.log_sum), rows(delta), rows(gradient));
        run.of(of_queries).add_(heads_of_rows(add.q, heads), scale);
        keys.of(of_both[0]).add_(add.k);
        keys.of(of_both[1]).add_(add.v);
      }
  };
  const at::Tensor of_both = ring_.go_round_adding(own_keys, at::zeros(own_keys.sizes(), queries.options()), visit);
  const auto dtype = kept.q.scalar_type();
  return {of_queries.to(dtype), of_both[0].to(dtype), of_both[1].to(dtype)};
}

}  // namespace shardproof
