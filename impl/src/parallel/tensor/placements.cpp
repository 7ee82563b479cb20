#include "parallel/tensor/placements.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "parallel/kept_group.h"
#include "shardproof/base/check.h"
#include "shardproof/nn/attention.h"
#include "shardproof/nn/dropout.h"
#include "shardproof/parallel/collective_ops.h"

namespace shardproof {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

std::shared_ptr<ParallelState> alive(const std::weak_ptr<ParallelState>& state) {
  const auto owner = state.lock();
  SHARD_REQUIRE(owner, "tensor_parallel",
                "dropout on a cut whose TensorParallel was destroyed; keep it as long as the module runs");
  return owner;
}

void require_dim(const std::vector<DimRows>& dims, int64_t dim, int64_t expected) {
  SHARD_REQUIRE(dim >= 0 && dim < std::ssize(dims) && dims[dim].length == expected, "tensor_parallel",
                "dropout on a tensor of {} dims that must have {} rows along dim {}, and has {}", dims.size(), expected, dim,
                dim >= 0 && dim < std::ssize(dims) ? dims[dim].length : -1);
}

// A piece of the sequence.
class SequencePlacement final : public RowPlacement {
 public:
  explicit SequencePlacement(std::weak_ptr<ParallelState> state) : state_(std::move(state)) {}
  void to_whole(std::vector<DimRows>& dims) const override {
    const auto owner = alive(state_);
    const int64_t dim = *owner->plan().sequence_dim;
    const int64_t local = dim < std::ssize(dims) ? dims[dim].length : 0, length = owner->sequence_length(local);
    const Interval own = piece({}, length, owner->parts(), owner->part());
    require_dim(dims, dim, own.size());
    for (int64_t& row : dims[dim].rows) row += own.begin;
    dims[dim].length = length;
  }

 private:
  std::weak_ptr<ParallelState> state_;
};

// What a column-parallel layer gave.
class CutPlacement final : public RowPlacement {
 public:
  CutPlacement(std::weak_ptr<ParallelState> state, CutDropout style) : state_(std::move(state)), style_(std::move(style)) {}
  void to_whole(std::vector<DimRows>& dims) const override {
    const auto owner = alive(state_);
    const int64_t dim = style_.dim < 0 ? style_.dim + std::ssize(dims) : style_.dim;
    const DimCut cut = owner->dim_cut(style_.segments);
    const DimRows whole{cut.positions(owner->part()), cut.length};
    require_dim(dims, dim, std::ssize(whole.rows));
    for (int64_t& row : dims[dim].rows) row = whole.rows[static_cast<size_t>(row)];
    dims[dim].length = whole.length;
  }

 private:
  std::weak_ptr<ParallelState> state_;
  CutDropout style_;
};

class CutDropoutHooks final : public StyleHooks {
 public:
  CutDropoutHooks(const std::shared_ptr<ParallelState>& owner, const std::string& name, torch::nn::Module& module,
                  const CutDropout& style)
      : StyleHooks(owner) {
    auto* aware = dynamic_cast<PlacementAware*>(&module);
    SHARD_REQUIRE(aware, "tensor_parallel", "style CutDropout needs a Dropout or an Attention, and module '{}' is {}", name,
                  module.name());
    const DimCut cut = owner->dim_cut(style.segments);
    validate(cut.split, cut.length, cut.parts, fmt::format("dropout of module '{}'", name));
    aware->tensor_placement = std::make_shared<CutPlacement>(owner, style);
  }
  at::Tensor run(const Forward& forward, at::Tensor x) override { return forward(std::move(x)); }
  bool only_places() const override { return true; }
};

// Keys and values as they are; gradients summed for the first rank of the group, the others get zeros. Both in one collective,
// for the order in which a backward would enter two is not the same on every rank.
struct SumToFirst : torch::autograd::Function<SumToFirst> {
  static variable_list forward(AutogradContext* ctx, const Variable& k, const Variable& v, const std::string& what,
                               Comm* group) {
    keep_group(ctx, *group);
    ctx->saved_data["what"] = what;
    return {k.view_as(k), v.view_as(v)};
  }
  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    Comm& group = group_in(ctx);
    const auto exact = collective::Sum::exact(ctx->saved_data["what"].toStringRef());
    const at::Tensor sum = collective::start_all_reduce(at::stack({dys[0], dys[1]}), group, exact).result();
    const at::Tensor own = group.rank() == 0 ? sum : at::zeros_like(sum);
    return {own[0], own[1], {}, {}};
  }
};

// The ranks that hold copies of a key head.
class CopiesAlong final : public CopiedKeys {
 public:
  explicit CopiesAlong(Comm& group) : group_(group.shared()) {}
  std::pair<at::Tensor, at::Tensor> summing(const at::Tensor& k, const at::Tensor& v, const std::string& name) const override {
    const auto both = SumToFirst::apply(k, v, name + ", gradient of the input", group_.get());
    return {both[0], both[1]};
  }

 private:
  std::shared_ptr<Comm> group_;
};

class CutAttentionHooks final : public StyleHooks {
 public:
  CutAttentionHooks(const std::shared_ptr<ParallelState>& owner, const std::string& name, torch::nn::Module& module,
                    const CutAttention& style)
      : StyleHooks(owner) {
    auto* attention = dynamic_cast<AttentionImpl*>(&module);
    SHARD_REQUIRE(attention, "tensor_parallel", "style CutAttention needs an Attention, and module '{}' is {}", name,
                  module.name());
    const auto require_valid = [&](const std::vector<CutSegment>& segments, const char* what) {
      const DimCut cut = owner->dim_cut(segments);
      validate(cut.split, cut.length, cut.parts, fmt::format("{} of module '{}'", what, name));
    };
    require_valid(style.heads, "heads");
    require_valid(style.kv_heads, "kv_heads");
    attention->tensor_placement = std::make_shared<CutPlacement>(owner, CutDropout{1, style.heads});
    const int64_t copies = copies_held(owner->split(style.kv_heads), owner->parts());
    if (!owner->canonical || copies == 1) return;
    attention->copied_keys = std::make_shared<CopiesAlong>(owner->comms().within(owner->axis(), copies));
    owner->sums_copied_keys = true;
  }
  at::Tensor run(const Forward& forward, at::Tensor x) override { return forward(std::move(x)); }
  bool only_places() const override { return true; }
};

}  // namespace

void place_along_sequence(const std::shared_ptr<ParallelState>& state, torch::nn::Module& module) {
  for (const auto& part : module.modules(/*include_self=*/true))
    if (auto* dropout = dynamic_cast<DropoutImpl*>(part.get()))
      dropout->tensor_placement = std::make_shared<SequencePlacement>(state);
}

std::shared_ptr<StyleHooks> cut_dropout(const std::shared_ptr<ParallelState>& state, const std::string& name,
                                        torch::nn::Module& module, const CutDropout& style) {
  return std::make_shared<CutDropoutHooks>(state, name, module, style);
}

std::shared_ptr<StyleHooks> cut_attention(const std::shared_ptr<ParallelState>& state, const std::string& name,
                                          torch::nn::Module& module, const CutAttention& style) {
  return std::make_shared<CutAttentionHooks>(state, name, module, style);
}

}  // namespace shardproof
